package replay

import "container/list"

// lru is plain least recently used.
type lru struct {
	capacity int
	heads    bool
	order    *list.List // of uint64, most recent first
	at       map[uint64]*list.Element
	gone     uint64
}

func newLRU(capacity int, heads bool) *lru {
	return &lru{capacity: capacity, heads: heads, order: list.New(), at: make(map[uint64]*list.Element)}
}

func (l *lru) request(blocks []uint64) (held int, err error) {
	for held < len(blocks) && l.at[blocks[held]] != nil {
		held++
	}
	for i := range blocks {
		b := blocks[len(blocks)-1-i]
		if l.heads {
			b = blocks[i]
		}
		if e := l.at[b]; e != nil {
			l.order.MoveToFront(e)
			continue
		}
		l.at[b] = l.order.PushFront(b)
		if l.order.Len() > l.capacity {
			delete(l.at, l.order.Remove(l.order.Back()).(uint64))
			l.gone++
		}
	}
	return held, nil
}

func (l *lru) evictions() uint64 { return l.gone }
func (l *lru) close() error      { return nil }
