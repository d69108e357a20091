package embedded

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/engines/llama"
)

// openAI starts an engine without a sidecar that serves chat, too.
func openAI(t *testing.T) (url string, e *Engine) {
	t.Helper()
	m, err := llama.Generate("openai", llama.WithLayers(2), llama.WithHidden(64))
	require.NoError(t, err)
	e, err = New(Config{Model: m, Name: "e", Log: zerolog.Nop()})
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := NewServer(e, WithOpenAI())
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.NoError(t, <-done)
		e.Close()
	})
	return "http://" + l.Addr().String(), e
}

var oneShot = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 20 * time.Second}

func sendTo(t *testing.T, url, body string) (int, string) {
	t.Helper()
	res, err := oneShot.Post(url, "application/json", strings.NewReader(body))
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return res.StatusCode, string(b)
}

func TestChatIsTheCompletionOfItsTemplate(t *testing.T) {
	t.Parallel()
	url, _ := openAI(t)
	messages := `"messages":[{"role":"system","content":"be"},{"role":"user","content":[{"type":"text","text":"h"},{"type":"text","text":"i"}]}]`
	code, text := sendTo(t, url+"/tokenize", `{`+messages+`}`)
	require.Equal(t, 200, code, text)
	var tokens struct {
		Count  int   `json:"count"`
		Tokens []int `json:"tokens"`
	}
	require.NoError(t, json.Unmarshal([]byte(text), &tokens))
	want := []int{256, 's', 'y', 's', 't', 'e', 'm', '\n', 'b', 'e', 257, '\n', 256, 'u', 's', 'e', 'r', '\n', 'h', 'i', 257, '\n', 256, 'a', 's', 's', 'i', 's', 't', 'a', 'n', 't', '\n'}
	assert.Equal(t, want, tokens.Tokens)
	assert.Equal(t, len(want), tokens.Count)

	type answer struct {
		Object  string
		Choices []struct {
			TokenIDs []int `json:"token_ids"`
			Message  struct{ Role, Content string }
			Delta    struct{ Role, Content string }
			Text     string
			Finish   *string `json:"finish_reason"`
		}
	}
	ids, err := json.Marshal(want)
	require.NoError(t, err)
	_, text = sendTo(t, url+"/v1/completions", fmt.Sprintf(`{"prompt":%s,"max_tokens":5}`, ids))
	var plain answer
	require.NoError(t, json.Unmarshal([]byte(text), &plain), text)
	_, text = sendTo(t, url+"/v1/chat/completions", `{`+messages+`,"max_completion_tokens":5}`)
	var chat answer
	require.NoError(t, json.Unmarshal([]byte(text), &chat), text)
	assert.Equal(t, "chat.completion", chat.Object)
	assert.Equal(t, plain.Choices[0].TokenIDs, chat.Choices[0].TokenIDs)
	assert.Equal(t, plain.Choices[0].Text, chat.Choices[0].Message.Content)
	assert.Equal(t, "assistant", chat.Choices[0].Message.Role)

	_, text = sendTo(t, url+"/v1/chat/completions", `{`+messages+`,"max_tokens":5,"stream":true,"stream_options":{"include_usage":true}}`)
	events := strings.Split(strings.TrimSpace(text), "\n\n")
	require.Equal(t, "data: [DONE]", events[len(events)-1])
	var streamed []int
	for _, e := range events[:len(events)-1] {
		var chunk answer
		require.NoError(t, json.Unmarshal([]byte(strings.TrimPrefix(e, "data: ")), &chunk), e)
		assert.Equal(t, "chat.completion.chunk", chunk.Object)
		streamed = append(streamed, chunk.Choices[0].TokenIDs...)
	}
	assert.Equal(t, plain.Choices[0].TokenIDs, streamed)
}

func TestChatRefusesWhatItCannot(t *testing.T) {
	t.Parallel()
	url, _ := openAI(t)
	f := func(path, body, message string) {
		t.Helper()
		code, text := sendTo(t, url+path, body)
		assert.Equal(t, 400, code, text)
		assert.Contains(t, text, message)
	}
	const chat = "/v1/chat/completions"
	f(chat, `{`, "unexpected end")
	f(chat, `{}`, "prompt: is missing")
	f(chat, `{"messages":[]}`, "0 are not 1 to")
	f(chat, `{"messages":[{"role":"user","content":5}]}`, "messages[0].content")
	f(chat, `{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}`, "text only")
	f(chat, `{"messages":[{"role":"user","content":"x"}],"stream_options":{}}`, "stream_options")
	f(chat, `{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"min_tokens":2}`, "min_tokens")
	f("/v1/completions", `{"prompt":"x","max_tokens":1,"min_tokens":2}`, "min_tokens")
	f("/tokenize", `{`, "unexpected end")
	f("/tokenize", `{}`, "prompt: is missing")
	at := func(n int) string {
		return `{"messages":[` + strings.TrimSuffix(strings.Repeat(`{"role":"u","content":""},`, n), ",") + `]}`
	}
	code, _ := sendTo(t, url+"/tokenize", at(maxMessages))
	assert.Equal(t, 200, code)
	f("/tokenize", at(maxMessages+1), "are not 1 to")
}

func TestClientGoneEndsTheWork(t *testing.T) {
	t.Parallel()
	url, e := openAI(t)
	for _, stream := range []bool{false, true} {
		for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
			conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
			require.NoError(t, err)
			body := fmt.Sprintf(`{"prompt":"x","messages":[{"role":"user","content":"x"}],"max_tokens":1000000,"stream":%v}`, stream)
			_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
			require.NoError(t, err)
			if stream {
				_, err = bufio.NewReader(conn).ReadString('\n')
				require.NoError(t, err)
			} else {
				require.Eventually(t, func() bool { return len(e.turn) == 0 }, 10*time.Second, time.Millisecond)
			}
			require.NoError(t, conn.Close())
			require.Eventually(t, func() bool { return len(e.turn) == 1 && len(e.queue) == 0 }, 10*time.Second, time.Millisecond, "%s, stream %v", path, stream)
		}
	}
}
