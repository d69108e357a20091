package engineport

import (
	"strings"
	"sync"
	"testing"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/engines/layout"
	"membrane/kvwire"
)

// known returns the registration of an engine of one process whose layout is
// known: 64 tokens of two layers and two heads of two numbers are four blocks of 1,024 bytes.
func known(t *testing.T, engine string, change ...func(*kvwire.Register)) kvwire.Register {
	t.Helper()
	r := registration(engine)
	r.Descriptor.Layout, r.Model.HeadSize = "vllm-nhd", 2
	for _, f := range change {
		f(&r)
	}
	var err error
	r.Descriptor, err = layout.Sized(r.Model, r.Descriptor)
	require.NoError(t, err)
	return r
}

// TestWrongDescriptorsAreMissedByName: each engine registers for real and asks
// for the tokens whose pages another has stored; what is wrong about it is a
// counted miss.
func TestWrongDescriptorsAreMissedByName(t *testing.T) {
	t.Parallel()
	var log lockedBuffer
	p := newPort(t, func(c *Config) { c.Log = zerolog.New(&log) })
	holder := attach(t, p.socket, known(t, "holder"))
	prompt := tokens(64*2+16, 0)
	store(t, holder, match(t, holder, kvwire.Match{Tokens: prompt}).Handle, 2)

	for _, c := range []struct {
		name   string
		want   kvwire.Reason
		says   string // in the log
		change func(*kvwire.Register)
	}{
		{"other RoPE base", kvwire.ReasonNamespace, "", func(r *kvwire.Register) { r.Model.RoPE = "base=500000" }},
		{"other weights", kvwire.ReasonNamespace, "", func(r *kvwire.Register) { r.Model.WeightsID = "w2" }},
		{"stale epoch", kvwire.ReasonNamespace, "", func(r *kvwire.Register) { r.Model.KVEpoch = "before" }},
		{"other model dtype", kvwire.ReasonNamespace, "", func(r *kvwire.Register) { r.Model.DType, r.Descriptor.DType = "float16", "float16" }},
		{"other quantisation scales", kvwire.ReasonNamespace, "", func(r *kvwire.Register) { r.Model.Scales = "s" }},
		{"other page size", kvwire.ReasonNamespace, "", func(r *kvwire.Register) { r.Descriptor.BlockTokens = 128 }},
		{"other dtype in the blocks", kvwire.ReasonLayout, "descriptor.dtype is \\\"float32\\\", must be \\\"float16\\\"", func(r *kvwire.Register) { r.Descriptor.DType = "float16" }},
		{"unknown layout", kvwire.ReasonLayout, "descriptor.layout is \\\"my-own\\\"", func(r *kvwire.Register) { r.Descriptor.Layout = "my-own"; r.Descriptor.BlockBytes = 1024 }},
		{"heads that are another rank's", kvwire.ReasonLayout, "descriptor.heads is [1, 2), must be [0, 1) on rank 0 of 2", func(r *kvwire.Register) {
			r.Role, r.Descriptor.TPSize, r.Descriptor.Heads = kvwire.RoleWorker, 2, [2]int{1, 2}
		}},
		{"half of the heads", kvwire.ReasonLayout, "descriptor.heads is [0, 1), must be [0, 2)", func(r *kvwire.Register) { r.Descriptor.Heads = [2]int{0, 1} }},
		{"half of the layers", kvwire.ReasonLayout, "descriptor.layers is [0, 1), must be [0, 2)", func(r *kvwire.Register) { r.Descriptor.Layers = [2]int{0, 1} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			reg := known(t, "reader")
			c.change(&reg)
			if sized, err := layout.Sized(reg.Model, reg.Descriptor); err == nil {
				reg.Descriptor = sized
			}
			log.Reset()
			reader := attach(t, p.socket, reg)
			before := p.Counts().MissedPages[c.want.String()]
			for range 3 {
				l := match(t, reader, kvwire.Match{Tokens: prompt, DeadlineUS: 1e6})
				assert.Zero(t, l.Pages)
				assert.Equal(t, c.want, l.Reason)
				assert.Equal(t, before+uint64(l.ChainPages), p.Counts().MissedPages[c.want.String()])
				before += uint64(l.ChainPages)
			}
			require.NoError(t, reader.Close())
			require.Eventually(t, func() bool { return len(p.Status().Engines) == 1 }, timeout, tick)
			if c.says != "" {
				assert.Equal(t, 1, strings.Count(log.String(), c.says), "%s", log.String())
			}
		})
	}
	l := match(t, holder, kvwire.Match{Tokens: prompt})
	assert.EqualValues(t, 2, l.Pages, "nothing of that has touched the pages")
}

// Swapped heads of two ranks: neither may store what others would read, and
// neither reads what others stored.
func TestSwappedHeadsAreNeitherServedNorStored(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	good := func(tp int, role kvwire.Role) kvwire.Register {
		return known(t, "good", func(r *kvwire.Register) { *r = asRank(*r, role, tp) })
	}
	w0, w1 := attach(t, p.socket, good(0, kvwire.RoleWorker)), attach(t, p.socket, good(1, kvwire.RoleWorker))
	prompt := tokens(64, 0)
	handle := match(t, w0, kvwire.Match{Tokens: prompt}).Handle
	object := make([]byte, 2048)
	for _, w := range []*kvwire.Client{w0, w1} {
		got, err := w.Write(within(t), kvwire.PageRef{Handle: handle}, object)
		require.NoError(t, err)
		require.Equal(t, kvwire.StoreStored, got.Status)
	}
	require.EqualValues(t, 1, match(t, w0, kvwire.Match{Tokens: prompt}).Pages)

	swapped := func(tp int) kvwire.Register {
		r := good(tp, kvwire.RoleWorker)
		r.Engine, r.Descriptor.Heads = "swapped", [2]int{1 - tp, 2 - tp}
		return r
	}
	s0 := attach(t, p.socket, swapped(0))
	attach(t, p.socket, swapped(1))
	l := match(t, s0, kvwire.Match{Tokens: prompt})
	assert.Zero(t, l.Pages)
	assert.Equal(t, kvwire.ReasonLayout, l.Reason)
	got, err := s0.Write(within(t), kvwire.PageRef{Handle: match(t, s0, kvwire.Match{Tokens: tokens(64, 7)}).Handle}, object)
	require.NoError(t, err)
	assert.Equal(t, kvwire.Committed{Status: kvwire.StoreRefused, Reason: kvwire.ReasonLayout}, got)
	assert.NotZero(t, p.Counts().RefusedStores["layout"])
	for _, e := range p.Status().Engines {
		assert.Equal(t, e.Engine == "swapped", e.Problem != "", e.Problem)
	}
}

// asRank makes a registration that of one rank of two.
func asRank(r kvwire.Register, role kvwire.Role, tp int) kvwire.Register {
	r.Role, r.Descriptor.TPSize, r.Descriptor.TPRank, r.Descriptor.Heads = role, 2, tp, [2]int{tp, tp + 1}
	return r
}

// Objects of another size under the same form (a layout of its own, whose blocks
// end in padding that the form does not name) are not handed out.
func TestObjectsOfAnotherSizeAreNotLeased(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	own := func(name string, bytes int64) *kvwire.Client {
		r := registration(name)
		r.Descriptor.BlockBytes = bytes
		return attach(t, p.socket, r)
	}
	a := own("a", 1024)
	prompt := tokens(64, 0)
	store(t, a, match(t, a, kvwire.Match{Tokens: prompt}).Handle, 1)
	b := own("b", 2048)
	l := match(t, b, kvwire.Match{Tokens: prompt})
	assert.Zero(t, l.Pages)
	assert.Zero(t, l.Lease)
	assert.Equal(t, kvwire.ReasonLayout, l.Reason)
	assert.EqualValues(t, 1, match(t, a, kvwire.Match{Tokens: prompt}).Pages)
}

// lockedBuffer is a log that a test may read while others write.
type lockedBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *lockedBuffer) Reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b.Reset()
}
