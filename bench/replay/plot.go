package replay

import (
	"fmt"
	"image/color"
	"os"
	"path/filepath"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"
)

// colors of the policies, told apart also by who sees few colors (Okabe, Ito).
var colors = map[string]color.RGBA{
	Membrane:  {0, 114, 178, 255},
	LRU:       {213, 94, 0, 255},
	LRUHeads:  {230, 159, 0, 255},
	Ristretto: {0, 158, 115, 255},
	Optimum:   {120, 120, 120, 255},
}

// Plots draws hit ratio against memory, one panel a trace, and writes
// NAME.svg and NAME.png for a path NAME.
func (r Report) Plots(path string) error {
	const columns = 2
	rows := (len(r.Traces) + columns - 1) / columns
	if rows == 0 {
		return fmt.Errorf("cannot plot %q: %w", path, ErrNoRequests)
	}
	grid := make([][]*plot.Plot, rows)
	for i := range grid {
		grid[i] = make([]*plot.Plot, columns)
	}
	for i := range r.Traces {
		p, err := r.panel(&r.Traces[i], i == 0)
		if err != nil {
			return fmt.Errorf("cannot plot %q: %w", path, err)
		}
		grid[i/columns][i%columns] = p
	}
	width, height := 22*vg.Centimeter, vg.Length(rows)*8*vg.Centimeter
	paint := func(c draw.Canvas) {
		tiles := draw.Tiles{Rows: rows, Cols: columns, PadX: vg.Centimeter, PadY: vg.Centimeter / 2, PadTop: vg.Points(6), PadBottom: vg.Points(4), PadLeft: vg.Points(4), PadRight: vg.Points(8)}
		canvases := plot.Align(grid, tiles, c)
		for i := range grid {
			for k, p := range grid[i] {
				if p != nil {
					p.Draw(canvases[i][k])
				}
			}
		}
	}
	svg := vgsvg.New(width, height)
	paint(draw.New(svg))
	png := vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(width, height), vgimg.UseDPI(120))}
	paint(draw.New(png.Canvas))
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

func (r Report) panel(t *TraceReport, legend bool) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = t.Name
	p.X.Label.Text = "memory, % of the distinct blocks"
	p.Y.Label.Text = "hit ratio in tokens"
	p.X.Min, p.Y.Min = 0, 0
	p.X.Scale = plot.LinearScale{}
	p.Add(plotter.NewGrid())
	by := t.byFraction()
	for i := range r.Policies { // the first is drawn last, on top
		about := r.Policies[len(r.Policies)-1-i]
		var points plotter.XYs
		for _, f := range t.fractions() {
			if c, ok := by[f][about.Name]; ok {
				points = append(points, plotter.XY{X: 100 * f, Y: c.HitRatio})
			}
		}
		if len(points) == 0 || about.Name == LRUHeads { // on top of LRU
			continue
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, err
		}
		line.Color, dots.Color = colors[about.Name], colors[about.Name]
		line.Width = vg.Points(1.5)
		dots.Shape = draw.CircleGlyph{}
		if about.Name == Optimum {
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
