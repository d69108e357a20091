package resp

import (
	"fmt"
	"math"
	"time"

	"membrane/cache"
)

// msetResult is what MSET has done so far.
type msetResult struct {
	stored int
	bad    string
}

// received is called when a value is here. MSET stores it at once: only one
// slot is held at a time.
func (c *conn) received(int) {
	if c.cmd.name != "mset" {
		return
	}
	switch what, bad := c.commit(cache.Always, 0); {
	case what == failed && c.mset.bad == "":
		c.mset.bad = bad
	case what == stored:
		c.mset.stored++
	}
}

func mset(c *conn) {
	switch pairs := (c.q.len() - 1) / 2; {
	case c.q.len()%2 == 0:
		c.out.fail("ERR wrong number of arguments for 'mset' command")
	case c.mset.bad != "":
		c.out.fail(fmt.Sprintf("%s; %d of %d values were stored", c.mset.bad, c.mset.stored, pairs))
	default:
		c.out.ok()
	}
}

func set(c *conn) {
	cond, expires := cache.Always, int64(0)
	for i := 3; i < c.q.len(); i++ {
		switch {
		case c.q.is(i, "NX") && cond == cache.Always:
			cond = cache.IfAbsent
		case c.q.is(i, "XX") && cond == cache.Always:
			cond = cache.IfHeld
		case (c.q.is(i, "EX") || c.q.is(i, "PX")) && expires == 0 && i+1 < c.q.len():
			at, ok := deadline(c.q.arg(i+1), c.q.is(i, "EX"))
			if !ok || at <= time.Now().UnixMilli() {
				c.out.fail("ERR invalid expire time in 'set' command")
				return
			}
			expires = at
			i++
		case c.q.is(i, "KEEPTTL") || c.q.is(i, "GET") || c.q.is(i, "EXAT") || c.q.is(i, "PXAT"):
			c.out.fail(fmt.Sprintf("ERR SET with %.16s is not supported", c.q.arg(i)))
			return
		default:
			c.out.fail("ERR syntax error")
			return
		}
	}
	switch what, bad := c.commit(cond, expires); what {
	case stored:
		c.out.ok()
	case unmet:
		c.out.null()
	default:
		c.out.fail(bad)
	}
}

// deadline returns the Unix time in milliseconds that lies the given number of
// seconds or milliseconds ahead.
func deadline(text []byte, seconds bool) (int64, bool) {
	n, ok := parseInt(text)
	if !ok {
		return 0, false
	}
	now := time.Now().UnixMilli()
	if seconds {
		if n > math.MaxInt64/2000 || n < -math.MaxInt64/2000 {
			return 0, false
		}
		n *= 1000
	}
	if n > math.MaxInt64/2 || n < -math.MaxInt64/2 {
		return 0, false
	}
	return now + n, true
}
