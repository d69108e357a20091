package proxy

import "github.com/tidwall/gjson"

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
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
		}
	}
	return true
}
