package engineport

import (
	"net"
	"time"

	"membrane/kvwire"
)

// handleRead sends leased pages of this rank's shard from the arena, one frame
// each. It checks everything before the first frame, because an error frame
// can only stand in place of the answer.
func (c *conn) handleRead(id uint32, body []byte) error {
	if err := c.stores(); err != nil {
		return err
	}
	r, err := kvwire.ParseRead(body)
	if err != nil {
		return err
	}
	e := c.eng
	e.mu.Lock()
	l := e.leases[r.Lease]
	var hashes []kvwire.Hash
	var expires time.Time
	if l != nil {
		hashes, expires = l.hashes, l.expires
	}
	over := l != nil && l.over
	e.mu.Unlock()
	if l == nil {
		return kvwire.Errorf(kvwire.CodeUnknownLease, "lease", "%d was never given out or is another engine's", r.Lease)
	}
	if _, live := c.s.cfg.Cache.LeaseClient(r.Lease); over || !live || time.Now().After(expires) {
		return kvwire.Errorf(kvwire.CodeUnknownLease, "lease", "%d has ended", r.Lease)
	}
	if int64(r.First)+int64(r.Pages) > int64(len(hashes)) {
		return kvwire.Errorf(kvwire.CodeBadField, "pages", "%d pages from %d on are beyond the lease's %d", r.Pages, r.First, len(hashes))
	}
	c.out = c.out[:0]
	for i, h := range hashes[r.First:][:r.Pages] {
		if err := c.sendPage(id, uint32(i), h); err != nil {
			return closing{err}
		}
	}
	return nil
}

// sendPage writes one page frame. A page that left the cache although it was
// leased (it failed its checksum) is a frame without bytes and with a reason.
func (c *conn) sendPage(id, index uint32, h kvwire.Hash) error {
	view, why := c.eng.space.View(c.shard, c.eng.form, h, false)
	p := kvwire.PageHeader{Index: index, Shard: c.shard, Reason: why, Form: c.eng.form}
	var object []byte
	if view != nil {
		defer view.Close()
		object = view.Bytes()
		p.Length, p.Sum, p.Auth = uint64(len(object)), view.Sum(), view.Auth()
	}
	head := kvwire.AppendHeader(c.out[:0], kvwire.Header{Type: kvwire.TypePage, ID: id, Length: uint32(kvwire.PageHeaderSize + len(object))})
	head = kvwire.AppendPageHeader(head, p)
	c.out = head[:0]
	_ = c.nc.SetWriteDeadline(time.Now().Add(c.s.cfg.WriteTimeout))
	frame := net.Buffers{head, object}
	_, err := frame.WriteTo(c.nc)
	return err
}
