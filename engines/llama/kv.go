package llama

import (
	"encoding/binary"
	"fmt"
	"math"
)

// KV is the key-value cache of one sequence, in pages of a fixed number of
// tokens. Keys are stored after RoPE. One goroutine may use it at a time.
//
// The bytes of t tokens are, on every machine, float32 little-endian in the
// axis order [layer][key, value][kv head][token][head dim], with t on the token
// axis. A page has its page size there; a window has as many as it holds.
type KV struct {
	config     Config
	pageTokens int
	n          int // tokens computed
	room       int // tokens that the slices below have room for

	// One slice per (layer, kv head): [token][HeadDim]. Contiguous over pages,
	// because attention walks along tokens.
	k, v [][]float32

	scratch scratch
}

// PageBytes returns the bytes of one page of pageTokens tokens.
func (m *Model) PageBytes(pageTokens int) int { return pageTokens * m.config.kvRow() * 4 }

// NewKV makes an empty cache. It panics unless pageTokens is from 1 to
// MaxPageTokens; callers that take it from outside check it first.
func (m *Model) NewKV(pageTokens int) *KV {
	if pageTokens < 1 || pageTokens > MaxPageTokens {
		//nolint:forbidigo // a mistake of the caller's, who checks what comes from outside
		panic(fmt.Sprintf("llama: page of %d tokens, must be from 1 to %d", pageTokens, MaxPageTokens))
	}
	lanes := m.config.Layers * m.config.KVHeads
	return &KV{config: m.config, pageTokens: pageTokens, k: make([][]float32, lanes), v: make([][]float32, lanes)}
}

// Len returns how many tokens the cache holds.
func (kv *KV) Len() int { return kv.n }

// PageTokens returns the page size in tokens.
func (kv *KV) PageTokens() int { return kv.pageTokens }

// Page returns a copy of page i, which holds tokens i*P to (i+1)*P-1. It always
// has PageBytes bytes; rows of tokens that are not computed are zero. It is nil
// if page i holds no computed token.
func (kv *KV) Page(i int) []byte {
	p := kv.pageTokens
	if i < 0 || i > kv.n/p || i*p >= kv.n {
		return nil
	}
	b := make([]byte, p*kv.config.kvRow()*4)
	kv.gather(b, i*p, min(p, kv.n-i*p), p)
	return b
}

// ReadPage copies the full page i into dst, which must have PageBytes bytes.
// All P tokens of the page must be computed.
func (kv *KV) ReadPage(dst []byte, i int) error {
	if i < 0 || i >= kv.n/kv.pageTokens {
		return fmt.Errorf("cannot read page %d: %d full pages are computed", i, kv.n/kv.pageTokens)
	}
	return kv.ReadWindow(dst, i*kv.pageTokens, kv.pageTokens)
}

// Window returns a copy of the bytes of tokens start to start+tokens-1, with
// exactly that many on the token axis. It is nil unless all are computed and
// tokens is positive.
func (kv *KV) Window(start, tokens int) []byte {
	if !kv.holds(start, tokens) {
		return nil
	}
	b := make([]byte, tokens*kv.config.kvRow()*4)
	kv.gather(b, start, tokens, tokens)
	return b
}

// ReadWindow is Window into dst, which must have the exact length.
func (kv *KV) ReadWindow(dst []byte, start, tokens int) error {
	if !kv.holds(start, tokens) {
		return fmt.Errorf("cannot read window of %d tokens at %d: %d tokens are computed", tokens, start, kv.n)
	}
	if want := tokens * kv.config.kvRow() * 4; len(dst) != want {
		return fmt.Errorf("cannot read window of %d tokens at %d: destination has %d bytes, must have %d", tokens, start, len(dst), want)
	}
	kv.gather(dst, start, tokens, tokens)
	return nil
}

func (kv *KV) holds(start, tokens int) bool {
	return start >= 0 && tokens > 0 && start <= kv.n && tokens <= kv.n-start
}

// LoadPage copies b in as the full page i. Pages are loaded in order: page i
// must begin at Len, which grows by P. The values are not looked at; bytes that
// were changed on their way change the tokens.
func (kv *KV) LoadPage(i int, b []byte) error { return kv.LoadPageTokens(i, b, kv.pageTokens) }

// LoadPageTokens is LoadPage for a page of which only the first tokens rows are
// to be used. b is still a whole page.
func (kv *KV) LoadPageTokens(i int, b []byte, tokens int) error {
	p := kv.pageTokens
	if i < 0 || kv.n%p != 0 || i != kv.n/p {
		return fmt.Errorf("cannot load page %d: the cache holds %d tokens in pages of %d", i, kv.n, p)
	}
	if tokens < 1 || tokens > p {
		return fmt.Errorf("cannot load page %d: tokens is %d, must be from 1 to %d", i, tokens, p)
	}
	if err := kv.load(b, tokens, p); err != nil {
		return fmt.Errorf("cannot load page %d: %w", i, err)
	}
	return nil
}

// LoadWindow copies b in as tokens start to start+tokens-1. start must be Len,
// which grows by tokens.
func (kv *KV) LoadWindow(start, tokens int, b []byte) error {
	if start != kv.n {
		return fmt.Errorf("cannot load window at %d: the cache holds %d tokens", start, kv.n)
	}
	if tokens < 1 {
		return fmt.Errorf("cannot load window at %d: tokens is %d, must be at least 1", start, tokens)
	}
	if err := kv.load(b, tokens, tokens); err != nil {
		return fmt.Errorf("cannot load window at %d: %w", start, err)
	}
	return nil
}

// load appends the first tokens rows of b, which has axis rows per lane.
func (kv *KV) load(b []byte, tokens, axis int) error {
	if err := kv.checkRoom(tokens); err != nil {
		return err
	}
	if want := axis * kv.config.kvRow() * 4; len(b) != want {
		return fmt.Errorf("%d tokens have %d bytes, must have %d", axis, len(b), want)
	}
	kv.grow(kv.n + tokens)
	kv.scatter(b, kv.n, tokens, axis)
	kv.n += tokens
	return nil
}

// Truncate drops every token from n on. The last token of a loaded prompt is
// dropped this way to be computed again for its logits.
func (kv *KV) Truncate(n int) error {
	if n < 0 || n > kv.n {
		return fmt.Errorf("cannot truncate to %d tokens: the cache holds %d", n, kv.n)
	}
	kv.n = n
	return nil
}

func (kv *KV) checkRoom(tokens int) error {
	if limit := kv.config.MaxPositions; tokens > limit-kv.n {
		return fmt.Errorf("%d tokens after %d exceed the model's %d positions", tokens, kv.n, limit)
	}
	return nil
}

// grow makes room for n tokens.
func (kv *KV) grow(n int) {
	if n <= kv.room {
		return
	}
	kv.room = min(n+n/4+64, kv.config.MaxPositions)
	for _, side := range [][][]float32{kv.k, kv.v} {
		for i, old := range side {
			side[i] = make([]float32, kv.room*kv.config.HeadDim)
			copy(side[i], old[:min(len(old), kv.n*kv.config.HeadDim)])
		}
	}
}

// lane returns the slice of one (layer, side, kv head) in the order of the
// canonical axes; i counts through them.
func (kv *KV) lane(i int) []float32 {
	heads := kv.config.KVHeads
	at := i/(2*heads)*heads + i%heads
	if i/heads%2 == 0 {
		return kv.k[at]
	}
	return kv.v[at]
}

func (kv *KV) gather(dst []byte, start, tokens, axis int) {
	d := kv.config.HeadDim
	for i := range 2 * len(kv.k) {
		b := dst[i*axis*d*4:]
		for j, f := range kv.lane(i)[start*d : (start+tokens)*d] {
			binary.LittleEndian.PutUint32(b[j*4:], math.Float32bits(f))
		}
	}
}

func (kv *KV) scatter(src []byte, start, tokens, axis int) {
	d := kv.config.HeadDim
	for i := range 2 * len(kv.k) {
		b := src[i*axis*d*4:]
		lane := kv.lane(i)[start*d : (start+tokens)*d]
		for j := range lane {
			lane[j] = math.Float32frombits(binary.LittleEndian.Uint32(b[j*4:]))
		}
	}
}
