package proxy

import (
	"strconv"

	"github.com/tidwall/gjson"
	"github.com/valyala/fasthttp"
)

// route is one of the two whose requests are read.
type route uint8

const (
	completions route = iota
	chat
)

func (r route) String() string {
	if r == chat {
		return "chat"
	}
	return "completions"
}

// request is a completion request under way.
type request struct {
	route  route
	c      *fasthttp.RequestCtx
	tenant string
	body   *body
	leg    leg
	salt   string // as the engine gets it
	id     string // X-Request-Id, "" if the client gave none
}

// unsuitable reports whether another pod's prefill would be of no use: its KV is
// kept under tokens alone, for one prompt, and gives no probabilities of the
// prompt.
func (r *request) unsuitable() bool {
	b := r.body
	for _, name := range []string{"prompt_logprobs", "prompt_embeds"} {
		if v := b.get(name); v.Exists() && v.Type != gjson.Null {
			return true
		}
	}
	if b.get("echo").Type == gjson.True {
		return true
	}
	if r.route == chat {
		return hasMedia(b.get("messages"))
	}
	prompt := b.get("prompt")
	if prompt.Type == gjson.String {
		return false
	}
	first := prompt.Get("0")
	return !prompt.IsArray() || first.Type != gjson.Number // several prompts, or none
}

func hasMedia(messages gjson.Result) (media bool) {
	if !messages.IsArray() {
		return true
	}
	messages.ForEach(func(_, m gjson.Result) bool {
		content := m.Get("content")
		if content.IsArray() {
			content.ForEach(func(_, part gjson.Result) bool {
				kind := part.Get("type").Str
				media = kind != "text" && kind != ""
				return !media
			})
		}
		return !media
	})
	return media
}

// atMost returns a bound of the prompt's tokens: each has at least a byte, but
// for those that a chat template adds, which are few beside any threshold.
func (r *request) atMost() int {
	if r.route == chat {
		return len(r.body.get("messages").Raw) + len(r.body.get("tools").Raw)
	}
	p := r.body.get("prompt")
	if p.IsArray() {
		return len(p.Raw) / 2 // a digit and a comma each
	}
	return len(p.Raw)
}

// bytesPerToken is the guess where the engine does not tokenize.
const bytesPerToken = 4

// guess returns the prompt's tokens by its bytes.
func (r *request) guess() int {
	if r.route == chat {
		return len(r.body.get("messages").Raw) / bytesPerToken
	}
	return len(r.body.get("prompt").Raw) / bytesPerToken
}

// ids returns the prompt's tokens if it was given as such.
func (r *request) ids() ([]uint32, bool) {
	p := r.body.get("prompt")
	if r.route == chat || !p.IsArray() {
		return nil, false
	}
	return parseIDs(p.Raw)
}

// parseIDs reads a JSON array of token ids.
func parseIDs(array string) ([]uint32, bool) {
	out := make([]uint32, 0, len(array)/4)
	for i := 1; i < len(array)-1; {
		if c := array[i]; isSpace(c) || c == ',' {
			i++
			continue
		}
		j := i
		for j < len(array) && array[j] >= '0' && array[j] <= '9' {
			j++
		}
		id, err := strconv.ParseUint(array[i:j], 10, 32)
		if err != nil {
			return nil, false
		}
		out = append(out, uint32(id))
		i = j
	}
	return out, true
}

func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\n' || c == '\r' }

// local returns the body for this pod's engine, in dst if it has room.
func (r *request) local(dst []byte, params string) []byte {
	edits := []edit{{"cache_salt", `"` + r.salt + `"`}}
	if params != "" {
		edits = append(edits, edit{"kv_transfer_params", params})
	}
	return r.body.with(dst[:0], edits...)
}

// forPrefill returns the body for a prefill pod: one output token, in one piece.
// The pod's own proxy makes the cache salt, out of the same key.
func (r *request) forPrefill(transferID string) []byte {
	b := r.body
	edits := []edit{{"kv_transfer_params", prefillParams(b.get("kv_transfer_params"), transferID)}, {"stream", "false"}}
	if r.route == completions || b.has("max_tokens") || !b.has("max_completion_tokens") {
		edits = append(edits, edit{"max_tokens", "1"})
	}
	if r.route == chat && b.has("max_completion_tokens") {
		edits = append(edits, edit{"max_completion_tokens", "1"})
	}
	for _, neutral := range []edit{{"stream_options", "null"}, {"min_tokens", "0"}, {"n", "1"}, {"best_of", "1"}} {
		if v := b.get(neutral.name); v.Exists() && v.Type != gjson.Null {
			edits = append(edits, neutral)
		}
	}
	return b.with(nil, edits...)
}
