package proxy

import (
	"strings"

	"github.com/tidwall/gjson"
)

// maxDepth is how deep JSON may be nested: gjson recurses, and a stack without
// an end ends the process.
const maxDepth = 1000

// valid reports whether a text is JSON of a reasonable depth.
func valid(text string) bool { return shallow(text) && gjson.Valid(text) }

func shallow(text string) bool {
	depth := 0
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '{', '[':
			if depth++; depth > maxDepth {
				return false
			}
		case '}', ']':
			depth--
		case '"':
			i = endOfString(text, i+1)
		}
	}
	return true
}

// endOfString returns the place of the quote that ends a string, whose text
// begins at i. Most of a long body is one string.
func endOfString(text string, i int) int {
	for {
		n := strings.IndexByte(text[i:], '"')
		if n < 0 {
			return len(text)
		}
		quote := i + n
		slashes := 0
		for slashes < n && text[quote-1-slashes] == '\\' {
			slashes++
		}
		if slashes%2 == 0 {
			return quote
		}
		i = quote + 1
	}
}
