package mesh

import (
	"membrane/cache"
	"membrane/kvwire"
)

// Holding is how much of a prefix a peer seems to hold.
type Holding struct {
	Name  string // of the peer
	Pages int    // leading pages
}

// Holders returns the peers that seem to hold some of the leading pages of a
// prefix, as their directories tell: no message is sent. A directory can be
// wrong about a page, and later than the page.
func (m *Mesh) Holders(space *cache.Space, form kvwire.Form, hashes []kvwire.Hash) (out []Holding) {
	c := &call{m: m, req: FillRequest{Space: space, Form: form, Hashes: hashes}, digests: make([]uint64, len(hashes)), probes: make(map[string]int)}
	for _, p := range m.peers.all() {
		if p.isDown() {
			continue
		}
		if n := c.run(p, 0); n > 0 {
			out = append(out, Holding{p.name, n})
		}
	}
	return out
}
