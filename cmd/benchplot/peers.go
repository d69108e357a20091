package main

import (
	"fmt"
	"image/color"
	"path/filepath"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	vgdraw "gonum.org/v1/plot/vg/draw"

	"membrane/bench/peers"
)

// palettes are the colours of each kind of systems, in the order of the tables:
// ours blue, peers others, ceilings grey.
var palettes = map[string][]color.Color{
	peers.Ours: {
		color.RGBA{R: 0x08, G: 0x30, B: 0x6b, A: 0xff},
		color.RGBA{R: 0x21, G: 0x71, B: 0xb5, A: 0xff},
		color.RGBA{R: 0x5a, G: 0xae, B: 0xe0, A: 0xff},
		color.RGBA{R: 0xae, G: 0xd4, B: 0xea, A: 0xff},
		color.RGBA{R: 0x21, G: 0x71, B: 0xb5, A: 0xff},
	},
	peers.Peer: {
		color.RGBA{R: 0xcb, G: 0x18, B: 0x1d, A: 0xff},
		color.RGBA{R: 0xfb, G: 0x6a, B: 0x4a, A: 0xff},
		color.RGBA{R: 0xfd, G: 0xae, B: 0x3b, A: 0xff},
		color.RGBA{R: 0x9e, G: 0x7b, B: 0xc1, A: 0xff},
		color.RGBA{R: 0x6a, G: 0x1b, B: 0x7a, A: 0xff},
		color.RGBA{R: 0x41, G: 0xab, B: 0x5d, A: 0xff},
		color.RGBA{R: 0xcb, G: 0x18, B: 0x1d, A: 0xff},
	},
	peers.Ceiling: {color.Gray{Y: 0x96}, color.Gray{Y: 0x96}},
}

// colour returns a system's colour, the same in every plot.
func colour(system string) color.Color {
	n := 0
	for _, s := range peers.SystemNames() {
		if s == system {
			break
		}
		if peers.Kind(s) == peers.Kind(system) {
			n++
		}
	}
	palette := palettes[peers.Kind(system)]
	return palette[n%len(palette)]
}

// plotGroup draws a group as bars with the range over the rounds, as SVG and PNG.
func plotGroup(g peers.Group, t peers.Table, dir string) error {
	var systems []string
	for _, s := range t.Systems {
		for _, c := range t.Cells {
			if row, ok := t.Row(c, s); ok && row.Why == "" {
				systems = append(systems, s)
				break
			}
		}
	}
	if len(t.Cells) == 0 || len(systems) == 0 {
		return nil
	}
	p := plot.New()
	p.Title.Text = g.Title
	p.Title.Padding = vg.Points(6)
	p.Y.Label.Text = g.Unit + ", median; lines from the least to the most of all rounds"
	if g.Unit == "MiB" {
		p.Y.Label.Text = "memory for each byte held"
	}
	p.Y.Min = 0
	p.Y.Tick.Marker = plainTicks{}
	p.Legend.Top = true
	p.Legend.Left = true
	p.Legend.XOffs = vg.Points(8)
	p.Legend.Padding = vg.Points(3)
	p.Legend.ThumbnailWidth = vg.Points(12)
	lines := plotter.NewGrid()
	lines.Vertical.Width = 0
	lines.Horizontal.Color = color.Gray{Y: 0xdd}
	p.Add(lines)

	bar := vg.Points(min(22, 46/float64(max(1, len(systems)))*3))
	most := 0.0
	for i, s := range systems {
		offset := bar * vg.Length(float64(i)-float64(len(systems)-1)/2)
		top, err := bars(p, t, s, bar, offset)
		if err != nil {
			return err
		}
		most = max(most, top)
	}
	// Room for the legend above the bars.
	p.Y.Max = most * (1.08 + 0.055*float64(len(systems)))
	labels := make([]string, len(t.Cells))
	for i, c := range t.Cells {
		labels[i] = axisLabel(c)
	}
	p.NominalX(labels...)
	p.X.Min, p.X.Max = -0.55, float64(len(t.Cells))-0.45
	p.X.Tick.Label.YAlign = vgdraw.YTop
	width := vg.Length(len(t.Cells))*(bar*vg.Length(len(systems))+vg.Points(34)) + vg.Points(90)
	for _, ext := range []string{"svg", "png"} {
		path := filepath.Join(dir, g.File+"."+ext)
		if err := p.Save(max(width, vg.Points(420)), vg.Points(360), path); err != nil {
			return fmt.Errorf("cannot draw %q: %w", path, err)
		}
	}
	return nil
}

// bars adds one system's bars and returns how high they reach.
func bars(p *plot.Plot, t peers.Table, system string, width, offset vg.Length) (float64, error) {
	values := make(plotter.Values, len(t.Cells))
	most := 0.0
	var ranges ranged
	for i, c := range t.Cells {
		row, ok := t.Row(c, system)
		if !ok || row.Why != "" {
			continue
		}
		if row.Unit == "MiB" && row.Ratio != nil {
			// What is held differs from system to system.
			row.Value, row.Min, row.Max = *row.Ratio, *row.Ratio, *row.Ratio
		}
		values[i] = row.Value
		most = max(most, row.Max)
		ranges.XYs = append(ranges.XYs, plotter.XY{X: float64(i), Y: row.Value})
		ranges.YErrors = append(ranges.YErrors, struct{ Low, High float64 }{row.Value - row.Min, row.Max - row.Value})
	}
	b, err := plotter.NewBarChart(values, width)
	if err != nil {
		return 0, fmt.Errorf("cannot draw the bars of %s: %w", system, err)
	}
	b.Color = colour(system)
	b.LineStyle.Width = 0
	b.Offset = offset
	p.Add(b)
	p.Legend.Add(system, b)
	e, err := plotter.NewYErrorBars(ranges)
	if err != nil {
		return 0, fmt.Errorf("cannot draw the range of %s: %w", system, err)
	}
	e.CapWidth = width / 3
	e.LineStyle.Color = color.Gray{Y: 0x33}
	p.Add(shifted{e, offset})
	return most, nil
}

// ranged is values with their ranges.
type ranged struct {
	plotter.XYs
	plotter.YErrors
}

// shifted draws something beside where its values are.
type shifted struct {
	plot.Plotter
	by vg.Length
}

// Plot draws it.
func (s shifted) Plot(c vgdraw.Canvas, p *plot.Plot) {
	c.Min.X += s.by
	c.Max.X += s.by
	s.Plotter.Plot(c, p)
}

// plainTicks are marks at round numbers without exponents.
type plainTicks struct{}

// Ticks returns the marks.
func (plainTicks) Ticks(low, high float64) []plot.Tick {
	ticks := plot.DefaultTicks{}.Ticks(low, high)
	for i := range ticks {
		if ticks[i].Label != "" {
			ticks[i].Label = strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.2f", ticks[i].Value), "0"), ".")
		}
	}
	return ticks
}

// axisLabel breaks a cell's name into short lines.
func axisLabel(cell string) string {
	what, rest, ok := strings.Cut(cell, " streams=")
	if !ok {
		return cell
	}
	n, more, _ := strings.Cut(rest, " ")
	label := what + "\n" + n + " streams"
	if n == "1" {
		label = what + "\n1 stream"
	}
	if more != "" {
		label += "\n" + more
	}
	return label
}
