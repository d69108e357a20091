package proxy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func edited(t testing.TB, text string, edits ...edit) string {
	t.Helper()
	b, err := parseBody([]byte(text))
	require.NoError(t, err, text)
	return string(b.with(nil, edits...))
}

func TestEditKeepsAllOtherBytes(t *testing.T) {
	t.Parallel()
	f := func(text, want string, edits ...edit) {
		t.Helper()
		assert.Equal(t, want, edited(t, text, edits...))
	}
	salt := edit{"cache_salt", `"s"`}
	f(`{}`, `{"cache_salt":"s"}`, salt)
	f(" {\n} \n", " {\n\"cache_salt\":\"s\"} \n", salt)
	f(`{"a":1}`, `{"a":1,"cache_salt":"s"}`, salt)
	f(`{"cache_salt" : "x" , "a":1}`, `{"cache_salt" : "s" , "a":1}`, salt)
	f(`{"cache_\u0073alt":"x"}`, `{"cache_\u0073alt":"s"}`, salt)
	f(`{"a":1,"a":2,"n":1e400,"b":123456789012345678901234567890.10,"c":"\ud83d\ude00\/","cache_salt":null}`,
		`{"a":1,"a":2,"n":1e400,"b":123456789012345678901234567890.10,"c":"\ud83d\ude00\/","cache_salt":"s"}`, salt)
	f(`{"x":{"cache_salt":"inner","stream":true},"stream":true,"max_tokens":7}`,
		`{"x":{"cache_salt":"inner","stream":true},"stream":false,"max_tokens":1,"cache_salt":"s"}`,
		edit{"stream", "false"}, edit{"max_tokens", "1"}, salt)
	f("{\"prompt\":\"}\",\"stream\":false}", "{\"prompt\":\"}\",\"stream\":false,\"cache_salt\":\"s\"}", salt)
}

func TestBodiesThatAreRefused(t *testing.T) {
	t.Parallel()
	f := func(text, message string) {
		t.Helper()
		_, err := parseBody([]byte(text))
		require.ErrorContains(t, err, message, text)
	}
	for _, text := range []string{"", "[]", `"x"`, "1", "null", "{", `{"a":}`, `{"a":1}{}`, `{"a":NaN}`, "\xff\xfe{\x00}\x00", "\xef\xbb\xbf{}"} {
		f(text, "not a JSON object")
	}
	f(`{"cache_salt":"a","cache_salt":"b"}`, `"cache_salt" is there twice`)
	f(`{"cache_salt":"a","cache\u005fsalt":"b"}`, `"cache_salt" is there twice`)
	f(`{"stream":true,"x":1,"stream":false}`, `"stream" is there twice`)
	f(`{"Cache_Salt":"a"}`, `"Cache_Salt" is written "cache_salt"`)
}

// object is JSON text as clients write it, and worse.
func object(t *rapid.T) string {
	space := rapid.SampledFrom([]string{"", " ", "\n\t", "\r\n  "})
	value := rapid.SampledFrom([]string{
		`null`, `true`, `1`, `-0.0`, `1e400`, `99999999999999999999999999`, `""`, `"\u0000\ud800"`, `"a\"}{,:"`, `[]`, `[1, [2,{"cache_salt":"x"}]]`,
		`{"stream":true,"a":{"b":"}"}}`, `"é😀"`,
	})
	key := rapid.OneOf(rapid.SampledFrom([]string{"a", "a", "prompt", "messages", "n", "stop", "caché", `q\"q`, `cache\u005fsal`, ""}), rapid.StringMatching(`[a-z]{1,6}x`))
	var b strings.Builder
	b.WriteString(space.Draw(t, "s") + "{")
	rest := append([]string(nil), editedFields...)
	n := rapid.IntRange(0, 8).Draw(t, "n")
	for i := range n {
		name := key.Draw(t, "key")
		if len(rest) > 0 && rapid.Bool().Draw(t, "known") {
			name, rest = rest[0], rest[1:]
		}
		if i > 0 {
			b.WriteString(",")
		}
		b.WriteString(space.Draw(t, "s") + `"` + name + `"` + space.Draw(t, "s") + ":" + space.Draw(t, "s") + value.Draw(t, "v") + space.Draw(t, "s"))
	}
	b.WriteString(space.Draw(t, "s") + "}" + space.Draw(t, "s"))
	return b.String()
}

// An edit is reversible: the old values put back give the old bytes, up to
// members that were appended before the last brace.
func TestEditIsSurgical(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := object(t)
		b, err := parseBody([]byte(text))
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		edits := []edit{{"cache_salt", `"new"`}, {"stream", "false"}, {"max_tokens", "1"}, {"kv_transfer_params", `{"do_remote_decode":true}`}}
		var back []edit
		var added strings.Builder
		first := b.empty
		for _, e := range edits {
			if b.has(e.name) {
				back = append(back, edit{e.name, b.get(e.name).Raw})
				continue
			}
			if !first {
				added.WriteByte(',')
			}
			first = false
			fmt.Fprintf(&added, "%q:%s", e.name, e.value)
		}
		out := b.with(nil, edits...)
		if !json.Valid(out) {
			t.Fatalf("%s became %s", text, out)
		}
		again, err := parseBody(out)
		if err != nil {
			t.Fatalf("%s: %v", out, err)
		}
		for _, e := range edits {
			if got := again.get(e.name).Raw; got != e.value {
				t.Fatalf("%s: %s is %s", out, e.name, got)
			}
		}
		restored := string(again.with(nil, back...))
		brace := strings.LastIndexByte(text, '}')
		if want := text[:brace] + added.String() + text[brace:]; restored != want {
			t.Fatalf("%q became %q", want, restored)
		}
	})
}

func FuzzParseBody(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"cache_salt":"x","prompt":"p"}`, ` {"a":1,"a":2} `, `{"cache_\u0073alt":1}`, `{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}]}`,
		`{"kv_transfer_params":{"do_remote_decode":true}}`, `{"prompt":[1,2,3]}`, `[`, "\x00", `{"a":"\`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		before := bytes.Clone(data)
		b, err := parseBody(data)
		if err != nil {
			return
		}
		for _, of := range []route{completions, chat} {
			r := &request{route: of, body: b, salt: "s"}
			_, _ = r.unsuitable(), r.guess()
			if ids, ok := r.ids(); ok {
				require.LessOrEqual(t, len(ids), r.atMost())
			}
			for _, out := range [][]byte{r.local(nil, `{"a":1}`), r.forPrefill("id")} {
				again, err := parseBody(out)
				require.NoError(t, err, "%q became %q", data, out)
				require.True(t, again.has("kv_transfer_params"))
			}
			legs, err := parseBody(r.forPrefill("id"))
			require.NoError(t, err)
			require.Equal(t, prefillLeg, legOf(legs.get("kv_transfer_params")))
			local, err := parseBody(r.local(nil, ""))
			require.NoError(t, err)
			require.Equal(t, `"s"`, local.get("cache_salt").Raw)
		}
		require.Equal(t, before, data, "the body is only read")
	})
}

func FuzzParseHostPorts(f *testing.F) {
	for _, seed := range []string{"a:1", "10.0.0.1:8000,10.0.0.2:8000", "[::1]:80", ":1", "a", "a:0", "a:65536", ", ", "a:1,", "a:+1"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		list := parseHostPorts(text)
		require.LessOrEqual(t, len(list), maxNamedPods)
		for _, one := range list {
			require.LessOrEqual(t, len(one), maxHostPort)
			require.Contains(t, text, one)
		}
	})
}

func FuzzAnswers(f *testing.F) {
	for _, seed := range []string{`{"tokens":[1,2]}`, `{"tokens":[]}`, `{"choices":[],"kv_transfer_params":{"a":1}}`, `{"choices":[]}`, `{`, `{"tokens":[-1]}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if tokens, ok := parseTokenized(data); ok {
			require.LessOrEqual(t, len(tokens), len(data))
		}
		if params, ok := parsePrefillAnswer(data); ok && params != "" {
			require.True(t, json.Valid([]byte(params)))
		}
	})
}

func TestHostPorts(t *testing.T) {
	t.Parallel()
	assert.Equal(t, []string{"10.0.0.1:8000", "[::1]:80"}, parseHostPorts(" 10.0.0.1:8000 , [::1]:80"))
	for _, bad := range []string{"", "a", ":1", "a:0", "a:65536", "a:1,", "http://a:1", "a:1:2", strings.Repeat("a", maxHostPort) + ":1"} {
		assert.Nil(t, parseHostPorts(bad), bad)
	}
	at := func(n int) string { return strings.TrimSuffix(strings.Repeat("a:1,", n), ",") }
	assert.Len(t, parseHostPorts(at(maxNamedPods)), maxNamedPods)
	assert.Nil(t, parseHostPorts(at(maxNamedPods+1)))
	assert.Len(t, parseHostPorts(strings.Repeat("a", maxHostPort-2)+":1"), 1)
}

func TestLegs(t *testing.T) {
	t.Parallel()
	f := func(params string, want leg) {
		t.Helper()
		b, err := parseBody([]byte(`{"kv_transfer_params":` + params + `}`))
		require.NoError(t, err)
		assert.Equal(t, want, legOf(b.get("kv_transfer_params")), params)
	}
	f(`null`, wholeRequest)
	f(`[]`, wholeRequest)
	f(`{}`, wholeRequest)
	f(`{"max_offload_tokens":5}`, wholeRequest)
	f(`{"do_remote_decode":true,"do_remote_prefill":false}`, prefillLeg)
	f(`{"do_remote_decode":false,"do_remote_prefill":true,"remote_host":"h"}`, decodeLeg)
	f(`{"remote_decoder":{"kv_request_id":"r"}}`, prefillLeg)
	f(`{"remote_prefiller":{"kv_request_id":"r","remote_host":"h","remote_port":1}}`, decodeLeg)
	f(`{"remote_kv_source":{"remote_host":"h"}}`, wholeRequest)
	f(`{"remote_decoder":{"kv_request_id":"r"},"remote_kv_source":{"remote_host":"h"}}`, prefillLeg)
	f(`{"do_remote_decode":"yes"}`, wholeRequest)
}

func TestPrefillCopyIsWhatEnginesTake(t *testing.T) {
	t.Parallel()
	f := func(of route, text, want string) {
		t.Helper()
		b, err := parseBody([]byte(text))
		require.NoError(t, err)
		r := &request{route: of, body: b}
		const params = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null,"transfer_id":"id"}`
		want = strings.ReplaceAll(want, "PARAMS_TAIL", params[1:])
		assert.Equal(t, strings.ReplaceAll(want, "PARAMS", params), string(r.forPrefill("id")))
	}
	f(completions, `{"prompt":"x","cache_salt":"c"}`, `{"prompt":"x","cache_salt":"c","kv_transfer_params":PARAMS,"stream":false,"max_tokens":1}`)
	f(completions, `{"prompt":"x","max_tokens":9,"stream":true,"stream_options":{"include_usage":true},"min_tokens":4,"n":3,"best_of":null}`,
		`{"prompt":"x","max_tokens":1,"stream":false,"stream_options":null,"min_tokens":0,"n":1,"best_of":null,"kv_transfer_params":PARAMS}`)
	f(chat, `{"messages":[],"max_completion_tokens":9}`, `{"messages":[],"max_completion_tokens":1,"kv_transfer_params":PARAMS,"stream":false}`)
	f(chat, `{"messages":[],"max_completion_tokens":9,"max_tokens":8}`, `{"messages":[],"max_completion_tokens":1,"max_tokens":1,"kv_transfer_params":PARAMS,"stream":false}`)
	f(chat, `{"messages":[]}`, `{"messages":[],"kv_transfer_params":PARAMS,"stream":false,"max_tokens":1}`)
	f(completions, `{"kv_transfer_params":{"max_offload_tokens":7,"remote_host":"x"},"max_tokens":2,"stream":false}`,
		`{"kv_transfer_params":{"max_offload_tokens":7,`+`PARAMS_TAIL,"max_tokens":1,"stream":false}`)
}

func TestUnsuitableRequests(t *testing.T) {
	t.Parallel()
	f := func(of route, text string, want bool) {
		t.Helper()
		b, err := parseBody([]byte(text))
		require.NoError(t, err)
		assert.Equal(t, want, (&request{route: of, body: b}).unsuitable(), text)
	}
	f(completions, `{"prompt":"x"}`, false)
	f(completions, `{"prompt":[1,2]}`, false)
	f(completions, `{"prompt":["x"]}`, true)
	f(completions, `{"prompt":[[1]]}`, true)
	f(completions, `{"prompt":[]}`, true)
	f(completions, `{}`, true)
	f(completions, `{"prompt":"x","echo":true}`, true)
	f(completions, `{"prompt":"x","echo":false,"prompt_logprobs":null}`, false)
	f(completions, `{"prompt":"x","prompt_logprobs":0}`, true)
	f(chat, `{"messages":[{"content":"x"},{"content":[{"type":"text","text":"y"}]},{"content":null}]}`, false)
	f(chat, `{"messages":[{"content":[{"type":"text","text":"y"},{"type":"image_url"}]}]}`, true)
	f(chat, `{}`, true)
}

func TestDepthIsLimited(t *testing.T) {
	t.Parallel()
	nested := func(n int) string { return `{"a":` + strings.Repeat("[", n-1) + strings.Repeat("]", n-1) + `}` }
	_, err := parseBody([]byte(nested(maxDepth)))
	require.NoError(t, err)
	_, err = parseBody([]byte(nested(maxDepth + 1)))
	require.ErrorIs(t, err, errNotObject)
	_, err = parseBody([]byte(`{"a":"` + strings.Repeat(`[\"`, 2*maxDepth) + `"}`))
	require.NoError(t, err, "brackets in a text")
	_, err = parseBody([]byte(strings.Repeat(`{"a":`, MaxBody/8)))
	require.ErrorIs(t, err, errNotObject)
}

func TestParseIDs(t *testing.T) {
	t.Parallel()
	ids, ok := parseIDs("[ 1,2 ,\n4294967295]")
	assert.True(t, ok)
	assert.Equal(t, []uint32{1, 2, 1<<32 - 1}, ids)
	for _, bad := range []string{"[-1]", "[4294967296]", "[1.5]", `["1"]`, "[1e3]", "[[1]]", "[null]"} {
		_, ok := parseIDs(bad)
		assert.False(t, ok, bad)
	}
}

func TestAnswersAtTheirLimit(t *testing.T) {
	t.Parallel()
	at := func(n int, head, tail string) []byte {
		return []byte(head + strings.Repeat(" ", n-len(head)-len(tail)) + tail)
	}
	_, ok := parseTokenized(at(MaxTokenizeAnswer, `{"tokens":[1]`, `}`))
	assert.True(t, ok)
	_, ok = parseTokenized(at(MaxTokenizeAnswer+1, `{"tokens":[1]`, `}`))
	assert.False(t, ok)
	_, ok = parsePrefillAnswer(at(MaxPrefillAnswer, `{"choices":[]`, `}`))
	assert.True(t, ok)
	_, ok = parsePrefillAnswer(at(MaxPrefillAnswer+1, `{"choices":[]`, `}`))
	assert.False(t, ok)
	params := string(at(MaxTransferParams, `{"a":1`, `}`))
	got, ok := parsePrefillAnswer([]byte(`{"choices":[],"kv_transfer_params":` + params + `}`))
	assert.True(t, ok)
	assert.Equal(t, params, got)
	_, ok = parsePrefillAnswer([]byte(`{"choices":[],"kv_transfer_params":` + string(at(MaxTransferParams+1, `{"a":1`, `}`)) + `}`))
	assert.False(t, ok)
	for _, bad := range []string{`{}`, `[]`, `{"choices":1}`, `{"choices":[],"kv_transfer_params":[1]}`, `x`} {
		_, ok = parsePrefillAnswer([]byte(bad))
		assert.False(t, ok, bad)
	}
	many := strings.Repeat(strconv.Itoa(1)+",", 1<<20) + "1"
	_, ok = parseTokenized([]byte(`{"tokens":[` + many + `]}`))
	assert.False(t, ok, "more tokens than a prompt may have")
}
