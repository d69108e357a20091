package kvwire

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
)

// Scope is everything per request that changes what the numbers in a page
// mean, beside the tokens: an adapter or other extra key, and a cache salt. It
// seeds the chain. A nil field is absent, which is not the same as empty.
type Scope struct {
	ExtraKey  *string
	CacheSalt *string
}

// Seed returns the digest that stands before the first page, and false when
// the scope is empty and the chain starts with no digest at all.
//
// Source: SGLang, storage_namespace_seed in
// python/sglang/srt/mem_cache/utils.py.
func (s Scope) Seed() (Hash, bool) {
	if s.ExtraKey == nil && s.CacheSalt == nil {
		return Hash{}, false
	}
	h := sha256.New()
	h.Write([]byte("sglang-cache-namespace-v1"))
	for _, part := range []*string{s.ExtraKey, s.CacheSalt} {
		if part == nil {
			h.Write([]byte{0})
			continue
		}
		var n [9]byte
		n[0] = 1
		binary.LittleEndian.PutUint64(n[1:], uint64(len(*part)))
		h.Write(n[:])
		h.Write([]byte(*part))
	}
	var seed Hash
	h.Sum(seed[:0])
	return seed, true
}

// tokenSize is the wire size of a token id: four bytes, little endian.
const tokenSize = 4

// Chain turns the tokens of one sequence into the content hashes of its pages:
// each is the SHA-256 of the digest before it and the page's token ids as
// four-byte little-endian integers. Only full pages have a hash, see [Chain.Tail]
// for the rest.
//
// A Chain is not safe for concurrent use.
//
// Source: SGLang, get_hash_str in python/sglang/srt/mem_cache/utils.py.
type Chain struct {
	pageTokens int
	tokens     int
	prior      Hash
	seeded     bool
	hashes     []Hash
	buf        []byte // digest, then the tokens of the page that is not full yet
}

// NewChain returns the empty chain of a scope with pageTokens tokens a page.
func NewChain(pageTokens int, scope Scope) (*Chain, error) {
	if pageTokens < MinPageTokens || pageTokens > MaxPageTokens {
		return nil, Errorf(CodeBadField, "page_tokens", "%d is not between %d and %d", pageTokens, MinPageTokens, MaxPageTokens)
	}
	c := &Chain{pageTokens: pageTokens, buf: make([]byte, HashSize, HashSize+pageTokens*tokenSize)}
	c.prior, c.seeded = scope.Seed()
	return c, nil
}

// Expect makes room for so many tokens more, so that a prompt whose tokens come
// in pieces is hashed into one allocation.
func (c *Chain) Expect(tokens int) {
	if n := ((len(c.buf)-HashSize)/tokenSize + min(tokens, MaxTokens)) / c.pageTokens; n > 0 {
		c.hashes = slices.Grow(c.hashes, n)
	}
}

// AppendWire adds token ids in wire form (four bytes each, little endian) and
// hashes each page that they fill.
func (c *Chain) AppendWire(tokens []byte) error {
	if len(tokens)%tokenSize != 0 {
		return Errorf(CodeBadField, "tokens", "%d bytes are not a whole number of four-byte ids", len(tokens))
	}
	n := len(tokens) / tokenSize
	if tooMany(n, MaxTokens-c.tokens) {
		return Errorf(CodeTooLarge, "tokens", "%d tokens are more than %d", c.tokens+n, MaxTokens)
	}
	c.tokens += n
	page := c.pageTokens * tokenSize
	c.Expect(n)
	for len(c.buf)-HashSize+len(tokens) >= page {
		k := HashSize + page - len(c.buf)
		c.buf = append(c.buf, tokens[:k]...)
		tokens = tokens[k:]
		c.close()
	}
	c.buf = append(c.buf, tokens...)
	return nil
}

// Append adds token ids and hashes each page that they fill.
func (c *Chain) Append(tokens ...uint32) error {
	b := make([]byte, 0, len(tokens)*tokenSize)
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return c.AppendWire(b)
}

func (c *Chain) close() {
	c.prior = c.sum()
	c.seeded = true
	c.hashes = append(c.hashes, c.prior)
	c.buf = c.buf[:HashSize]
}

func (c *Chain) sum() Hash {
	if !c.seeded {
		return sha256.Sum256(c.buf[HashSize:])
	}
	copy(c.buf, c.prior[:])
	return sha256.Sum256(c.buf)
}

// PageTokens returns the number of tokens in a page.
func (c *Chain) PageTokens() int { return c.pageTokens }

// Tokens returns the number of tokens added so far.
func (c *Chain) Tokens() int { return c.tokens }

// Hashes returns the hashes of the full pages, first page first. The slice is
// the chain's own: it may be read until the next Append and not changed.
func (c *Chain) Hashes() []Hash { return c.hashes }

// Tail returns the hash that the tokens after the last full page would have as
// a short page of their own, and how many they are. Engines never publish such
// pages; the fragment API does.
func (c *Chain) Tail() (Hash, int) {
	n := (len(c.buf) - HashSize) / tokenSize
	if n == 0 {
		return Hash{}, 0
	}
	return c.sum(), n
}

// CheckTokens refuses token ids that do not fit four bytes and returns the
// others in wire form. The error names the index and the value.
func CheckTokens(field string, ids []int64) ([]byte, error) {
	if len(ids) > MaxTokens {
		return nil, Errorf(CodeTooLarge, field, "%d tokens are more than %d", len(ids), MaxTokens)
	}
	b := make([]byte, 0, len(ids)*tokenSize)
	for i, id := range ids {
		if id < 0 || id > 1<<32-1 {
			return nil, Errorf(CodeBadField, fmt.Sprintf("%s[%d]", field, i), "%d is not a token id (0 to 4294967295)", id)
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(id))
	}
	return b, nil
}
