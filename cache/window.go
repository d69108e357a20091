package cache

// window is the recency window: pages in the order in which they came, which
// the policy does not see. It is guarded by Cache.mu.
type window struct {
	head, tail *page // newest, oldest
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
	p.prev, p.next = nil, nil
	w.bytes -= p.bytes
	w.count--
}
