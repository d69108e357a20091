package llama

import (
	"context"
	"fmt"
	"math"
)

// chunkTokens is how many tokens go through a layer at once: enough to use each
// weight many times while it is in cache, few enough to notice a cancel soon. A
// multiple of tileRows.
const chunkTokens = 96

// scratch is the working memory of one sequence, kept between calls so that
// decoding does not allocate.
type scratch struct {
	x, h, q, att    []float32
	gate, up        []float32
	cos, sin, score []float32
	logits          []float32
}

// Prefill computes tokens that follow the kv.Len() tokens in kv, appends their
// keys and values, and returns the VocabSize logits of the last one. kv must
// come from a model of the same shape. Token ids must be below VocabSize unless
// the model takes any id; the error names index and value.
//
// ctx is looked at before every layer of every chunk of 96 tokens. After an
// error kv is valid and holds whatever chunks were finished.
func (m *Model) Prefill(ctx context.Context, kv *KV, tokens []uint32) ([]float32, error) {
	if err := m.check(kv, tokens); err != nil {
		return nil, fmt.Errorf("cannot prefill %d tokens at %d: %w", len(tokens), kv.n, err)
	}
	logits := make([]float32, m.config.VocabSize)
	if err := m.compute(ctx, kv, tokens, logits); err != nil {
		return nil, fmt.Errorf("cannot prefill %d tokens: %w", len(tokens), err)
	}
	return logits, nil
}

// Greedy decodes up to n tokens, the first being the largest of logits, which
// belong to the last token in kv. It calls yield with each token, and stops
// early when that returns false; end-of-sequence tokens are the caller's
// affair. A token is appended to kv only when another one after it is wanted,
// so the last token yielded is not in kv.
func (m *Model) Greedy(ctx context.Context, kv *KV, logits []float32, n int, yield func(token uint32) bool) error {
	return m.Decode(ctx, kv, logits, n, func(token uint32, _ []float32) bool { return yield(token) })
}

// Decode is Greedy; yield gets the logits, too, that each token is the largest
// of. They are its to read until it returns.
func (m *Model) Decode(ctx context.Context, kv *KV, logits []float32, n int, yield func(token uint32, logits []float32) bool) error {
	if len(logits) != m.config.VocabSize {
		return fmt.Errorf("cannot decode: %d logits, must be %d", len(logits), m.config.VocabSize)
	}
	if cap(kv.scratch.logits) < len(logits) {
		kv.scratch.logits = make([]float32, len(logits))
	}
	next := kv.scratch.logits[:len(logits)]
	var token [1]uint32
	for i := range n {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("cannot decode token %d: %w", i, err)
		}
		token[0] = Argmax(logits)
		if !yield(token[0], logits) || i == n-1 {
			return nil
		}
		err := m.check(kv, token[:])
		if err == nil {
			err = m.compute(ctx, kv, token[:], next)
		}
		if err != nil {
			return fmt.Errorf("cannot decode token %d: %w", i+1, err)
		}
		logits = next
	}
	return nil
}

// Argmax returns the index of the largest value, the first of equals. Values
// that are not numbers count as smallest; it is 0 for an empty slice.
func Argmax(logits []float32) uint32 {
	best, top := 0, float32(math.Inf(-1))
	for i, v := range logits {
		if v > top {
			best, top = i, v
		}
	}
	return uint32(best)
}

// Logprob returns the natural logarithm of a token's probability among logits.
// The token must be one of theirs.
func Logprob(logits []float32, token uint32) float64 {
	top := float64(logits[Argmax(logits)])
	var sum float64
	for _, v := range logits {
		sum += math.Exp(float64(v) - top)
	}
	return float64(logits[token]) - top - math.Log(sum)
}

func (m *Model) check(kv *KV, tokens []uint32) error {
	if kv.config != m.config {
		return fmt.Errorf("the cache belongs to a model of another shape")
	}
	if len(tokens) == 0 {
		return fmt.Errorf("no tokens")
	}
	if !m.config.AnyInputID {
		for i, t := range tokens {
			if uint64(t) >= uint64(m.config.VocabSize) {
				return fmt.Errorf("token %d is %d, must be below %d", i, t, m.config.VocabSize)
			}
		}
	}
	return kv.checkRoom(len(tokens))
}

func (m *Model) compute(ctx context.Context, kv *KV, tokens []uint32, logits []float32) error {
	kv.grow(kv.n + len(tokens))
	for len(tokens) > 0 {
		rows := min(chunkTokens, len(tokens))
		var want []float32
		if rows == len(tokens) {
			want = logits
		}
		if err := m.chunk(ctx, kv, tokens[:rows], want); err != nil {
			return err
		}
		kv.n += rows
		tokens = tokens[rows:]
	}
	return nil
}

// chunk runs all layers over tokens and fills logits for the last one unless
// it is nil.
func (m *Model) chunk(ctx context.Context, kv *KV, tokens []uint32, logits []float32) error {
	c, s := m.config, &kv.scratch
	rows, hidden, half := len(tokens), c.HiddenSize, c.HeadDim/2
	s.fit(c, rows)
	for r, t := range tokens {
		m.embed(s.x[r*hidden:][:hidden], t)
	}
	m.ropeTables(s.cos, s.sin, kv.n, rows)

	x, first := s.x, kv.n
	for i := range m.layers {
		if err := ctx.Err(); err != nil {
			return err
		}
		l, cos, sin := &m.layers[i], s.cos, s.sin
		rmsNorm(s.h, x, l.attnNorm, rows, hidden, c.RMSNormEps)
		m.appendKV(kv, i, s, first, rows)
		h := s.h
		if i == len(m.layers)-1 {
			// Beyond the last layer's keys and values only the last token counts.
			if logits == nil {
				return nil
			}
			x, h = x[(rows-1)*hidden:], h[(rows-1)*hidden:]
			cos, sin = cos[(rows-1)*half:], sin[(rows-1)*half:]
			first, rows = first+rows-1, 1
		}
		q := c.Heads * c.HeadDim
		m.matmul(s.q, h, rows, l.q, q, hidden)
		for r := range rows {
			rotate(s.q[r*q:], c.Heads, c.HeadDim, cos[r*half:], sin[r*half:])
		}
		m.attention(kv, i, s, first, rows)
		m.matmul(s.h, s.att, rows, l.o, hidden, q)
		add(x, s.h, rows*hidden)

		rmsNorm(s.h, x, l.mlpNorm, rows, hidden, c.RMSNormEps)
		m.matmul(s.gate, s.h, rows, l.gate, c.IntermediateSize, hidden)
		m.matmul(s.up, s.h, rows, l.up, c.IntermediateSize, hidden)
		for j, g := range s.gate[:rows*c.IntermediateSize] {
			s.up[j] *= g / (1 + exp32(-g))
		}
		m.matmul(s.h, s.up, rows, l.down, hidden, c.IntermediateSize)
		add(x, s.h, rows*hidden)
	}
	if logits != nil {
		last := x[(rows-1)*hidden:]
		rmsNorm(s.h, last, m.norm, 1, hidden, c.RMSNormEps)
		m.matmul(logits, s.h, 1, m.head, c.VocabSize, hidden)
	}
	return nil
}

// appendKV writes the keys and values of rows tokens from position first.
func (m *Model) appendKV(kv *KV, layer int, s *scratch, first, rows int) {
	c, l := m.config, &m.layers[layer]
	dim, width := c.HeadDim, c.KVHeads*c.HeadDim
	m.matmul(s.q, s.h, rows, l.k, width, c.HiddenSize)
	for r := range rows {
		rotate(s.q[r*width:], c.KVHeads, dim, s.cos[r*dim/2:], s.sin[r*dim/2:])
	}
	spread(kv.k[layer*c.KVHeads:][:c.KVHeads], s.q, first, rows, dim)
	m.matmul(s.q, s.h, rows, l.v, width, c.HiddenSize)
	spread(kv.v[layer*c.KVHeads:][:c.KVHeads], s.q, first, rows, dim)
}

// spread copies [rows][head][dim] into one [token][dim] slice per head.
func spread(lanes [][]float32, src []float32, first, rows, dim int) {
	for r := range rows {
		for _, lane := range lanes {
			copy(lane[(first+r)*dim:][:dim], src)
			src = src[dim:]
		}
	}
}

func (m *Model) attention(kv *KV, layer int, s *scratch, first, rows int) {
	c := m.config
	if need := c.Heads * tileRows * (first + rows); len(s.score) < need {
		// Room for the whole cache, so that decoding seldom comes here.
		s.score = make([]float32, c.Heads*tileRows*kv.room)
	}
	if m.threads == 1 {
		attendHeads(kv, layer, s, first, rows, 0, c.Heads)
		return
	}
	parallel(m.threads, c.Heads, func(lo, hi int) { attendHeads(kv, layer, s, first, rows, lo, hi) })
}

func attendHeads(kv *KV, layer int, s *scratch, first, rows, lo, hi int) {
	c, step := kv.config, first+rows
	for h := lo; h < hi; h++ {
		lane := layer*c.KVHeads + h/(c.Heads/c.KVHeads)
		attend(s.att[h*c.HeadDim:], s.q[h*c.HeadDim:], c.Heads*c.HeadDim, rows, first,
			kv.k[lane], kv.v[lane], c.HeadDim, s.score[h*tileRows*step:][:tileRows*step], step)
	}
}

// matmul sets dst, [rows][outputs], to x, [rows][inputs], times w transposed.
func (m *Model) matmul(dst, x []float32, rows int, w []float32, outputs, inputs int) {
	if m.threads == 1 {
		dotRows(dst, outputs, x, inputs, rows, w, inputs, 0, outputs)
		return
	}
	parallel(m.threads, outputs, func(lo, hi int) {
		dotRows(dst, outputs, x, inputs, rows, w, inputs, lo, hi)
	})
}

func add(dst, x []float32, n int) {
	dst, x = dst[:n], x[:n]
	for i, v := range x {
		dst[i] += v
	}
}

// fit makes every buffer of the scratch large enough for rows tokens.
func (s *scratch) fit(c Config, rows int) {
	q := c.Heads * c.HeadDim
	for _, b := range []struct {
		buf *[]float32
		n   int
	}{
		{&s.x, c.HiddenSize},
		{&s.h, c.HiddenSize},
		{&s.q, q},
		{&s.att, q},
		{&s.gate, c.IntermediateSize},
		{&s.up, c.IntermediateSize},
		{&s.cos, c.HeadDim / 2},
		{&s.sin, c.HeadDim / 2},
	} {
		if len(*b.buf) < rows*b.n {
			*b.buf = make([]float32, rows*b.n)
		}
	}
}
