package main

import (
	"fmt"
	"image/color"
	"os"
	"path/filepath"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	vgdraw "gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"

	"membrane/bench/replay"
)

// policyColours are told apart also by who sees few colors (Okabe, Ito).
var policyColours = map[string]color.RGBA{
	replay.Membrane:  {0, 114, 178, 255},
	replay.LRU:       {213, 94, 0, 255},
	replay.LRUHeads:  {230, 159, 0, 255},
	replay.Ristretto: {0, 158, 115, 255},
	replay.Optimum:   {120, 120, 120, 255},
}

// plotReplay draws hit ratio against memory, one panel a trace, into
// hit-ratio.svg and hit-ratio.png of a folder.
func plotReplay(r replay.Report, dir string) error {
	path := filepath.Join(dir, "hit-ratio")
	const columns = 2
	rows := (len(r.Traces) + columns - 1) / columns
	if rows == 0 {
		return fmt.Errorf("cannot plot %q: the report has no trace", path)
	}
	grid := make([][]*plot.Plot, rows)
	for i := range grid {
		grid[i] = make([]*plot.Plot, columns)
	}
	for i := range r.Traces {
		p, err := panel(r, &r.Traces[i], i == 0)
		if err != nil {
			return fmt.Errorf("cannot plot %q: %w", path, err)
		}
		grid[i/columns][i%columns] = p
	}
	width, height := 22*vg.Centimeter, vg.Length(rows)*8*vg.Centimeter
	paint := func(c vgdraw.Canvas) {
		tiles := vgdraw.Tiles{Rows: rows, Cols: columns, PadX: vg.Centimeter, PadY: vg.Centimeter / 2, PadTop: vg.Points(6), PadBottom: vg.Points(4), PadLeft: vg.Points(4), PadRight: vg.Points(8)}
		canvases := plot.Align(grid, tiles, c)
		for i := range grid {
			for k, p := range grid[i] {
				if p != nil {
					p.Draw(canvases[i][k])
				}
			}
		}
	}
	return save(path, width, height, paint)
}

// save paints a plot into path.svg and path.png.
func save(path string, width, height vg.Length, paint func(vgdraw.Canvas)) error {
	svg := vgsvg.New(width, height)
	paint(vgdraw.New(svg))
	png := vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(width, height), vgimg.UseDPI(120))}
	paint(vgdraw.New(png.Canvas))
	for _, f := range []struct {
		ext   string
		write func(*os.File) error
	}{
		{".svg", func(f *os.File) error { _, err := svg.WriteTo(f); return err }},
		{".png", func(f *os.File) error { _, err := png.WriteTo(f); return err }},
	} {
		if err := writeFile(path+f.ext, f.write); err != nil {
			return err
		}
	}
	return nil
}

func writeFile(path string, write func(*os.File) error) error {
	f, err := os.Create(filepath.Clean(path))
	if err != nil {
		return fmt.Errorf("cannot write plot: %w", err)
	}
	err = write(f)
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("cannot write plot %q: %w", path, err)
	}
	return nil
}

func panel(r replay.Report, t *replay.TraceReport, legend bool) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = t.Name
	p.X.Label.Text = "memory, % of the distinct blocks"
	p.Y.Label.Text = "hit ratio in tokens"
	p.X.Min, p.Y.Min = 0, 0
	p.X.Scale = plot.LinearScale{}
	p.Add(plotter.NewGrid())
	by := t.ByFraction()
	for i := range r.Policies { // the first is drawn last, on top
		about := r.Policies[len(r.Policies)-1-i]
		var points plotter.XYs
		for _, f := range t.Fractions() {
			if c, ok := by[f][about.Name]; ok {
				points = append(points, plotter.XY{X: 100 * f, Y: c.HitRatio})
			}
		}
		if len(points) == 0 || about.Name == replay.LRUHeads { // on top of replay.LRU
			continue
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, err
		}
		line.Color, dots.Color = policyColours[about.Name], policyColours[about.Name]
		line.Width = vg.Points(1.5)
		dots.Shape = vgdraw.CircleGlyph{}
		if about.Name == replay.Optimum {
			line.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
		}
		p.Add(line, dots)
		if legend {
			p.Legend.Add(about.Name, line, dots)
		}
	}
	p.Y.Min = 0
	p.Y.Max = 1
	if t.Facts.Reusable < 0.55 {
		p.Y.Max = 0.6
	}
	p.X.Min = 0
	p.Legend.Top = false
	return p, nil
}
