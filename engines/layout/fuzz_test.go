package layout

import (
	"bytes"
	"encoding/json"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"membrane/kvwire"
)

// FuzzDescriptors: whatever two engines register, resolving and planning end
// in an answer; and a plan that there is moves every number there and back.
func FuzzDescriptors(f *testing.F) {
	type registered struct {
		Model   kvwire.ModelFacts   `json:"model"`
		Writers []kvwire.Descriptor `json:"writers"`
		Reader  kvwire.Descriptor   `json:"reader"`
		Page    int                 `json:"page"`
	}
	seed := func(change func(r *registered)) {
		r := registered{Model: smallModel(), Writers: []kvwire.Descriptor{smallWire()}, Reader: smallWire(), Page: 64}
		change(&r)
		b, err := json.Marshal(r)
		require.NoError(f, err)
		f.Add(b)
	}
	seed(func(*registered) {})
	seed(func(r *registered) { r.Reader.Packing = "amx" })
	seed(func(r *registered) { r.Reader.Layout = "sglang-page_head" })
	seed(func(r *registered) {
		r.Reader.Layout, r.Reader.Axes, r.Reader.Strides = "own", []string{"dim", "layer", "kv", "token", "head"}, []int64{2048, 512, 256, 8, 2}
	})
	seed(func(r *registered) {
		r.Writers = append(r.Writers, r.Writers[0])
		r.Writers[0].Layers, r.Writers[1].Layers = [2]int{0, 1}, [2]int{1, 4}
		r.Writers[0].BlockBytes, r.Writers[1].BlockBytes = 16384, 49152
	})
	seed(func(r *registered) { r.Writers[0].Group, r.Reader.Group = "mamba", "mamba" })
	seed(func(r *registered) {
		s := []kvwire.ScaleArray{{Per: kvwire.PerHead, DType: "float32"}}
		r.Writers[0].Scales, r.Reader.Scales = s, s
		r.Writers[0].BlockBytes, r.Reader.BlockBytes = 65536+128, 65536+128
	})
	seed(func(r *registered) { r.Model.MLA = true })
	f.Fuzz(func(t *testing.T, b []byte) {
		var r registered
		if json.Unmarshal(b, &r) != nil || len(r.Writers) > 8 {
			return
		}
		sized := r.Reader
		if sized, err := Sized(r.Model, sized); err == nil {
			if d, err := Describe(r.Model, sized, sized.BlockTokens); err == nil && d.Bytes() != int(sized.BlockBytes) {
				t.Fatalf("a block of %d bytes is an object of %d", sized.BlockBytes, d.Bytes())
			}
		}
		reader, err := Describe(r.Model, r.Reader, r.Page)
		if err != nil {
			return
		}
		var writers []Descriptor
		for _, w := range r.Writers {
			d, err := Describe(r.Model, w, r.Page)
			if err != nil {
				return
			}
			writers = append(writers, d)
		}
		p, err := NewPlan(reader, writers...)
		if err != nil {
			return
		}
		total := p.Bytes()
		for _, n := range p.Needs() {
			total += writers[n].Bytes()
		}
		if total > 1<<20 {
			return
		}
		srcs := make([][]byte, len(p.Needs()))
		for i, n := range p.Needs() {
			srcs[i] = randomBytes(uint64(i), writers[n].Bytes())
		}
		got := make([]byte, p.Bytes())
		if err := p.Run(got, srcs...); err != nil {
			t.Fatal(err)
		}
		if reader.Opaque() {
			return
		}
		canonical, err := reader.Canonical()
		if err != nil {
			return // bigger than an object may be
		}
		between := translate(t, canonical, []Descriptor{reader}, [][]byte{got})
		if back := translate(t, reader, []Descriptor{canonical}, [][]byte{between}); !bytes.Equal(got, back) {
			t.Fatalf("%+v: there and back differs", reader.wire)
		}
	})
}

// randomDescriptors draws a reader and writers in any layout with any strides,
// most of them refused, and moves a page where there is a plan.
func randomDescriptors(t *rapid.T) {
	m := kvwire.ModelFacts{
		WeightsID: "w", DType: "float16", RoPE: "none", Layers: rapid.IntRange(1, 3).Draw(t, "layers"),
		KVHeads: rapid.IntRange(1, 3).Draw(t, "heads"), HeadSize: rapid.SampledFrom([]int{1, 2, 16, 32}).Draw(t, "dim"),
		MLA: rapid.Bool().Draw(t, "mla"),
	}
	const page = 32
	draw := func(label string) kvwire.Descriptor {
		w := kvwire.Descriptor{
			Layout: rapid.SampledFrom(append(Names(), "own", "own", "own")).Draw(t, label+" layout"), DType: "float16",
			Packing:     rapid.SampledFrom(append(Packings(), "", "")).Draw(t, label+" packing"),
			BlockTokens: rapid.SampledFrom([]int{4, 16, 32}).Draw(t, label+" block"),
			TPSize:      1, PPSize: 1, Layers: [2]int{0, m.Layers}, Heads: [2]int{0, m.KVHeads},
		}
		if w.Layout == "own" {
			w.Packing = ""
			w.Axes = rapid.Permutation(axisNames[:]).Draw(t, label+" axes")
			if m.MLA {
				w.Axes = slices.DeleteFunc(slices.Clone(w.Axes), func(a string) bool { return a == "kv" || a == "head" })
			}
			counts := map[string]int{"layer": m.Layers, "kv": 2, "head": m.KVHeads, "token": w.BlockTokens, "dim": m.HeadSize}
			w.Strides = make([]int64, len(w.Axes))
			stride := int64(2)
			for i, a := range slices.Backward(w.Axes) {
				w.Strides[i] = stride + rapid.SampledFrom([]int64{0, 0, 0, 2, -1}).Draw(t, label+" gap")
				stride = w.Strides[i] * int64(counts[a])
			}
			w.BlockBytes = max(stride, 1)
			return w
		}
		if rapid.Bool().Draw(t, label+" scales") {
			w.Scales = []kvwire.ScaleArray{{Per: rapid.SampledFrom(sortedKeys(scaleAxes)).Draw(t, label+" per"), DType: "float32"}}
		}
		if sized, err := Sized(m, w); err == nil {
			w = sized
		}
		return w
	}
	reader, err := Describe(m, draw("reader"), page)
	if err != nil {
		return
	}
	writer, err := Describe(m, draw("writer"), page)
	if err != nil {
		return
	}
	p, err := NewPlan(reader, writer)
	if err != nil {
		return
	}
	src := randomBytes(1, writer.Bytes())
	got := make([]byte, p.Bytes())
	if err := p.Run(got, src); err != nil {
		t.Fatal(err)
	}
	if back := translate(t, writer, []Descriptor{reader}, [][]byte{got}); !writer.gaps && !bytes.Equal(src, back) {
		t.Fatalf("%+v to %+v: there and back differs", writer.wire, reader.wire)
	}
}

func TestRandomDescriptors(t *testing.T) { rapid.Check(t, randomDescriptors) }

func FuzzRandomDescriptors(f *testing.F) { f.Fuzz(rapid.MakeFuzz(randomDescriptors)) }
