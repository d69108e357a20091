package replay

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strings"
	"time"
)

// Limits on what a trace file may hold. A longer one is refused.
const (
	// MaxLine is the longest line in bytes.
	MaxLine = 8 << 20
	// MaxRequests is the most lines.
	MaxRequests = 4 << 20
	// MaxTokens is the longest prompt or output in tokens.
	MaxTokens = 16 << 20
	// MaxBlocks is the most blocks of all requests together (8 bytes each).
	MaxBlocks = 256 << 20
	// MaxBlockTokens is the longest block in tokens.
	MaxBlockTokens = 1 << 16
)

// Format is how a line of a trace file says what was asked.
type Format struct {
	Name        string
	BlockTokens int
	// Millis: timestamps are milliseconds, else seconds.
	Millis bool
	// Chats: lines have chat_id and parent_chat_id.
	Chats bool
}

// The published formats.
var (
	// Mooncake is JSON lines with timestamp (ms), input_length, output_length
	// and hash_ids of 512 tokens (kvcache-ai/Mooncake, FAST25-release/traces).
	Mooncake = Format{Name: "mooncake", BlockTokens: 512, Millis: true}
	// Bailian is JSON lines with chat_id, parent_chat_id, timestamp (s),
	// input_length, output_length, type, turn and hash_ids of 16 tokens
	// (alibaba-edu/qwen-bailian-usagetraces-anon).
	Bailian = Format{Name: "bailian", BlockTokens: 16, Chats: true}
)

// LineError says which line and field of a trace is wrong.
type LineError struct {
	Line  int // from 1
	Field string
	Err   error
}

func (e *LineError) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("line %d: %v", e.Line, e.Err)
	}
	return fmt.Sprintf("line %d: field %q: %v", e.Line, e.Field, e.Err)
}

// Unwrap returns the cause.
func (e *LineError) Unwrap() error { return e.Err }

type record struct {
	ChatID    *int64   `json:"chat_id"`
	ParentID  *int64   `json:"parent_chat_id"`
	Timestamp *float64 `json:"timestamp"`
	Input     *int64   `json:"input_length"`
	Output    *int64   `json:"output_length"`
	HashIDs   []int64  `json:"hash_ids"`
}

// Detect returns the format of a trace by its first line: Bailian if that has
// a chat_id, and Mooncake otherwise.
func Detect(line []byte) Format {
	var r record
	if json.Unmarshal(line, &r) == nil && r.ChatID != nil {
		return Bailian
	}
	return Mooncake
}

// Read reads a trace. A zero format is detected. The name is for reports and
// errors; only its last path element is kept. Errors name the line and, where
// there is one, the field ([*LineError]).
func Read(r io.Reader, name string, format Format) (*Trace, error) {
	t, err := read(r, name, format)
	if err != nil {
		return nil, fmt.Errorf("cannot read trace %q: %w", name, err)
	}
	return t, nil
}

func read(r io.Reader, name string, format Format) (*Trace, error) {
	scan := bufio.NewScanner(r)
	scan.Buffer(make([]byte, 0, 64<<10), MaxLine)
	t := &Trace{Name: strings.TrimSuffix(filepath.Base(name), filepath.Ext(name))}
	sessions := make(map[int64]uint64)
	blocks, line := 0, 0
	var last time.Duration
	for scan.Scan() {
		line++
		text := scan.Bytes()
		if len(strings.TrimSpace(string(text))) == 0 {
			continue
		}
		if format.BlockTokens == 0 {
			format = Detect(text)
		}
		if len(t.Requests) >= MaxRequests {
			return nil, &LineError{Line: line, Err: fmt.Errorf("more than %d requests", MaxRequests)}
		}
		req, field, err := parse(text, format, sessions, uint64(line))
		if err != nil {
			return nil, &LineError{line, field, err}
		}
		if blocks += len(req.Blocks); blocks > MaxBlocks {
			return nil, &LineError{line, "hash_ids", fmt.Errorf("more than %d blocks in all lines", MaxBlocks)}
		}
		if req.At < last {
			return nil, &LineError{line, "timestamp", fmt.Errorf("%v is before %v of the line before", req.At, last)}
		}
		last = req.At
		t.Requests = append(t.Requests, req)
	}
	switch err := scan.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return nil, &LineError{Line: line + 1, Err: fmt.Errorf("longer than %d bytes", MaxLine)}
	case err != nil:
		return nil, &LineError{Line: line + 1, Err: err}
	case len(t.Requests) == 0:
		return nil, ErrNoRequests
	}
	if format.BlockTokens < 1 || format.BlockTokens > MaxBlockTokens {
		return nil, fmt.Errorf("block of %d tokens: not between 1 and %d", format.BlockTokens, MaxBlockTokens)
	}
	t.BlockTokens = format.BlockTokens
	t.About = fmt.Sprintf("file, %s format, blocks of %d tokens", format.Name, format.BlockTokens)
	return t, nil
}

// parse reads one line; the field is that of the error.
func parse(text []byte, format Format, sessions map[int64]uint64, line uint64) (Request, string, error) {
	var rec record
	if err := json.Unmarshal(text, &rec); err != nil {
		var kind *json.UnmarshalTypeError
		if errors.As(err, &kind) {
			return Request{}, kind.Field, fmt.Errorf("%s is no %s", kind.Value, kind.Type)
		}
		return Request{}, "", err
	}
	if rec.Timestamp == nil {
		return Request{}, "timestamp", errors.New("missing")
	}
	unit := time.Second
	if format.Millis {
		unit = time.Millisecond
	}
	at := *rec.Timestamp * float64(unit)
	if !(at >= 0 && at < math.MaxInt64/2) {
		return Request{}, "timestamp", fmt.Errorf("%v is not between 0 and %v", *rec.Timestamp, float64(math.MaxInt64/2)/float64(unit))
	}
	req := Request{At: time.Duration(at), Session: line}
	for _, f := range []struct {
		name string
		from *int64
		to   *int
	}{{"input_length", rec.Input, &req.Input}, {"output_length", rec.Output, &req.Output}} {
		if f.from == nil {
			return Request{}, f.name, errors.New("missing")
		}
		if *f.from < 0 || *f.from > MaxTokens {
			return Request{}, f.name, fmt.Errorf("%d is not between 0 and %d", *f.from, MaxTokens)
		}
		*f.to = int(*f.from)
	}
	if format.Chats {
		if rec.ChatID == nil {
			return Request{}, "chat_id", errors.New("missing")
		}
		if rec.ParentID != nil && *rec.ParentID >= 0 {
			if s, ok := sessions[*rec.ParentID]; ok {
				req.Session = s
			}
		}
		sessions[*rec.ChatID] = req.Session
	}
	// The last block of a prompt is there even if it is not full; it is left
	// out, as engines publish full blocks only.
	full := req.Input / format.BlockTokens
	if len(rec.HashIDs) > full+1 {
		return Request{}, "hash_ids", fmt.Errorf("%d blocks of %d tokens for %d tokens", len(rec.HashIDs), format.BlockTokens, req.Input)
	}
	if rec.HashIDs == nil && full > 0 {
		return Request{}, "hash_ids", errors.New("missing") // not a prompt that nothing can be reused of
	}
	full = min(full, len(rec.HashIDs))
	// Chained again, so that a block names its whole prefix also where a
	// trace hashes each block by itself.
	req.Blocks = make([]uint64, full)
	prev := uint64(0)
	for i, id := range rec.HashIDs[:full] {
		if id < 0 {
			return Request{}, "hash_ids", fmt.Errorf("%d at %d is below 0", id, i)
		}
		prev = chain(prev, uint64(id))
		req.Blocks[i] = prev
	}
	if !format.Chats && full > 0 {
		// Where nothing names conversations, prompts that begin alike are one:
		// by their second block, as the first may be everybody's.
		req.Session = req.Blocks[min(1, full-1)]
	}
	return req, "", nil
}
