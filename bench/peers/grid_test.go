package peers

import (
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/bench"
)

func TestEveryTargetHasItsCells(t *testing.T) {
	for name, grid := range map[string][]cell{"default": defaultGrid(), "full": fullGrid()} {
		asked := map[string]bool{}
		for _, c := range grid {
			for _, s := range allSystems(allProducts()) {
				if s.takes(c) {
					asked[c.String()+s.name] = true
				}
			}
		}
		for _, target := range allTargets() {
			assert.True(t, asked[target.cell.String()+target.ours], "%s: %s of %s", name, target.cell, target.ours)
			theirs := target.cell
			if target.toCell != nil {
				theirs = *target.toCell
			}
			for _, s := range target.to {
				if s == sysMooncake { // it has one stream or eight
					continue
				}
				assert.True(t, asked[theirs.String()+s], "%s: %s of %s", name, theirs, s)
			}
		}
	}
}

func TestFullGridIsWhatIsPromised(t *testing.T) {
	names := map[string]int{}
	for _, c := range fullGrid() {
		names[c.String()]++
	}
	for name, n := range names {
		assert.Equal(t, 1, n, name)
	}
	for _, name := range []string{
		"get 64KiB streams=1", "get 512KiB x32 streams=32", "get 2MiB streams=8 hit=50%", "set 512KiB streams=64",
		"mixed 64KiB streams=8", "aside 2MiB streams=8", "retrieve streams=8", "memory 64KiB",
	} {
		assert.Contains(t, names, name)
	}
}

// A ceiling that sends every value is none where half of them are not sent.
func TestTheBareCopyMissesNothing(t *testing.T) {
	for _, s := range allSystems(allProducts()) {
		c := getCell(small, 32, 8)
		assert.Equal(t, slices.Contains(s.ops, opGet), s.takes(c), s.name)
		c.HitPercent = 50
		assert.Equal(t, slices.Contains(s.ops, opGet) && s.name != sysBare, s.takes(c), s.name)
	}
}

func TestFiltersNameWhatThereIs(t *testing.T) {
	cells, err := filter(defaultGrid(), "get 2MiB streams=8$")
	require.NoError(t, err)
	assert.Len(t, cells, 1)
	_, err = filter(defaultGrid(), "nothing")
	require.ErrorContains(t, err, "they are named like")
	_, err = filter(defaultGrid(), "(")
	require.ErrorContains(t, err, "cannot read the cells' expression")

	all := allSystems(allProducts())
	chosen, err := choose(all, []string{"REDIS"})
	require.NoError(t, err)
	var names []string
	for _, s := range chosen {
		names = append(names, s.name)
	}
	assert.Equal(t, []string{sysRedis, sysBare, sysEmpty}, names, "ceilings are always there")
	_, err = choose(all, []string{"postgres"})
	require.ErrorContains(t, err, "no system has a name like")
}

func TestKeysAreDrawnAsTheCellSays(t *testing.T) {
	p := payloads(t, 128, 8)
	rng := rand.New(rand.NewPCG(1, 1))
	c := getCell(8, 4, 1)
	seen := map[int]int{}
	for range 10_000 {
		k := newKeyspace(c, p, 0).draw(rng, c)
		require.Zero(t, k%4)
		seen[k]++
	}
	assert.Len(t, seen, 32, "all runs are drawn")

	c.HitPercent = 50
	hits := 0
	for range 10_000 {
		if newKeyspace(c, p, 0).draw(rng, c) < p.Len() {
			hits++
		}
	}
	assert.InDelta(t, 5000, hits, 300)

	zipf := cell{Op: opAside, Size: 8, Batch: 1, Streams: 1, Zipf: 0.99}
	space := newKeyspace(zipf, p, 1000)
	count := map[int]int{}
	for range 100_000 {
		k := space.draw(rng, zipf)
		require.True(t, k >= asideKeys && k < asideKeys+1000)
		count[k]++
	}
	// The most popular of 1,000 keys at 0.99 is one request in about 7.7.
	assert.InDelta(t, 13_000, count[asideKeys+space.shuffle[0]], 1500)
}

func TestNewKeysAreEachStreamsOwn(t *testing.T) {
	seen := map[int]bool{}
	for id := range 64 {
		for n := range 3 * chainPages {
			k := newKeyOf(id, n)
			require.False(t, seen[k])
			require.True(t, k >= writeKeys && k < asideKeys)
			seen[k] = true
		}
	}
	assert.Equal(t, newKeyOf(3, 0)/chainPages, newKeyOf(3, chainPages-1)/chainPages, "of one prompt")
}

func TestPercentiles(t *testing.T) {
	var ds []time.Duration
	for i := 100; i > 0; i-- {
		ds = append(ds, time.Duration(i))
	}
	assert.EqualValues(t, 51, percentile(ds, 50))
	assert.EqualValues(t, 100, percentile(ds, 99))
	assert.Zero(t, percentile(nil, 50))
}

// madeRun is a run with figures that were not measured: GB/s by round.
func madeRun(figures map[rowKey][]float64) *run {
	r := &run{results: map[rowKey]*result{}, absent: map[*product]string{}, products: allProducts(), cells: defaultGrid(), sizing: Options{}.sizing()}
	r.systems = allSystems(r.products)
	r.opts.Rounds, r.opts.Duration = 3, time.Second
	r.absent[r.products["mooncake"]] = "its library is not here"
	for key, rounds := range figures {
		res := &result{}
		for _, gbs := range rounds {
			res.rounds = append(res.rounds, measurement{
				bytes: int64(gbs * 1e9), ops: 100, asked: 100, hits: 100, elapsed: time.Second, cpu: time.Second, latencies: []time.Duration{time.Millisecond},
			})
		}
		r.results[key] = res
	}
	return r
}

func TestTargetsAreJudgedRoundByRound(t *testing.T) {
	one, eight := getCell(big, 1, 1).String(), getCell(big, 1, 8).String()
	batch := getCell(big, 8, 1).String()
	r := madeRun(map[rowKey][]float64{
		{one, sysRESP}: {1, 2, 4}, {one, sysRedis}: {1, 1, 10},
		{eight, sysRESP}: {3, 3, 3}, {eight, sysRedis}: {1, 1, 1}, {eight, sysValkey}: {2, 2, 2}, {eight, sysKVB}: {6, 6, 6},
		{batch, sysData}: {2, 2, 2}, {batch, sysKVB}: {4, 1, 4}, {batch, sysBare}: {2, 4, 4},
	})
	rows, err := r.targets()
	require.NoError(t, err)
	find := func(name, to string) bench.Row {
		for _, row := range rows {
			if row.Name == name && (to == "" || row.RatioTo != nil && *row.RatioTo == to) {
				return row
			}
		}
		t.Fatalf("no target %q to %q", name, to)
		return bench.Row{}
	}
	row := find("RESP GET 2 MiB, 1 stream", sysRedis)
	assert.InDelta(t, 1, *row.Ratio, 1e-9, "the median of 1, 2 and 0.4")
	assert.True(t, *row.OK)
	row = find("RESP GET 2 MiB, 8 streams", sysKVB)
	assert.InDelta(t, 0.5, *row.Ratio, 1e-9, "the fastest of those that are there")
	assert.False(t, *row.OK)
	row = find("membrane (kvwire, data port), batched read, 8 × 2MiB, streams: 1", "")
	assert.InDelta(t, 2/1.8, *row.Ratio, 1e-9, "the lesser of 1.0 × kvblockd and 0.9 × a bare copy: 1.8, 1, 3.6")
	assert.True(t, *row.OK)
	row = find("RESP GET 2 MiB, 64 streams", "")
	assert.Nil(t, row.OK)
	assert.Contains(t, row.Why, "not measured")
	assert.Contains(t, find("hit ratio in tokens on replayed traces", "").Why, "membrane bench replay")
	assert.Contains(t, find("vLLM first token, 2,001 tokens, loaded", "").Why, "make bench-vllm")
}

// A way into membrane that fails in a later round has a row that says so, and is
// not judged by the rounds before.
func TestTargetsAreNotMetByWhatFailed(t *testing.T) {
	one := getCell(big, 1, 1).String()
	r := madeRun(map[rowKey][]float64{
		{one, sysRESP}: {9}, {one, sysRedis}: {1, 1, 1}, {one, sysShm}: {9, 9, 9}, {one, sysValkey}: {4},
	})
	r.results[rowKey{one, sysRESP}].why = "key 3 is gone"
	r.results[rowKey{one, sysValkey}].why = "it fell"
	rows, err := r.targets()
	require.NoError(t, err)
	for _, row := range rows {
		switch row.Name {
		case "RESP GET 2 MiB, 1 stream":
			assert.Nil(t, row.OK)
			assert.Contains(t, row.Why, "key 3 is gone")
		case "shared memory read, 2 MiB, 1 stream, checked":
			require.NotNil(t, row.Ratio, row.Why)
			assert.Equal(t, sysValkey, *row.RatioTo, "a peer is not beaten by its failure")
		}
	}
}

func TestMemoryIsComparedForEachByteHeld(t *testing.T) {
	c := cell{Op: opMemory, Size: small, Batch: 1, Streams: 1}.String()
	r := madeRun(nil)
	r.results[rowKey{c, sysShm}] = &result{held: 2 * gib * 97 / 100, pss: 2*gib + 20*mib}
	r.results[rowKey{c, sysRedis}] = &result{held: 1600 * mib, pss: 2 * gib}
	r.results[rowKey{c, sysLM}] = &result{held: 2 * gib, pss: 3 * gib}
	rows, err := r.judgeMemory()
	require.NoError(t, err)
	require.Len(t, rows, 5)
	assert.Equal(t, sysRedis, *rows[0].RatioTo)
	for _, row := range rows[:3] {
		require.NotNil(t, row.OK, row.Name)
		assert.True(t, *row.OK, "%s: %v", row.Name, *row.Ratio)
	}
	assert.Contains(t, rows[3].Why, "not filled")
}

func TestReportNamesEverySystemAndWhatPeersWin(t *testing.T) {
	one := getCell(big, 1, 1).String()
	r := madeRun(map[rowKey][]float64{
		{one, sysRESP}: {2, 2, 2}, {one, sysShm}: {3, 3, 3}, {one, sysRedis}: {1, 1, 1}, {one, sysKVB}: {4, 5, 3},
	})
	r.results[rowKey{one, sysMooncake}] = &result{why: "its library is not here"}
	r.memcpy, r.copied = []float64{5, 6, 7}, []float64{5, 6, 7}
	rep, err := r.report(bench.Machine{CPU: "a | b", Cores: 2})
	require.NoError(t, err)

	var md, text, js strings.Builder
	require.NoError(t, rep.WriteMarkdown(&md))
	require.NoError(t, rep.WriteText(&text))
	require.NoError(t, rep.WriteJSON(&js))
	assert.Contains(t, md.String(), "**4** (3 to 5) |", "kvblockd is ahead of both of ours")
	assert.NotContains(t, md.String(), "**1**")
	assert.Contains(t, md.String(), "not run: its library is not here")
	assert.Contains(t, md.String(), "| Mooncake (TCP) | TCP |")
	assert.Contains(t, text.String(), "not run: its library is not here")
	assert.Contains(t, text.String(), "membrane bench replay")
	var back Report
	require.NoError(t, json.Unmarshal([]byte(js.String()), &back))
	assert.Equal(t, rep.Targets, back.Targets)
	assert.Len(t, back.Rows, len(rep.Rows))

	dir := filepath.Join(t.TempDir(), "out")
	require.NoError(t, bench.Save(rep, dir, "peers"))
	for _, name := range []string{"peers.txt", "peers.json", "peers.md"} {
		st, err := os.Stat(filepath.Join(dir, name))
		require.NoError(t, err)
		assert.Positive(t, st.Size(), name)
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for _, o := range []Options{{Rounds: -1}, {Duration: -1}, {Cells: "("}, {Systems: []string{"postgres"}}} {
		_, err := Run(context.Background(), o)
		assert.Error(t, err, "%+v", o)
	}
}

func TestQuickRunMeasuresAndVerifies(t *testing.T) {
	binary := membraneBinary(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	rep, err := Run(ctx, Options{
		Binary: binary, Quick: true, Rounds: 2, Duration: 10 * time.Millisecond, Dir: t.TempDir(),
		Systems: []string{"shared", "kvwire", "redis", "kvblockd"}, Cells: "^get 64KiB (x32 )?streams=1$|^set 2MiB|^get 2MiB streams=1$",
		Progress: func(line string) { t.Log(line) },
	})
	require.NoError(t, err)
	measured := map[string]bool{}
	for _, row := range append(rep.Rows, rep.Ceilings...) {
		if row.Why != "" || row.Throughput == nil {
			continue
		}
		measured[row.Name] = true
		assert.Positive(t, row.GBs, row.Name)
		assert.Positive(t, row.P50US, row.Name)
		assert.Positive(t, row.RSSMB, row.Name)
		assert.Equal(t, row.System != sysBare, row.Verified, row.Name)
	}
	for _, name := range []string{
		"get 64KiB x32 streams=1: " + sysData, "get 64KiB x32 streams=1: " + sysEngine, "get 64KiB x32 streams=1: " + sysBare,
		"get 2MiB streams=1: " + sysShm, "set 2MiB streams=8: " + sysShm, "set 2MiB streams=8: " + sysEngine,
	} {
		assert.True(t, measured[name], name)
	}
	for _, row := range rep.Rows {
		if row.Throughput != nil && row.System == sysKVB {
			assert.Contains(t, row.Why, "kvblockd is neither in the peers' folder nor on the path")
		}
	}
}

func TestQuickRunOfMixedLoadsMetadataAndMemory(t *testing.T) {
	binary := membraneBinary(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	rep, err := Run(ctx, Options{
		Binary: binary, Quick: true, Full: true, Rounds: 1, Duration: 10 * time.Millisecond, Dir: t.TempDir(),
		Systems: []string{"shared", "http", "predecessor"}, Cells: "^(mixed|aside) 64KiB|^get 64KiB.*hit|^retrieve|^memory",
		Progress: func(line string) { t.Log(line) },
	})
	require.NoError(t, err)
	ratios := map[string]float64{}
	for _, row := range rep.Rows {
		if row.Throughput != nil && row.System == sysPred {
			assert.Contains(t, row.Why, "is neither in the peers' folder", row.Name)
			continue
		}
		assert.Empty(t, row.Why, row.Name)
		assert.Positive(t, row.Value, row.Name)
		if row.Ratio == nil {
			continue
		}
		// A batch hits or misses whole, and a busy machine reads very few in the time.
		if least, ok := ratios[row.Op]; !ok || *row.Ratio < least {
			ratios[row.Op] = *row.Ratio
		}
	}
	assert.Contains(t, ratios, opGet)
	assert.Less(t, ratios[opGet], 1.0, "half of the keys are not there")
	assert.Contains(t, ratios, opAside)
	assert.Less(t, ratios[opAside], 1.0, "four times the budget is not all there")
	assert.InDelta(t, 1.2, ratios[opMemory], 0.2, "memory for each byte held")
}

// What a cell leaves behind would push out what the next one writes.
func TestCellsLeaveNothingInASystem(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	held := newStore()
	addr := fake(t, held.serveRESP)
	s := &system{name: "fake", store: "fake", open: func(ctx context.Context, _ *running, _ opening) (Conn, error) {
		return dialRESP(ctx, addr, "k:")
	}}
	on := &running{server: selfAs(t, "empty")}
	r := &run{
		payloads: payloads(t, 16, testSize), opts: Options{Duration: time.Millisecond, Seed: 1},
		filled: map[string]bool{}, sizing: sizing{budget: 16 * testSize, written: 32 * testSize},
	}
	for _, op := range []string{opMixed, opSet, opAside} {
		require.NoError(t, r.fill(ctx, s, on), op)
		require.Equal(t, 16, held.len(), op)
		_, err := r.timed(ctx, 0, cell{Op: op, Size: testSize, Batch: 1, Streams: 2}, s, on)
		require.NoError(t, err, op)
		assert.Zero(t, held.len(), op)
	}
	require.NoError(t, r.fill(ctx, s, on))
	for key := range held.m {
		held.drop(key) // as a system that evicts does
		break
	}
	s.product = &product{name: "fake"}
	r.running, r.results = map[*product]*running{s.product: on}, map[rowKey]*result{}
	r.opts.Progress = func(string) {}
	get := getCell(testSize, 1, 1)
	get.HitPercent = 100
	r.opts.Duration = 50 * time.Millisecond
	require.NoError(t, r.one(ctx, 0, get, s))
	assert.Contains(t, r.result(get, s).why, "is gone")
	assert.Zero(t, held.len(), "what is left is not taken for all")
	assert.False(t, r.filled["fake"])

	r.opts.Duration, held.flip = time.Millisecond, true
	_, err := r.timed(ctx, 0, cell{Op: opSet, Size: testSize, Batch: 1, Streams: 2}, s, on)
	assert.ErrorAs(t, err, new(*MixedUpError))
	assert.Zero(t, held.len(), "a pass that failed")
}

// One peer that does not do what it is asked for, or has died, is no reason to
// lose an hour's figures of the others.
func TestAPeerThatFailsDoesNotEndTheRun(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var s *server
	p := &product{name: "predecessor", find: func(place) error { return nil }, start: func(ctx context.Context, _ place) (*running, error) {
		s = selfAs(t, "empty")
		addr, err := s.firstLine(ctx)
		return &running{server: s, addrs: map[string]string{"http": addr}}, err
	}}
	pred := &system{name: sysPred, product: p, store: sysPred, ops: []string{opRetrieve}}
	r := &run{
		opts: Options{Progress: func(string) {}}, results: map[rowKey]*result{}, dir: t.TempDir(), systems: []*system{pred}, running: map[*product]*running{}, absent: map[*product]string{},
		cells: []cell{{Op: opRetrieve, Batch: 1, Streams: 1}},
	}
	require.NoError(t, r.startAll(ctx))
	require.NoError(t, r.one(ctx, 0, r.cells[0], pred))
	assert.Contains(t, r.result(r.cells[0], pred).why, "cannot prefill", "an empty answer names no fragments")
	s.kill()
	r.payloads, r.filled = payloads(t, 1, testSize), map[string]bool{sysPred: true}
	require.NoError(t, r.changeSize(ctx, testSize, getCell(testSize, 1, 1)), "a peer that is gone has nothing to drop")
	assert.Empty(t, r.filled)
	r.filled[sysPred], pred.ours = true, true
	require.ErrorContains(t, r.changeSize(ctx, testSize, getCell(testSize, 1, 1)), "cannot signal")
}

// A hit ratio of four times the budget is that of a full cache, however long
// the cell is measured.
func TestAsideIsMeasuredOnAFullCache(t *testing.T) {
	held := newStore()
	addr := fake(t, held.serveRESP)
	s := &system{name: "fake", open: func(ctx context.Context, _ *running, _ opening) (Conn, error) { return dialRESP(ctx, addr, "k:") }}
	r := &run{payloads: payloads(t, 16, testSize), opts: Options{Duration: 1, Seed: 1}, sizing: sizing{budget: 16 * testSize}}
	for _, n := range []int{1, 4} { // several may store a key twice
		c := cell{Op: opAside, Size: testSize, Batch: 1, Streams: n, Zipf: 0.99}
		streams, err := r.openStreams(t.Context(), 0, c, s, nil)
		defer closeStreams(streams)
		require.NoError(t, err)
		require.NoError(t, r.warm(t.Context(), c, streams))
		assert.GreaterOrEqual(t, held.len(), 16/n, "%d streams", n)
		for range 40 {
			require.NoError(t, r.warm(t.Context(), c, streams), "it ends where everything is held, too")
		}
		assert.LessOrEqual(t, held.len(), 64)
		clear(held.m)
	}
}

func TestPythonClientsAreAskedLineByLine(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r := &run{payloads: payloads(t, 4, testSize), opts: Options{Duration: time.Millisecond, Seed: 1}}
	s := selfAs(t, "helper")
	on := &running{server: selfAs(t, "empty"), helper: &helper{server: s, in: s.stdin.(io.Writer)}}
	m, err := r.helped(ctx, getCell(testSize, 1, 1), on)
	require.NoError(t, err)
	assert.InDelta(t, 2, m.gbs(), 1e-9)
	assert.InDelta(t, 20, m.opsPerSecond(), 1e-9)
	assert.Equal(t, 2*time.Millisecond, percentile(m.latencies, 99))
	_, err = r.helped(ctx, getCell(testSize, 8, 1), on)
	assert.ErrorContains(t, err, "the helper: one at a time")
	misses := getCell(testSize, 1, 1)
	misses.HitPercent = 50
	_, err = r.helped(ctx, misses, on)
	assert.ErrorContains(t, err, "only what is there", "its clients would hit always where others miss")
}

func TestHelperCompiles(t *testing.T) {
	python, err := exec.LookPath("python3")
	require.NoError(t, err, "make test needs Python")
	path, err := writeHelper(t.TempDir())
	require.NoError(t, err)
	out, err := exec.Command(python, "-c", "import ast, sys; ast.parse(open(sys.argv[1]).read())", path).CombinedOutput()
	assert.NoError(t, err, string(out))
}
