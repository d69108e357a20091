package peers

import "io"

// WriteMarkdown is next.
func (r Report) WriteMarkdown(w io.Writer) error { return r.WriteText(w) }

// Save is next.
func (r Report) Save(dir string) error { return nil }
