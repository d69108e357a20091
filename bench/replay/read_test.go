package replay

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const mooncakeLines = `{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 27482, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 7]}
`

const bailianLines = `{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 40, "output_length": 3, "type": "text", "turn": 1, "hash_ids": [9, 8, 7]}
{"chat_id": 4, "parent_chat_id": 1, "timestamp": 61.25, "input_length": 50, "output_length": 3, "type": "text", "turn": 2, "hash_ids": [9, 8, 3, 5]}
`

func TestPublishedFormatsAreRead(t *testing.T) {
	m, err := Read(strings.NewReader(mooncakeLines), "dir/conversation_trace.jsonl", Format{})
	require.NoError(t, err)
	assert.Equal(t, "conversation_trace", m.Name)
	assert.Equal(t, 512, m.BlockTokens)
	require.Len(t, m.Requests, 2)
	a, b := m.Requests[0], m.Requests[1]
	assert.Len(t, a.Blocks, 2, "the last block of a prompt is not full")
	assert.Len(t, b.Blocks, 3)
	assert.Equal(t, a.Blocks, b.Blocks[:2])
	assert.Equal(t, 27482*time.Millisecond, b.At)
	assert.Equal(t, []int{1100, 5}, []int{a.Input, a.Output})
	assert.Equal(t, a.Session, b.Session)

	q, err := Read(strings.NewReader(bailianLines), "b", Format{})
	require.NoError(t, err)
	assert.Equal(t, 16, q.BlockTokens)
	assert.Equal(t, 500*time.Millisecond, q.Requests[0].At)
	assert.Len(t, q.Requests[0].Blocks, 2)
	assert.Equal(t, q.Requests[0].Session, q.Requests[1].Session, "a turn belongs to its parent's chat")
	f := q.Facts()
	assert.InDelta(t, 32.0/90, f.Reusable, 1e-9)
	assert.Equal(t, 3, f.Distinct)
}

// A block names all before it, also where a trace hashes blocks by themselves.
func TestEqualBlocksAfterOthersAreOthers(t *testing.T) {
	m, err := Read(strings.NewReader(`{"timestamp":0,"input_length":1024,"output_length":0,"hash_ids":[1,5]}
{"timestamp":0,"input_length":1024,"output_length":0,"hash_ids":[2,5]}`), "x", Mooncake)
	require.NoError(t, err)
	assert.NotEqual(t, m.Requests[0].Blocks[1], m.Requests[1].Blocks[1])
}

func TestWrongTracesAreRefusedByLineAndField(t *testing.T) {
	line := func(at, in, out, ids string) string {
		return fmt.Sprintf(`{"timestamp":%s,"input_length":%s,"output_length":%s,"hash_ids":%s}`, at, in, out, ids)
	}
	good := line("0", "512", "1", "[1]") + "\n"
	for _, c := range []struct {
		name, text, field string
		line              int
	}{
		{"no JSON", good + "{", "", 2},
		{"no time", `{"input_length":1}`, "timestamp", 1},
		{"time below 0", line("-1", "1", "1", "[]"), "timestamp", 1},
		{"time too large", line("1e300", "1", "1", "[]"), "timestamp", 1},
		{"back in time", line("5", "1", "1", "[]") + "\n" + line("4", "1", "1", "[]"), "timestamp", 2},
		{"no input", `{"timestamp":1}`, "input_length", 1},
		{"input above the limit", line("0", fmt.Sprint(MaxTokens+1), "1", "[]"), "input_length", 1},
		{"output below 0", line("0", "1", "-1", "[]"), "output_length", 1},
		{"text for a number", good + good + line("0", `"a"`, "1", "[]"), "input_length", 3},
		{"too many blocks", line("0", "512", "1", "[1,2,3]"), "hash_ids", 1},
		{"no hashes", good + `{"timestamp":1,"input_length":1024,"output_length":1}`, "hash_ids", 2},
		{"hashes that are null", line("0", "512", "1", "null"), "hash_ids", 1},
		{"id below 0", line("0", "512", "1", "[-1]"), "hash_ids", 1},
		{"a line too long", good + strings.Repeat(" ", MaxLine+1), "", 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Read(strings.NewReader(c.text), "x", Mooncake)
			var wrong *LineError
			require.ErrorAs(t, err, &wrong)
			assert.Equal(t, c.line, wrong.Line, "%v", err)
			assert.Equal(t, c.field, wrong.Field, "%v", err)
		})
	}
	_, err := Read(strings.NewReader(" \n"), "x", Format{})
	require.ErrorIs(t, err, ErrNoRequests)
	_, err = Read(strings.NewReader(line("0", fmt.Sprint(MaxTokens), "1", "[]")), "x", Mooncake)
	require.NoError(t, err, "at the limit")
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(mooncakeLines))
	f.Add([]byte(bailianLines))
	f.Add([]byte(`{"timestamp":1e18,"input_length":1,"output_length":2,"hash_ids":[1]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		tr, err := Read(bytes.NewReader(b), "x", Format{})
		if err != nil {
			return
		}
		for _, r := range tr.Requests {
			if r.At < 0 || r.Input < len(r.Blocks)*tr.BlockTokens || r.Input > MaxTokens {
				t.Fatalf("%+v", r)
			}
		}
		tr.Facts()
	})
}
