package resp

import (
	"time"

	"membrane/cache"
	"membrane/kvwire"
)

// load puts the view of a value into the writer's next place and returns the
// value, or the reason why there is none. Bytes of one part were checked, the
// writer checks longer ones as it sends them.
func (c *conn) load(k *key) ([]byte, kvwire.Reason) {
	v := c.out.next()
	why := c.space.Borrow(v, k.shard, form, k.hash, false)
	if why == kvwire.ReasonPinned && c.out.held > 0 {
		_ = c.out.flush() // what this connection holds itself
		v = c.out.next()
		why = c.space.Borrow(v, k.shard, form, k.hash, false)
	}
	if why != kvwire.ReasonNone {
		c.s.count.miss(why)
		return nil, why
	}
	if b := v.Bytes(); len(b) <= cache.PartSize && guard.getSum() && !v.Check(cache.SumParts(b)) {
		v.Close()
		c.s.count.miss(kvwire.ReasonCorrupt)
		return nil, kvwire.ReasonCorrupt
	}
	h, err := parseHeader(v.Bytes())
	if err != nil || h.size > len(v.Bytes()) {
		why = kvwire.ReasonCorrupt
	} else if h.expires != 0 && h.expired(time.Now()) || k.shard.Count > 1 && c.expired(k) {
		why = kvwire.ReasonAbsent
	}
	if why != kvwire.ReasonNone {
		v.Remove()
		v.Close()
		c.s.count.miss(why)
		return nil, why
	}
	if k.kind != pairMetadata { // a pair counts once
		c.s.count.hits.Inc()
	}
	return v.Bytes()[h.size:], kvwire.ReasonNone
}

const errPinned = "BUSY too many bytes are waiting for slow readers (pinned)"

func get(c *conn) {
	k := parseKey(c.q.arg(1))
	switch b, why := c.load(&k); why {
	case kvwire.ReasonNone:
		c.out.value(b)
	case kvwire.ReasonPinned:
		c.out.fail(errPinned)
	default:
		c.out.null()
	}
}

// mget answers values in order. One that cannot be served now is missing.
func mget(c *conn) {
	c.out.array(c.q.len() - 1)
	for i := 1; i < c.q.len(); i++ {
		k := parseKey(c.q.arg(i))
		if b, why := c.load(&k); why == kvwire.ReasonNone {
			c.out.value(b)
		} else {
			c.out.null()
		}
	}
}

func getRange(c *conn) {
	from, ok1 := parseInt(c.q.arg(2))
	to, ok2 := parseInt(c.q.arg(3))
	if !ok1 || !ok2 {
		c.out.fail(errNumber)
		return
	}
	k := parseKey(c.q.arg(1))
	b, why := c.load(&k)
	switch why {
	case kvwire.ReasonNone:
	case kvwire.ReasonPinned:
		c.out.fail(errPinned)
		return
	default:
		c.out.bulk("")
		return
	}
	n := int64(len(b))
	if from < 0 {
		from = max(0, from+n)
	}
	if to < 0 {
		to += n
	}
	if to = min(to, n-1); from > to {
		from, to = 0, -1
	}
	// What is checked is the whole value, so a part of one that is longer is
	// checked beforehand.
	if v := c.out.next(); len(v.Bytes()) > cache.PartSize && !v.Check(cache.SumParts(v.Bytes())) {
		v.Close()
		c.s.count.miss(kvwire.ReasonCorrupt)
		c.out.bulk("")
		return
	}
	c.out.part(b[from : to+1])
}

const errNumber = "ERR value is not an integer or out of range"

func strlen(c *conn) {
	k := parseKey(c.q.arg(1))
	_, n, _ := c.head(&k)
	c.out.integer(n)
}

func memoryUsage(c *conn) {
	if !c.q.is(1, "USAGE") || c.q.len() != 3 && c.q.len() != 5 {
		c.out.fail("ERR unknown subcommand of 'memory': only USAGE key")
		return
	}
	if c.q.len() == 5 && !c.q.is(3, "SAMPLES") {
		c.out.fail("ERR syntax error")
		return
	}
	k := parseKey(c.q.arg(2))
	h, n, why := c.head(&k)
	if why != kvwire.ReasonNone {
		c.out.null()
		return
	}
	c.out.integer(int64(h.size) + n)
}

// exists counts keys. One that is missing counts as looked up, so that the
// policy learns what is wanted; one that is here does when it is read.
func exists(c *conn) {
	n := int64(0)
	for i := 1; i < c.q.len(); i++ {
		k := parseKey(c.q.arg(i))
		_, _, why := c.head(&k)
		if why == kvwire.ReasonNone {
			n++
			continue
		}
		c.s.count.miss(why)
		c.touch(&k)
	}
	c.out.integer(n)
}

func (c *conn) touch(k *key) { c.space.Match(form, []kvwire.Hash{k.hash}) }

func touch(c *conn) {
	n := int64(0)
	for i := 1; i < c.q.len(); i++ {
		k := parseKey(c.q.arg(i))
		if c.held(&k) {
			n++
		}
		c.touch(&k)
	}
	c.out.integer(n)
}

func typeOf(c *conn) {
	k := parseKey(c.q.arg(1))
	if c.held(&k) {
		c.out.simple("string")
		return
	}
	c.out.simple("none")
}

// del removes keys. Half of a pair takes the other with it.
func del(c *conn) {
	n := int64(0)
	for i := 1; i < c.q.len(); i++ {
		k := parseKey(c.q.arg(i))
		held := c.held(&k)
		if c.space.Remove(form, k.hash) && held {
			n++
		}
	}
	c.out.integer(n)
}

func ttl(c *conn) {
	k := parseKey(c.q.arg(1))
	h, _, why := c.head(&k)
	left := h.expires - time.Now().UnixMilli()
	switch {
	case why != kvwire.ReasonNone:
		c.out.integer(-2)
	case h.expires == 0:
		c.out.integer(-1)
	case c.cmd.name == "ttl":
		c.out.integer((max(left, 0) + 500) / 1000)
	default:
		c.out.integer(max(left, 0))
	}
}

func expire(c *conn) {
	at, ok := deadline(c.q.arg(2), c.cmd.name == "expire")
	if !ok {
		c.out.fail(errNumber)
		return
	}
	c.setExpiry(at)
}

func persist(c *conn) { c.setExpiry(0) }

// setExpiry stores the value once more with another time: the header belongs
// to what the checksum is taken of, and readers may have the old one in hand.
func (c *conn) setExpiry(at int64) {
	k := parseKey(c.q.arg(1))
	if k.immutable() {
		c.out.fail("ERR an immutable key has the time to live that it was stored with")
		return
	}
	for range 8 {
		v, why := c.space.View(k.shard, form, k.hash, true)
		if why != kvwire.ReasonNone {
			c.out.integer(0)
			return
		}
		done, n, bad := c.renew(v, &k, at)
		v.Close()
		switch {
		case bad != "":
			c.out.fail(bad)
			return
		case done:
			c.out.integer(n)
			return
		}
	}
	c.out.fail("ERR the key is stored anew too often to change its time to live")
}

// renew does it for one view; it is not done if the value is another by now.
func (c *conn) renew(v *cache.View, k *key, at int64) (done bool, n int64, bad string) {
	h, err := parseHeader(v.Bytes())
	now := time.Now()
	switch {
	case err != nil || h.expired(now):
		v.Remove()
		return true, 0, ""
	case at == 0 && h.expires == 0:
		return true, 0, ""
	case at != 0 && at <= now.UnixMilli():
		v.Remove()
		return true, 1, ""
	}
	if !c.claim(int64(len(v.Bytes()))) {
		return true, 0, c.refused(kvwire.ReasonOverBudget)
	}
	defer c.s.receiving.Release(int64(len(v.Bytes())))
	slot, res, err := c.space.ReserveAnew(form, k.hash, int64(len(v.Bytes())))
	if err != nil {
		return true, 0, "ERR " + err.Error()
	}
	if slot == nil {
		return true, 0, c.refused(res.Reason)
	}
	copy(slot.Bytes(), v.Bytes())
	putHeader(slot.Bytes(), k, at)
	switch res = slot.CommitOver(v, cache.SumParts(slot.Bytes())); {
	case res.Stored:
		return true, 1, ""
	case res.Exists:
		return false, 0, ""
	case res.Reason == kvwire.ReasonAbsent:
		return true, 0, ""
	}
	return true, 0, c.refused(res.Reason)
}
