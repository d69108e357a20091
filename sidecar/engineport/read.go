package engineport

import (
	"time"

	"membrane/kvwire"
)

// handleRead sends leased pages of this rank's shard from the arena, one frame
// each, many in one writev. It checks everything before the first frame, because
// an error frame can only stand in place of the answer.
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
	c.frames.Begin(c.nc, id)
	defer c.frames.Drop()
	for i, h := range hashes[r.First:][:r.Pages] {
		c.queuePage(uint32(i), h)
		if c.frames.Full() {
			if err := c.sendPages(); err != nil {
				return err
			}
		}
	}
	return c.sendPages()
}

// queuePage queues one page frame. A page that left the cache although it was
// leased (it failed its checksum) is a frame without bytes and with a reason.
func (c *conn) queuePage(index uint32, h kvwire.Hash) {
	view, why := c.eng.space.View(c.shard, c.eng.form, h, false)
	p := kvwire.PageHeader{Index: index, Shard: c.shard, Reason: why, Form: c.eng.form}
	if view == nil {
		c.frames.Page(p, nil, nil)
		return
	}
	p.Sum, p.Auth = view.Sum(), view.Auth()
	c.frames.Page(p, view.Bytes(), view)
}

func (c *conn) sendPages() error {
	_ = c.nc.SetWriteDeadline(time.Now().Add(c.s.cfg.WriteTimeout))
	if err := c.frames.Flush(); err != nil {
		return closing{err}
	}
	return nil
}
