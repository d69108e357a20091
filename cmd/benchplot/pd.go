package main

import (
	"fmt"
	"image/color"
	"path/filepath"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	vgdraw "gonum.org/v1/plot/vg/draw"

	"membrane/bench"
)

// plotPD draws the hand-over against the prompt's length, with and without
// overlap, into handover.svg and handover.png of a folder.
func plotPD(r bench.PDReport, dir string) error {
	path := filepath.Join(dir, "handover")
	if len(r.Handover) == 0 {
		return fmt.Errorf("cannot plot %q: the report has no hand-over", path)
	}
	p := plot.New()
	p.Title.Text = "Hand-over: end of prefill to first token on the other node"
	p.X.Label.Text = "prompt, tokens"
	p.Y.Label.Text = "ms, median (bars: least and most)"
	p.Add(plotter.NewGrid())
	for _, line := range []struct {
		name   string
		colour color.RGBA
		of     func(bench.PDHandover) bench.PDTimes
	}{
		{"decode asked at the prefill's end", color.RGBA{213, 94, 0, 255}, func(h bench.PDHandover) bench.PDTimes { return h.Plain }},
		{"decode follows the prefill", color.RGBA{0, 114, 178, 255}, func(h bench.PDHandover) bench.PDTimes { return h.Overlap }},
	} {
		points := ranged{}
		for _, h := range r.Handover {
			t := line.of(h)
			points.XYs = append(points.XYs, plotter.XY{X: float64(h.Tokens), Y: t.Median})
			points.YErrors = append(points.YErrors, struct{ Low, High float64 }{t.Median - t.Min, t.Max - t.Median})
		}
		drawn, dots, err := plotter.NewLinePoints(points.XYs)
		if err != nil {
			return fmt.Errorf("cannot plot %q: %w", path, err)
		}
		bars, err := plotter.NewYErrorBars(points)
		if err != nil {
			return fmt.Errorf("cannot plot %q: %w", path, err)
		}
		drawn.Color, dots.Color, bars.Color = line.colour, line.colour, line.colour
		drawn.Width = vg.Points(1.5)
		dots.Shape = vgdraw.CircleGlyph{}
		p.Add(drawn, bars, dots)
		p.Legend.Add(line.name, drawn, dots)
	}
	p.Legend.Top, p.Legend.Left = true, true
	p.X.Min, p.Y.Min = 0, 0
	return save(path, 16*vg.Centimeter, 9*vg.Centimeter, p.Draw)
}
