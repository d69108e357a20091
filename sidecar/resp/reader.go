package resp

import (
	"bytes"
	"fmt"

	"membrane/sidecar/listener"
)

// protocolError is bad input after which nobody knows where the next command
// begins: it is answered and the connection closed.
type protocolError string

func (e protocolError) Error() string { return "Protocol error: " + string(e) }

// reader takes commands apart.
type reader struct{ *listener.Reader }

func newReader(src listener.Source) *reader { return &reader{listener.NewReader(src, readBuffer)} }

var errLineTooLong = protocolError("too big inline request")

// line returns the next line without its end, valid until the next call. A
// lone \n ends a line too, as in Redis.
func (p *reader) line() ([]byte, error) {
	for seen := 0; ; {
		have := p.Unread()
		if i := bytes.IndexByte(have[seen:], '\n'); i >= 0 {
			p.Drop(seen + i + 1)
			return bytes.TrimSuffix(have[:seen+i], []byte("\r")), nil
		}
		seen = len(have)
		if seen == p.Size() {
			return nil, errLineTooLong
		}
		if err := p.Fill(); err != nil {
			if seen > 0 {
				err = listener.Unexpected(err)
			}
			return nil, err
		}
	}
}

// count reads a line of the given first byte and a number.
func (p *reader) count(first byte) (int64, error) {
	line, err := p.line()
	if err != nil {
		return 0, err
	}
	if len(line) == 0 || line[0] != first {
		got := byte(0)
		if len(line) > 0 {
			got = line[0]
		}
		return 0, protocolError(fmt.Sprintf("expected '%c', got %q", first, got))
	}
	n, ok := parseInt(line[1:])
	if !ok {
		if first == '*' {
			return 0, protocolError("invalid multibulk length")
		}
		return 0, protocolError("invalid bulk length")
	}
	return n, nil
}

var errBulkEnd = protocolError("a bulk string does not end where its length says")

// end reads the end of a bulk string.
func (p *reader) end() error {
	for len(p.Unread()) < 2 {
		if err := p.Fill(); err != nil {
			return listener.Unexpected(err)
		}
	}
	if b := p.Unread(); b[0] != '\r' || b[1] != '\n' {
		return errBulkEnd
	}
	p.Drop(2)
	return nil
}

// parseInt is for the numbers of the protocol and of arguments: decimal digits
// after an optional minus, within 64 bits.
func parseInt(b []byte) (int64, bool) {
	digits, negative := bytes.CutPrefix(b, []byte("-"))
	if len(digits) == 0 || len(digits) > 18 {
		return 0, false
	}
	n := int64(0)
	for _, c := range digits {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	if negative {
		n = -n
	}
	return n, true
}

// words appends the words of an inline command to the request. Words are
// separated by blanks; "…" may have escapes in it and '…' has \' only, as in
// Redis.
func words(line []byte, q *request) error {
	for {
		line = bytes.TrimLeft(line, " \t\r\x00")
		if len(line) == 0 {
			return nil
		}
		if len(q.spans) >= MaxArgs {
			return protocolError("too many arguments")
		}
		start := len(q.memory)
		rest, ok := word(line, q)
		if !ok {
			return protocolError("unbalanced quotes in request")
		}
		line = rest
		q.spans = append(q.spans, span{start, len(q.memory)})
	}
}

func word(line []byte, q *request) (rest []byte, ok bool) {
	quote := byte(0)
	for i := 0; i < len(line); i++ {
		c := line[i]
		switch {
		case quote == 0 && (c == ' ' || c == '\t' || c == '\r' || c == 0):
			return line[i:], true
		case quote == 0 && (c == '"' || c == '\''):
			quote = c
		case quote != 0 && c == quote:
			if i+1 < len(line) && line[i+1] != ' ' && line[i+1] != '\t' && line[i+1] != '\r' {
				return nil, false
			}
			return line[i+1:], true
		case quote == '\'' && c == '\\' && i+1 < len(line) && line[i+1] == '\'':
			i++
			q.memory = append(q.memory, '\'')
		case quote == '"' && c == '\\' && i+1 < len(line):
			i++
			if line[i] == 'x' && i+2 < len(line) && isHex(line[i+1:i+3]) {
				q.memory = append(q.memory, unhex(line[i+1])<<4|unhex(line[i+2]))
				i += 2
				continue
			}
			q.memory = append(q.memory, unescape(line[i]))
		default:
			q.memory = append(q.memory, c)
		}
	}
	return nil, quote == 0
}

func unhex(c byte) byte {
	switch {
	case c <= '9':
		return c - '0'
	case c >= 'a':
		return c - 'a' + 10
	}
	return c - 'A' + 10
}

func unescape(c byte) byte {
	switch c {
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	case 'b':
		return '\b'
	case 'a':
		return '\a'
	}
	return c
}

// request is the arguments of one command. Those that are values and went past
// the buffer are empty here.
type request struct {
	memory []byte
	spans  []span
}

type span struct{ from, to int }

func (q *request) reset() {
	if cap(q.memory) > keepMemory {
		q.memory = nil
	}
	if cap(q.spans) > keepMemory/16 {
		q.spans = nil
	}
	q.memory, q.spans = q.memory[:0], q.spans[:0]
}

func (q *request) len() int         { return len(q.spans) }
func (q *request) arg(i int) []byte { return q.memory[q.spans[i].from:q.spans[i].to] }

// is reports whether argument i is the word, which is in capitals.
func (q *request) is(i int, word string) bool { return equalFold(q.arg(i), word) }

func equalFold(b []byte, word string) bool {
	if len(b) != len(word) {
		return false
	}
	for i, c := range b {
		if c >= 'a' && c <= 'z' {
			c -= 'a' - 'A'
		}
		if c != word[i] {
			return false
		}
	}
	return true
}
