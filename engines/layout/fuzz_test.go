package layout

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

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
