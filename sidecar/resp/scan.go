package resp

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"time"

	"membrane/kvwire"
)

// scanLeast is how many keys a step of SCAN names at least where there are as
// many: a step looks at every page once, so few small ones would be slow.
const scanLeast = 1024

// scan names the keys whose hash begins with the bits of the cursor, so it
// needs no memory between steps, and keys that stay are named once. The cursor
// is the number of bits in the lowest six bits and the next beginning above.
func scan(c *conn) {
	cursor, ok := parseInt(c.q.arg(1))
	if !ok || cursor < 0 {
		c.out.fail("ERR invalid cursor")
		return
	}
	pattern, count := []byte(nil), int64(10)
	for i := 2; i < c.q.len(); i += 2 {
		switch {
		case i+1 == c.q.len():
			c.out.fail("ERR syntax error")
			return
		case c.q.is(i, "MATCH"):
			pattern = c.q.arg(i + 1)
		case c.q.is(i, "COUNT"):
			if count, ok = parseInt(c.q.arg(i + 1)); !ok || count < 1 {
				c.out.fail(errNumber)
				return
			}
		case c.q.is(i, "TYPE"):
			if !equalFold(c.q.arg(i+1), "STRING") {
				c.out.array(2)
				c.out.bulk("0")
				c.out.array(0)
				return
			}
		default:
			c.out.fail("ERR syntax error")
			return
		}
	}
	width, part := uint(cursor&63), uint64(cursor>>6)
	if cursor == 0 {
		steps := c.space.Len() / int(max(scanLeast, min(count, MaxKeys/2)))
		width = uint(bits.Len(uint(steps)))
	}
	if width > 32 || part>>width != 0 {
		c.out.fail("ERR invalid cursor")
		return
	}
	found, err := c.space.Hashes(nil, maxScan, func(h *kvwire.Hash) bool {
		return width == 0 || binary.BigEndian.Uint64(h[:8])>>(64-width) == part
	})
	if err != nil {
		c.out.fail("ERR " + err.Error())
		return
	}
	next := "0"
	if part+1 < 1<<width {
		next = fmt.Sprint((part+1)<<6 | uint64(width))
	}
	names := c.names(found, pattern)
	c.out.array(2)
	c.out.bulk(next)
	c.list(names)
}

// maxScan is the most keys of one step, which only somebody who has chosen
// keys by their hashes can reach.
const maxScan = 1 << 16

func keys(c *conn) {
	found, err := c.space.Hashes(nil, MaxKeys, func(*kvwire.Hash) bool { return true })
	if err != nil {
		c.out.fail(fmt.Sprintf("ERR there are more than %d keys: use SCAN", MaxKeys))
		return
	}
	c.list(c.names(found, c.q.arg(1)))
}

func (c *conn) list(names []string) {
	c.out.array(len(names))
	for _, n := range names {
		c.out.bulk(n)
	}
}

// names returns the keys of pages that are here and match: both of a pair.
func (c *conn) names(hashes []kvwire.Hash, pattern []byte) []string {
	var out []string
	var b [headerFixed + MaxKey]byte
	now := time.Now()
	for _, h := range hashes {
		n, _, why := c.space.Head(b[:], kvwire.Shard{Count: 1}, form, h)
		if why == kvwire.ReasonLayout {
			n, _, why = c.space.Head(b[:], kvwire.Shard{Count: 2}, form, h)
		}
		if why != kvwire.ReasonNone {
			continue
		}
		head, err := parseHeader(b[:n])
		if err != nil || n < headerFixed+head.key || head.expired(now) {
			continue
		}
		text := b[headerFixed : headerFixed+head.key]
		if hashKey(text, head.kind) != h {
			continue // the header is not what was stored
		}
		kinds := []kind{head.kind}
		if head.kind >= pairBytes {
			k := key{kind: head.kind, shard: kvwire.Shard{Count: 2}, hash: h}
			if !c.held(&k) {
				continue // the other half has expired
			}
			kinds = []kind{pairBytes, pairMetadata}
		}
		for _, k := range kinds {
			name := string(text) + k.suffix()
			if pattern == nil || match(pattern, []byte(name)) {
				out = append(out, name)
			}
		}
	}
	return out
}

// match reports whether a name matches a pattern of Redis: * ? [a-z] [^a] and
// \ before a character that means itself. It takes at most as many steps as
// the product of both lengths.
func match(pattern, name []byte) bool {
	p, n := 0, 0
	star, mark := -1, 0
	for n < len(name) {
		if p < len(pattern) && pattern[p] == '*' {
			star, mark = p, n
			p++
			continue
		}
		if next, ok := matchOne(pattern, p, name[n]); ok {
			p = next
			n++
			continue
		}
		if star < 0 {
			return false
		}
		mark++
		p, n = star+1, mark
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}

// matchOne matches one character with what is at p, and returns what follows.
func matchOne(pattern []byte, p int, c byte) (next int, ok bool) {
	if p == len(pattern) {
		return p, false
	}
	switch pattern[p] {
	case '?':
		return p + 1, true
	case '\\':
		if p+1 < len(pattern) {
			p++
		}
		return p + 1, pattern[p] == c
	case '[':
		return matchClass(pattern, p+1, c)
	}
	return p + 1, pattern[p] == c
}

func matchClass(pattern []byte, p int, c byte) (next int, ok bool) {
	not := p < len(pattern) && pattern[p] == '^'
	if not {
		p++
	}
	for ; p < len(pattern) && pattern[p] != ']'; p++ {
		if pattern[p] == '\\' && p+1 < len(pattern) {
			p++
		}
		lo, hi := pattern[p], pattern[p]
		if p+2 < len(pattern) && pattern[p+1] == '-' && pattern[p+2] != ']' {
			hi = pattern[p+2]
			p += 2
		}
		if c >= min(lo, hi) && c <= max(lo, hi) {
			ok = true
		}
	}
	return min(p+1, len(pattern)), ok != not
}
