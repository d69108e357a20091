package proxy

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"github.com/tidwall/gjson"
)

// body is the JSON object of a completion request. It is read with gjson, which
// tells where each value lies; sjson, which would write too, changes the first
// of two members of one name, while engines take the last.
type body struct {
	raw     []byte
	members []member // of the fields that are of interest here
	empty   bool     // the object has no member at all
}

// member is one name and value of the object.
type member struct {
	name       string
	value      gjson.Result
	start, end int // of the value
}

// The fields that are edited, and those that are looked at.
var (
	editedFields = []string{"cache_salt", "kv_transfer_params", "max_tokens", "max_completion_tokens", "stream"}
	knownFields  = append([]string{
		"prompt", "messages", "n", "best_of", "echo", "prompt_logprobs", "prompt_embeds", "stream_options", "min_tokens", "model", "tools", "chat_template", "chat_template_kwargs",
		"add_generation_prompt", "continue_final_message", "add_special_tokens", "mm_processor_kwargs",
	}, editedFields...)
)

var errNotObject = errors.New("the body is not a JSON object, or is nested too deep")

// parseBody finds the fields of interest. It keeps raw. A field that is edited
// must not be there twice, nor in another letter case: engines differ in which
// of two they take, and a second cache_salt would undo the first.
func parseBody(raw []byte) (*body, error) {
	text := unsafe.String(unsafe.SliceData(raw), len(raw)) // nobody changes raw
	if !valid(text) {
		return nil, errNotObject
	}
	object := gjson.Parse(text)
	if !object.IsObject() {
		return nil, errNotObject
	}
	b := &body{raw: raw, empty: true}
	var err error
	object.ForEach(func(key, value gjson.Result) bool {
		b.empty = false
		name := key.Str
		if !slices.Contains(knownFields, name) {
			for _, f := range editedFields {
				if strings.EqualFold(f, name) {
					err = fmt.Errorf("%q is written %q", name, f)
					return false
				}
			}
			return true
		}
		if slices.Contains(editedFields, name) && b.has(name) {
			err = fmt.Errorf("%q is there twice", name)
			return false
		}
		start := value.Index
		b.members = append(b.members, member{name, value, start, start + len(value.Raw)})
		return true
	})
	return b, err
}

func (b *body) has(name string) bool {
	return slices.ContainsFunc(b.members, func(m member) bool { return m.name == name })
}

// get returns the value of a field, the last one where there are several; its
// Exists is false where there is none.
func (b *body) get(name string) gjson.Result {
	for _, m := range slices.Backward(b.members) {
		if m.name == name {
			return m.value
		}
	}
	return gjson.Result{}
}

// edit is a new value for a field, in JSON.
type edit struct{ name, value string }

// with appends the body with some fields set to dst; those that are missing are
// appended. All other bytes stay as they are.
func (b *body) with(dst []byte, edits ...edit) []byte {
	size := len(b.raw)
	for _, e := range edits {
		size += len(e.name) + len(e.value) + 4
	}
	out := slices.Grow(dst, size)
	at := 0
	for _, m := range b.members { // in the order of their places
		for _, e := range edits {
			if e.name == m.name {
				out = append(append(out, b.raw[at:m.start]...), e.value...)
				at = m.end
			}
		}
	}
	brace := bytes.LastIndexByte(b.raw, '}')
	out = append(out, b.raw[at:brace]...)
	first := b.empty
	for _, e := range edits {
		if b.has(e.name) {
			continue
		}
		if !first {
			out = append(out, ',')
		}
		first = false
		out = append(append(append(append(out, '"'), e.name...), `":`...), e.value...)
	}
	return append(out, b.raw[brace:]...)
}
