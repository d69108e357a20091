package proxy

import (
	"container/list"
	"crypto/sha256"
	"sync"
)

// recall remembers the tokens of prompts that were tokenized not long ago: those
// of a router's second attempt, of a conversation's next try. It forgets the
// one that was not asked for the longest.
type recall struct {
	mu     sync.Mutex
	most   int // tokens of all
	tokens int
	order  *list.List // newest first
	by     map[[sha256.Size]byte]*list.Element
}

type remembered struct {
	key    [sha256.Size]byte
	tokens []uint32
}

const (
	recallTokens  = 1 << 20 // 4 MiB
	recallEntries = 256
)

func newRecall(most int) *recall {
	return &recall{most: most, order: list.New(), by: make(map[[sha256.Size]byte]*list.Element)}
}

func (r *recall) get(key [sha256.Size]byte) ([]uint32, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.by[key]
	if e == nil {
		return nil, false
	}
	r.order.MoveToFront(e)
	v, ok := e.Value.(remembered)
	return v.tokens, ok
}

// put remembers tokens, which nobody may change after. More than all may have
// together are not remembered.
func (r *recall) put(key [sha256.Size]byte, tokens []uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.by[key] != nil || len(tokens) > r.most {
		return
	}
	r.by[key] = r.order.PushFront(remembered{key, tokens})
	r.tokens += len(tokens)
	for r.tokens > r.most || r.order.Len() > recallEntries {
		last := r.order.Back()
		r.order.Remove(last)
		if v, ok := last.Value.(remembered); ok {
			delete(r.by, v.key)
			r.tokens -= len(v.tokens)
		}
	}
}
