package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"membrane/engines/llama"
)

// A shape of a prompt tree: every prompt is a path of three segments, whole
// pages each, and a tail of its own that fills no page. Prompts of one root
// share the first segment, those of one branch the second as well.
type chaosShape struct {
	roots, branches, leaves int // children of the tree, of a root, of a branch
	root, branch, leaf      int // pages of the segments
	pageTokens              int
}

// pages is how many different pages the prompts have.
func (s chaosShape) pages() int {
	return s.roots * (s.root + s.branches*(s.branch+s.leaves*s.leaf))
}

// leafPrompt is a prompt and its right answer.
type leafPrompt struct{ prompt, want []uint32 }

// prompts returns the tree's prompts, the same for the same seed.
func (s chaosShape) prompts(seed uint64) [][]uint32 {
	rng := rand.New(rand.NewPCG(seed, 1))
	segment := func(prefix []uint32, tokens int) []uint32 {
		out := slices.Clip(slices.Clone(prefix))
		for range tokens {
			out = append(out, rng.Uint32N(1024))
		}
		return out
	}
	var all [][]uint32
	for range s.roots {
		root := segment(nil, s.root*s.pageTokens)
		for range s.branches {
			branch := segment(root, s.branch*s.pageTokens)
			for range s.leaves {
				leaf := segment(branch, s.leaf*s.pageTokens)
				all = append(all, segment(leaf, 1+rng.IntN(s.pageTokens-1)))
			}
		}
	}
	return all
}

// answers computes every prompt's greedy tokens in this process, each from its
// first token on: nothing of one prompt is used for another.
func answers(ctx context.Context, m *llama.Model, prompts [][]uint32, maxTokens int, progress func(string)) ([]leafPrompt, error) {
	all := make([]leafPrompt, len(prompts))
	var done atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i, p := range prompts {
		group.Go(func() error {
			kv := m.NewKV(chaosPage)
			logits, err := m.Prefill(ctx, kv, p)
			if err != nil {
				return err
			}
			all[i].prompt = p
			err = m.Greedy(ctx, kv, logits, maxTokens, func(t uint32) bool { all[i].want = append(all[i].want, t); return true })
			if n := done.Add(1); n%32 == 0 {
				progress(fmt.Sprintf("right answers computed without a cache: %d of %d", n, len(prompts)))
			}
			return err
		})
	}
	return all, group.Wait()
}

// picker picks prompts at random, a few of them much more often than most.
type picker struct {
	rng  *rand.Rand
	zipf *rand.Zipf
	perm []int
}

// newPicker returns a picker among n prompts. Pickers of one seed favour the
// same prompts; each stream is a sequence of its own.
func newPicker(seed uint64, stream, n int) *picker {
	rng := rand.New(rand.NewPCG(seed, 100+uint64(stream)))
	return &picker{rng: rng, zipf: rand.NewZipf(rng, 1.1, 8, uint64(n-1)), perm: rand.New(rand.NewPCG(seed, 2)).Perm(n)}
}

func (p *picker) next() int { return p.perm[p.zipf.Uint64()] }
