package engineport

import (
	"membrane/cache"
	"membrane/kvwire"
)

// aheadPages is from how many pages on a match looks up the first ones while
// the tokens of the others are hashed: with fewer, handing them over takes
// longer than it saves.
const aheadPages = 256

// ahead looks pages up and checks them, in a goroutine of its own, while the
// hashes of those after them are computed. It ends with take or drop.
type ahead struct {
	hashes chan []kvwire.Hash
	done   chan struct{}
	sent   int // hashes of the chain that were handed over, or come before the first
	end    int // of those that will be

	// Owned by the goroutine until done is closed.
	prefix cache.Prefix
	why    kvwire.Reason
	err    error
}

// lookAhead begins with the pages of a chain from the first on, at most as many
// as a lease may have. It uses c.locations until it ends. A nil ahead may be fed
// and dropped.
func (c *conn) lookAhead(first int, req cache.LeaseRequest) *ahead {
	a := &ahead{hashes: make(chan []kvwire.Hash, 64), done: make(chan struct{}), sent: first, end: first + kvwire.MaxBatch}
	go a.run(c.eng.space, req, c.locations[:0])
	return a
}

func (a *ahead) run(space *cache.Space, req cache.LeaseRequest, dst []cache.Location) {
	defer close(a.done)
	a.prefix, a.why, a.err = space.Hold(req, dst)
	for hashes := range a.hashes {
		if a.err == nil {
			a.why = a.prefix.Follow(hashes, a.why)
			a.prefix.CheckAhead()
		}
	}
}

// feed hands over what is new among the hashes of the chain so far. They do not
// change any more, and a chain that outgrows its memory leaves the old behind.
func (a *ahead) feed(chain []kvwire.Hash) {
	if a == nil {
		return
	}
	if n := min(len(chain), a.end); n > a.sent {
		a.hashes <- chain[a.sent:n:n]
		a.sent = n
	}
}

// take waits for the last pages and returns what Hold would have.
func (a *ahead) take() (cache.Prefix, kvwire.Reason, error) {
	close(a.hashes)
	<-a.done
	return a.prefix, a.why, a.err
}

// drop lets go of the pages.
func (a *ahead) drop() {
	if a == nil {
		return
	}
	p, _, _ := a.take()
	p.Drop()
}
