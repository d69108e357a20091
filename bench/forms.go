package bench

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// Forms are the forms in which a report can be written: for a terminal, for a
// program and for a document.
type Forms interface {
	WriteText(w io.Writer) error
	WriteJSON(w io.Writer) error
	WriteMarkdown(w io.Writer) error
}

// Save writes a report in every form into a folder, which it makes: NAME.txt,
// NAME.json and NAME.md.
func Save(r Forms, dir, name string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("cannot make the folder %q: %w", dir, err)
	}
	for ext, write := range map[string]func(io.Writer) error{".txt": r.WriteText, ".json": r.WriteJSON, ".md": r.WriteMarkdown} {
		var b bytes.Buffer
		if err := write(&b); err != nil {
			return err
		}
		path := filepath.Join(dir, name+ext)
		if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
			return fmt.Errorf("cannot write %q: %w", path, err)
		}
	}
	return nil
}
