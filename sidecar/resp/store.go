package resp

import (
	"context"
	"fmt"
	"time"

	"membrane/cache"
	"membrane/kvwire"
)

// incoming is the value that a command brings, between its arrival and the end
// of the command.
type incoming struct {
	s      *Server
	k      key
	slot   *cache.Slot
	room   int64 // of Server.receiving
	header int
	length int64
	sums   cache.PartSums
	exists bool            // an immutable value is here already
	have   kvwire.Checksum // its checksum
	bad    string
}

// abort gives back what a command that was not run left behind.
func (v *incoming) abort() {
	if v.slot != nil {
		v.slot.Abort()
		v.slot = nil
	}
	if v.room > 0 {
		v.s.receiving.Release(v.room)
		v.room = 0
	}
}

// prepare finds out where a value of n bytes goes. If v.slot is then nil, the
// value is to be thrown away, after a look at whether it is the one that is
// here where v.exists says so.
func (c *conn) prepare(name []byte, n int64) {
	v := &c.store
	*v = incoming{s: c.s, length: n, sums: v.sums}
	v.sums.Reset()
	if n > c.s.maxValue {
		c.s.count.refuse(kvwire.ReasonTooLarge)
		v.bad = fmt.Sprintf("ERR value of %d bytes is above the limit of %d", n, c.s.maxValue)
		return
	}
	v.k = parseKey(name)
	v.header = headerSize(&v.k)
	total := int64(v.header) + n
	if v.k.immutable() {
		c.expire(&v.k)
	}
	if !c.claim(total) {
		c.s.count.refuse(kvwire.ReasonOverBudget)
		v.bad = "OOM no room for a value now: as many as may be are being received"
		return
	}
	v.room = total
	var res cache.PutResult
	var err error
	if v.k.immutable() {
		v.slot, res, err = c.space.Reserve(v.k.shard, form, v.k.hash, total)
	} else {
		v.slot, res, err = c.space.ReserveAnew(form, v.k.hash, total)
	}
	if v.slot != nil {
		putHeader(v.slot.Bytes(), &v.k, 0)
		return
	}
	v.abort()
	switch {
	case err != nil:
		v.bad = "ERR " + err.Error()
	case res.Exists:
		v.exists, v.have = true, res.Sum
	default:
		v.bad = c.refused(res.Reason)
	}
}

// claim takes n bytes of what values under way may occupy together.
func (c *conn) claim(n int64) bool {
	if c.s.receiving.TryAcquire(n) {
		return true
	}
	if c.out.flush() != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(c.s.clients.Context(), roomTimeout)
	defer cancel()
	return c.s.receiving.Acquire(ctx, n) == nil
}

// refused counts a store that was refused and says so.
func (c *conn) refused(why kvwire.Reason) string {
	c.s.count.refuse(why)
	switch why {
	case kvwire.ReasonOverBudget:
		return "OOM no room for this value now (over_budget)"
	case kvwire.ReasonReset:
		return "ERR the keys were flushed while this value came (reset)"
	}
	return fmt.Sprintf("ERR cannot store this value (%s)", why)
}

// receive reads a value of n bytes into its slot.
func (c *conn) receive(name []byte, n int64) error {
	c.prepare(name, n)
	v := &c.store
	if int64(len(c.in.Unread())) < n {
		if err := c.pace.Hurry(n); err != nil {
			return err
		}
	}
	c.s.count.received.AddInt64(n)
	switch {
	case v.slot != nil:
		return c.in.Parts(v.slot.Bytes(), v.header, &v.sums)
	case v.exists:
		return c.in.Compare(c.sameHeader(), n, &v.sums)
	}
	return c.in.Skip(n)
}

// sameHeader returns the header that the value has which is here, or, while
// the other half of its pair is missing, the one that it most likely has.
func (c *conn) sameHeader() []byte {
	v := &c.store
	b := make([]byte, v.header)
	if n, _, why := c.space.Head(b, v.k.shard, form, v.k.hash); why != kvwire.ReasonNone || n < len(b) {
		putHeader(b, &v.k, 0)
	}
	return b
}

// take is receive for a value that is here already.
func (c *conn) take(name, value []byte) {
	if len(name) > MaxKey {
		c.store = incoming{bad: fmt.Sprintf("ERR a key of %d bytes is above the limit of %d", len(name), MaxKey)}
		return
	}
	c.prepare(name, int64(len(value)))
	v := &c.store
	c.s.count.received.Add(len(value))
	switch {
	case v.slot != nil:
		copy(v.slot.Bytes()[v.header:], value)
		v.sums.Set(0, v.slot.Bytes()) // an inline command is shorter than a part
	case v.exists:
		v.sums.Set(0, append(c.sameHeader(), value...))
	}
}

// outcome says what became of a store.
type outcome uint8

const (
	stored outcome = iota
	unmet          // NX or XX
	failed         // the reply is the error
)

// commit ends the store of the value that was received.
func (c *conn) commit(cond cache.Condition, expires int64) (outcome, string) {
	v := &c.store
	defer v.abort()
	switch {
	case v.bad != "":
		return failed, v.bad
	case v.exists:
		return c.existing(cond, v.have)
	}
	if expires != 0 {
		b := v.slot.Bytes()
		putHeader(b, &v.k, expires)
		v.sums.Set(0, b[:min(len(b), cache.PartSize)])
	}
	if cond != cache.Always {
		c.expire(&v.k)
	}
	slot := v.slot
	v.slot = nil
	if !v.k.immutable() {
		res := slot.Commit(cond, v.sums.Sum())
		if res.Exists || res.Reason == kvwire.ReasonAbsent {
			return unmet, ""
		}
		return c.result(res)
	}
	if cond == cache.IfHeld { // it was not when this value came
		slot.Abort()
		return unmet, ""
	}
	res := slot.Commit(cache.IfAbsent, v.sums.Sum())
	if res.Exists { // somebody was faster
		return c.existing(cond, res.Sum)
	}
	return c.result(res)
}

func (c *conn) result(res cache.PutResult) (outcome, string) {
	if !res.Stored {
		return failed, c.refused(res.Reason)
	}
	c.s.count.stored.Inc()
	return stored, ""
}

// existing counts a store of an immutable value of which one is here already.
func (c *conn) existing(cond cache.Condition, have kvwire.Checksum) (outcome, string) {
	c.s.count.existing.Inc()
	if have != c.store.sums.Sum() {
		c.s.count.conflicts.Inc()
	}
	if cond == cache.IfAbsent {
		return unmet, ""
	}
	return stored, ""
}

// held reports whether a value is here and has not expired.
func (c *conn) held(k *key) bool {
	_, _, why := c.head(k)
	return why == kvwire.ReasonNone
}

// head returns the header of a value and the value's length, or why it is not
// here. Of a value whose time has come it returns the header that says so,
// which of a pair may be the other half's.
func (c *conn) head(k *key) (header, int64, kvwire.Reason) {
	h, length, why := c.half(k, k.shard)
	if why == kvwire.ReasonNone && k.shard.Count > 1 {
		other := kvwire.Shard{Index: 1 - k.shard.Index, Count: k.shard.Count}
		if o, _, why := c.half(k, other); why != kvwire.ReasonNone {
			return o, 0, why
		}
	}
	return h, length, why
}

func (c *conn) half(k *key, shard kvwire.Shard) (header, int64, kvwire.Reason) {
	var b [headerFixed]byte
	n, length, why := c.space.Head(b[:], shard, form, k.hash)
	if why != kvwire.ReasonNone {
		return header{}, 0, why
	}
	h, err := parseHeader(b[:n])
	switch {
	case err != nil || length < int64(h.size):
		return header{}, 0, kvwire.ReasonCorrupt
	case h.expires != 0 && h.expired(time.Now()):
		return h, 0, kvwire.ReasonAbsent
	}
	return h, length - int64(h.size), kvwire.ReasonNone
}

// expired reports whether a value is here whose time has come.
func (c *conn) expired(k *key) bool {
	h, _, why := c.head(k)
	return why == kvwire.ReasonAbsent && h.expires != 0
}

// expire removes a value whose time has come. If another takes its place at
// this moment, that one stays.
func (c *conn) expire(k *key) {
	if !c.expired(k) {
		return
	}
	v, why := c.space.View(k.shard, form, k.hash, false)
	if why != kvwire.ReasonNone {
		return
	}
	defer v.Close()
	if c.expired(k) { // if it is another than that of v, this removes nothing
		v.Remove()
	}
}
