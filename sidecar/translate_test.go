package sidecar

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"membrane/engines/layout"
	"membrane/kvwire"
)

// wireEngine is an engine of several processes, on sockets.
type wireEngine struct {
	shards    []layout.Descriptor
	scheduler *kvwire.Client
	workers   []*kvwire.Client
}

const wirePage = 64 // tokens

// geometry is how an engine lays its pages out.
type geometry struct {
	layout, packing string
	block           int
	tp, pp          int
}

func (g geometry) String() string {
	return fmt.Sprintf("%s%s block %d tp %d pp %d", g.layout, g.packing, g.block, g.tp, g.pp)
}

// shardsOf returns the descriptors of all ranks, or an error where the layout
// does not exist for the model.
func shardsOf(m kvwire.ModelFacts, g geometry) ([]layout.Descriptor, error) {
	w := kvwire.Descriptor{Layout: g.layout, Packing: g.packing, DType: m.DType, BlockTokens: g.block, TPSize: g.tp, PPSize: g.pp}
	var err error
	if w.Heads, err = layout.HeadWindow(m, g.tp, 0); err != nil {
		return nil, err
	}
	if w.Layers, err = layout.LayerWindow(m, g.pp, 0); err != nil {
		return nil, err
	}
	if w, err = layout.Sized(m, w); err != nil {
		return nil, err
	}
	d, err := layout.Describe(m, w, wirePage)
	if err != nil {
		return nil, err
	}
	return d.Shards()
}

func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	t.Cleanup(cancel)
	return ctx
}

// boot registers every process of an engine.
func boot(t testing.TB, addr, name string, m kvwire.ModelFacts, shards []layout.Descriptor, inline bool) *wireEngine {
	t.Helper()
	connect := func(role kvwire.Role, d kvwire.Descriptor) *kvwire.Client {
		c, err := kvwire.Dial(soon(t), addr, kvwire.ClientOptions{Inline: inline})
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		slots := 0
		if !inline && role != kvwire.RoleScheduler {
			slots = 1
		}
		_, err = c.Register(soon(t), kvwire.Register{Engine: name, Role: role, Model: m, Descriptor: d, InboxSlots: slots, Inline: inline})
		require.NoError(t, err)
		return c
	}
	e := &wireEngine{shards: shards}
	if len(shards) == 1 {
		e.scheduler = connect(kvwire.RoleBoth, shards[0].Wire())
		e.workers = []*kvwire.Client{e.scheduler}
		return e
	}
	e.scheduler = connect(kvwire.RoleScheduler, shards[0].Wire())
	for _, d := range shards {
		e.workers = append(e.workers, connect(kvwire.RoleWorker, d.Wire()))
	}
	return e
}

func (e *wireEngine) close() {
	_ = e.scheduler.Close()
	for _, w := range e.workers {
		_ = w.Close()
	}
}

func (e *wireEngine) match(t testing.TB, m kvwire.Match) kvwire.Leased {
	t.Helper()
	if m.DeadlineUS == 0 {
		m.DeadlineUS = 10e6
	}
	l, err := e.scheduler.Match(soon(t), m, nil)
	require.NoError(t, err)
	return l
}

// write stores pages, of each shard by its worker.
func (e *wireEngine) write(t testing.TB, prompt []byte, pages [][][]byte) {
	t.Helper()
	l := e.match(t, kvwire.Match{Tokens: prompt, Flags: kvwire.MatchPresence})
	for i, objects := range pages {
		for k, object := range objects {
			ref := kvwire.PageRef{Handle: l.Handle, Page: uint32(i)}
			got := kvwire.Committed{}
			if w := e.workers[k]; w.Arena() == nil {
				var err error
				got, err = w.Write(soon(t), ref, object)
				require.NoError(t, err)
			} else {
				slots, err := w.Reserve(soon(t), []kvwire.PageRef{ref}, nil)
				require.NoError(t, err)
				require.Equal(t, kvwire.StoreSlot, slots[0].Status, "%v", slots[0].Reason)
				copy(w.Slot(slots[0].Slot), object)
				all, err := w.Commit(soon(t), []kvwire.Commit{{PageRef: ref, Slot: slots[0].Slot}}, nil)
				require.NoError(t, err)
				got = all[0]
			}
			require.Equal(t, kvwire.StoreStored, got.Status, "%v", got.Reason)
		}
	}
}

// read returns what each worker copies of the leased pages, and releases them.
func (e *wireEngine) read(t testing.TB, l kvwire.Leased) [][][]byte {
	t.Helper()
	pages := make([][][]byte, l.Pages)
	for i := range pages {
		pages[i] = make([][]byte, len(e.workers))
	}
	for k, w := range e.workers {
		if arena := w.Arena(); arena != nil {
			for i := range pages {
				at := l.Locations[i*len(e.workers)+k]
				pages[i][k] = bytes.Clone(arena[at.Offset:][:at.Length])
			}
		} else {
			require.NoError(t, w.Read(soon(t), kvwire.Read{Lease: l.Lease, Pages: l.Pages}, func(i int, n int64) []byte {
				pages[i][k] = make([]byte, n)
				return pages[i][k]
			}))
		}
		out, err := w.Release(soon(t), kvwire.Release{Lease: l.Lease, Verify: true})
		require.NoError(t, err)
		require.Equal(t, kvwire.ReleaseLive, out)
	}
	return pages
}

// sameBytes compares without printing kilobytes.
func sameBytes(t require.TestingT, want, got [][][]byte) {
	require.Len(t, got, len(want))
	for i := range want {
		require.Len(t, got[i], len(want[i]))
		for k := range want[i] {
			require.True(t, bytes.Equal(want[i][k], got[i][k]), "page %d shard %d differs", i, k)
		}
	}
}

func promptOf(pages int, seed uint32) []byte {
	var b []byte
	for i := range pages * wirePage {
		b = binary.LittleEndian.AppendUint32(b, seed*1000003+uint32(i))
	}
	return b
}

// truth makes pages of random numbers for a model, cut for each of the given
// engines' shards by package layout.
func truth(t require.TestingT, m kvwire.ModelFacts, pages int, seed uint64, engines ...[]layout.Descriptor) [][][][]byte {
	w := kvwire.Descriptor{Layout: "canonical", DType: m.DType, BlockTokens: wirePage, TPSize: 1, PPSize: 1, Layers: [2]int{0, m.Layers}, Heads: [2]int{0, m.KVHeads}}
	w, err := layout.Sized(m, w)
	require.NoError(t, err)
	whole, err := layout.Describe(m, w, wirePage)
	require.NoError(t, err)
	rng := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	out := make([][][][]byte, len(engines))
	for range pages {
		page := make([]byte, whole.Bytes())
		_, _ = rng.Read(page)
		for i, shards := range engines {
			var objects [][]byte
			for _, d := range shards {
				plan, err := layout.NewPlan(d, whole)
				require.NoError(t, err)
				b := make([]byte, plan.Bytes())
				require.NoError(t, plan.Run(b, page))
				objects = append(objects, b)
			}
			out[i] = append(out[i], objects)
		}
	}
	return out
}

func testModel(weights string) kvwire.ModelFacts {
	return kvwire.ModelFacts{WeightsID: weights, DType: "bfloat16", RoPE: "base=10000", Layers: 4, KVHeads: 4, HeadSize: 32}
}

var geometries = []geometry{
	{"vllm-lbhnc", "", 16, 1, 1},
	{"vllm-lbhnc", "vec", 16, 1, 1},
	{"vllm-lbhnc", "amx", 32, 1, 1},
	{"vllm-nhd", "", 16, 1, 1},
	{"vllm-bhlnc", "", 32, 1, 1},
	{"sglang-layer_first", "", 64, 1, 1},
	{"sglang-page_first", "", 64, 1, 1},
	{"sglang-page_first_direct", "", 32, 1, 1},
	{"sglang-page_head", "", 64, 1, 1},
	{"trtllm-hnd", "", 32, 1, 1},
	{"trtllm-nhd", "", 32, 1, 1},
	{"trtllm-mla", "", 64, 1, 1},
	{"canonical", "", 64, 1, 1},
}

// TestEveryEngineReadsEveryOther: a page written by an engine in one layout at
// one tensor and pipeline parallel size is read by an engine in another, through
// a real sidecar and its sockets, equal to what package layout says.
func TestEveryEngineReadsEveryOther(t *testing.T) {
	s := testSettings(t, "a")
	s.Memory = 256 << 20 // the pages of all draws, so that none is evicted
	n := run(t, s)
	addr := map[bool]string{false: n.Addresses().EngineSocket, true: n.Addresses().EngineAddr}
	seed := uint64(0)
	rapid.Check(t, func(rt *rapid.T) {
		seed++
		m := testModel(fmt.Sprint("w", seed))
		m.KVHeads = rapid.SampledFrom([]int{1, 2, 4, 8}).Draw(rt, "heads")
		m.Layers = rapid.IntRange(2, 5).Draw(rt, "layers")
		if m.KVHeads == 1 {
			m.MLA = rapid.Bool().Draw(rt, "mla")
		}
		draw := func(name string) geometry {
			g := rapid.SampledFrom(geometries).Draw(rt, name)
			g.tp = rapid.SampledFrom([]int{1, 2, 4, 8}).Draw(rt, name+" tp")
			g.pp = rapid.IntRange(1, 2).Draw(rt, name+" pp")
			return g
		}
		from, to := draw("from"), draw("to")
		writers, err := shardsOf(m, from)
		if err != nil {
			rt.Skip(err)
		}
		readers, err := shardsOf(m, to)
		if err != nil {
			rt.Skip(err)
		}
		const pages = 2
		both := truth(rt, m, pages, seed, writers, readers)
		writer := boot(t, addr[rapid.Bool().Draw(rt, "inline writer")], fmt.Sprint("writer", seed), m, writers, rapid.Bool().Draw(rt, "inline"))
		defer writer.close()
		prompt := promptOf(pages, uint32(seed))
		writer.write(t, prompt, both[0])
		reader := boot(t, addr[rapid.Bool().Draw(rt, "inline reader")], fmt.Sprint("reader", seed), m, readers, false)
		defer reader.close()
		l := reader.match(t, kvwire.Match{Tokens: prompt})
		if l.Pages != pages { // also where it does not happen again, which rapid keeps to itself
			t.Logf("%v to %v: %d pages, %v; %+v", from, to, l.Pages, l.Reason, n.cache.Stats())
		}
		require.EqualValues(rt, pages, l.Pages)
		sameBytes(rt, both[1], reader.read(t, l))
	})
}

// cluster starts two sidecars that know each other.
func cluster(t testing.TB, change func(*Settings)) (a, b *running) {
	t.Helper()
	s := testSettings(t.(*testing.T), "a")
	s.Memory = 64 << 20
	if change != nil {
		change(&s)
	}
	a = run(t.(*testing.T), s)
	s = testSettings(t.(*testing.T), "b")
	s.Memory, s.Peers = 64<<20, List{a.Addresses().HTTP}
	if change != nil {
		change(&s)
	}
	b = run(t.(*testing.T), s)
	for _, n := range []*running{a, b} {
		require.Eventually(t, func() bool { return n.mesh.Stats().Peers == 1 }, timeout, tick)
	}
	return a, b
}

// listed waits until n's directory of its peer lists so many pages.
func listed(t testing.TB, n *running, pages int) {
	t.Helper()
	require.Eventually(t, func() bool { return n.mesh.Stats().DirectoryPages >= pages }, timeout, tick)
}

func TestPagesOfPeersInOtherLayoutsAreTranslated(t *testing.T) {
	a, b := cluster(t, nil)
	m := testModel("w")
	two, err := shardsOf(m, geometry{"vllm-lbhnc", "vec", 16, 2, 1})
	require.NoError(t, err)
	one, err := shardsOf(m, geometry{"sglang-page_first", "", 64, 1, 1})
	require.NoError(t, err)
	const pages = 5
	both := truth(t, m, pages, 1, two, one)
	writer := boot(t, a.Addresses().EngineSocket, "writer", m, two, false)
	prompt := promptOf(pages, 1)
	writer.write(t, prompt, both[0])
	listed(t, b, pages)

	reader := boot(t, b.Addresses().EngineSocket, "reader", m, one, false)
	local := reader.match(t, kvwire.Match{Tokens: prompt, Flags: kvwire.MatchLocal})
	assert.Zero(t, local.Pages)
	l := reader.match(t, kvwire.Match{Tokens: prompt})
	require.EqualValues(t, pages, l.Pages, l.Reason)
	assert.EqualValues(t, pages, l.FromPeers)
	sameBytes(t, both[1], reader.read(t, l))
	counts := b.engines.Counts().Translated
	assert.EqualValues(t, pages, counts.Pages)
	assert.EqualValues(t, pages, counts.Dropped, "no engine on this node reads the source")
	assert.EqualValues(t, pages, b.cache.Stats().Objects)
	assert.LessOrEqual(t, b.mesh.Stats().FormsAsked, uint64(2))

	// And back, from what was made there: the first node's pages are gone.
	_, err = writer.scheduler.Reset(soon(t))
	require.NoError(t, err)
	listed(t, a, pages)
	require.Eventually(t, func() bool {
		l = writer.match(t, kvwire.Match{Tokens: prompt})
		return l.Pages == pages
	}, timeout, tick)
	sameBytes(t, both[0], writer.read(t, l))
}

// Invariant 1: one flipped bit in the source is a miss and never wrong bytes,
// here and at a peer.
func TestOneFlippedBitOfASourceIsAMiss(t *testing.T) {
	a, b := cluster(t, nil)
	m := testModel("w")
	two, err := shardsOf(m, geometry{"vllm-nhd", "", 16, 2, 1})
	require.NoError(t, err)
	one, err := shardsOf(m, geometry{"trtllm-hnd", "", 32, 1, 1})
	require.NoError(t, err)
	const pages = 4
	both := truth(t, m, pages, 1, two, one)
	writer := boot(t, a.Addresses().EngineSocket, "writer", m, two, false)
	rng := rand.New(rand.NewPCG(1, 2))
	for round, n := range []*running{a, b} {
		prompt := promptOf(pages, uint32(round))
		writer.write(t, prompt, both[0])
		listed(t, b, pages)
		l := writer.match(t, kvwire.Match{Tokens: prompt, Flags: kvwire.MatchLocal})
		require.EqualValues(t, pages, l.Pages)
		bad := rng.IntN(pages)
		at := l.Locations[2*bad+rng.IntN(2)]
		a.cache.Arena().Bytes(int64(at.Offset), int64(at.Length))[rng.IntN(int(at.Length))] ^= 4
		for _, w := range writer.workers {
			_, err := w.Release(soon(t), kvwire.Release{Lease: l.Lease})
			require.NoError(t, err)
		}
		reader := boot(t, n.Addresses().EngineSocket, "reader", m, one, false)
		require.Eventually(t, func() bool {
			l = reader.match(t, kvwire.Match{Tokens: prompt})
			return l.Pages >= uint32(bad) && (bad > 0 || l.Reason == kvwire.ReasonCorrupt) // else not all was listed yet
		}, timeout, tick)
		require.EqualValues(t, bad, l.Pages, "round %d: %s", round, l.Reason)
		assert.Contains(t, []kvwire.Reason{kvwire.ReasonCorrupt, kvwire.ReasonAbsent}, l.Reason)
		if l.Pages > 0 {
			sameBytes(t, both[1][:bad], reader.read(t, l))
		}
		reader.close()
	}
	assert.NotZero(t, a.cache.Stats().Corrupt)
}

// A match that translates ends by its deadline with what was done.
func TestTranslationEndsAtTheDeadline(t *testing.T) {
	s := testSettings(t, "a")
	s.Memory = 512 << 20
	n := run(t, s)
	m := testModel("w")
	m.Layers, m.KVHeads, m.HeadSize = 16, 8, 128
	from, err := shardsOf(m, geometry{"vllm-lbhnc", "vec", 16, 1, 1})
	require.NoError(t, err)
	to, err := shardsOf(m, geometry{"sglang-page_first", "", 64, 1, 1})
	require.NoError(t, err)
	const pages = 12
	one := truth(t, m, 1, 1, from)[0][0]
	objects := make([][][]byte, pages)
	for i := range objects {
		objects[i] = one
	}
	writer := boot(t, n.Addresses().EngineAddr, "writer", m, from, true)
	prompt := promptOf(pages, 1)
	writer.write(t, prompt, objects)
	reader := boot(t, n.Addresses().EngineSocket, "reader", m, to, false)
	began := time.Now()
	l := reader.match(t, kvwire.Match{Tokens: prompt, DeadlineUS: 10000})
	assert.Less(t, time.Since(began), 500*time.Millisecond)
	assert.Less(t, l.Pages, uint32(pages))
	assert.Equal(t, kvwire.ReasonDeadline, l.Reason)
	require.Eventually(t, func() bool { return reader.match(t, kvwire.Match{Tokens: prompt}).Pages == pages }, timeout, tick)
}
