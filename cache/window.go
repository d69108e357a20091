package cache

// firstWindow is the window's part of the room at first. What the policy can
// tell of pages depends on how often they were asked for, so an empty cache
// begins as one that goes by recency.
const firstWindow = 0.95

// window is the recency window: pages in the order in which they came, which
// the policy does not see. It is guarded by Cache.mu.
type window struct {
	head, tail *page // newest, oldest
	root, leaf *page // where oldest goes on while root is the tail
	bytes      int64
	count      int
}

func (w *window) pushNewest(p *page) {
	p.place = inWindow
	p.prev, p.next = nil, w.head
	if w.head != nil {
		w.head.prev = p
	} else {
		w.tail = p
	}
	w.head = p
	w.bytes += p.bytes
	w.count++
}

func (w *window) pushOldest(p *page) {
	p.place = inWindow
	p.prev, p.next = w.tail, nil
	if w.tail != nil {
		w.tail.next = p
	} else {
		w.head = p
	}
	w.tail = p
	w.bytes += p.bytes
	w.count++
}

func (w *window) remove(p *page) {
	if p.prev != nil {
		p.prev.next = p.next
	} else {
		w.head = p.next
	}
	if p.next != nil {
		p.next.prev = p.prev
	} else {
		w.tail = p.prev
	}
	if w.leaf == p || w.root == p {
		w.leaf, w.root = nil, nil
	}
	p.prev, p.next = nil, nil
	w.bytes -= p.bytes
	w.count--
}

// pushNewest puts a page that is in no list in front of the window.
func (c *Cache) pushNewest(p *page) {
	c.turn++
	p.used, p.turn = c.tick, c.turn
	c.window.pushNewest(p)
}

// use notes that a page was asked for: it is the newest of the window, also if
// it had left it for the policy. It needs c.mu.
func (c *Cache) use(p *page) {
	switch p.place {
	case inWindow:
		c.window.remove(p)
	case inPolicy:
		if !guard.window() {
			return
		}
		c.policyBytes -= p.bytes
		c.removed = append(c.removed, p.key)
		p.gen++
	default:
		return
	}
	c.pushNewest(p)
	if c.window.bytes > c.windowGoal {
		c.wake()
	}
}

// needed reports whether a page after p came or was asked for so much later
// than p itself that p must not leave at its time. It needs c.mu.
func (c *Cache) needed(p *page) bool {
	k := p.childIn(inWindow)
	return k != nil && c.tick-k.used < (c.tick-p.used)/2
}

// oldest returns the page that leaves the window next: the oldest one, or of
// those that are of no use without it the last. It needs c.mu and a window
// that is not empty.
func (c *Cache) oldest() *page {
	w := &c.window
	p := w.tail
	for c.needed(p) {
		w.remove(p)
		c.pushNewest(p)
		p = w.tail
	}
	if w.root == p && w.leaf != nil {
		p = w.leaf
	}
	for {
		k := p.childIn(inWindow)
		if k == nil {
			break
		}
		p = k
	}
	w.root, w.leaf = nil, nil
	if p != w.tail {
		w.root, w.leaf = w.tail, p.parent
	}
	return p
}
