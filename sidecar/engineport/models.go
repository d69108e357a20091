package engineport

import (
	"membrane/cache"
	"membrane/kvwire"
)

// Model is where the pages of attached engines are kept, and how they look.
type Model struct {
	Space      *cache.Space
	Form       kvwire.Form
	Shards     int
	PageTokens int
	PageBytes  int64 // about: all shards, as large as the first that came
}

// Models returns the models of the attached engines; engines that share pages
// are one.
func (s *Server) Models() (out []Model) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.engines {
		m := Model{e.space, e.form, e.shards, e.pageTokens, e.pageBytes}
		known := false
		for _, o := range out {
			known = known || o.Space == m.Space && o.Form == m.Form
		}
		if !known {
			out = append(out, m)
		}
	}
	return out
}
