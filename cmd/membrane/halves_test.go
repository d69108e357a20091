package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// standIn answers as a sidecar may, also as one that breaks off: the commands
// are run against real ones elsewhere.
func standIn(t *testing.T, answer func(w http.ResponseWriter, path string, body map[string]any)) string {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body map[string]any
		_ = json.NewDecoder(r.Body).Decode(&body)
		w.Header().Set("Connection", "close")
		answer(w, r.URL.Path, body)
	}))
	t.Cleanup(srv.Close)
	return srv.URL
}

func TestHalvesSendWhatTheirFlagsSay(t *testing.T) {
	var path string
	var sent map[string]any
	url := standIn(t, func(w http.ResponseWriter, p string, body map[string]any) {
		path, sent = p, body
		_, _ = io.WriteString(w, `{"kv_handle":"h"}`)
	})
	out := runOK(t, "disagg", "prefill", "--base-url", url, "--tokens", "1 2,3", "--model-id", "m", "--deadline", "3s")
	assert.Contains(t, out, `"kv_handle"`)
	assert.Equal(t, "/disagg/prefill", path)
	assert.Equal(t, []any{1.0, 2.0, 3.0}, sent["token_ids"])
	assert.Equal(t, "m", sent["model_id"])
	assert.EqualValues(t, 3000, sent["deadline_ms"])
	assert.True(t, strings.HasPrefix(fmt.Sprint(sent["request_id"]), "cli-"))

	runOK(t, "disagg", "decode", "--base-url", url, "--handle", "h", "--max-tokens", "5", "--temperature", "0.5", "--top-p", "0.9", "--seed", "7", "--stop-tokens", "8 9", "--request-id", "r")
	assert.Equal(t, "/disagg/decode", path)
	want := map[string]any{
		"request_id": "r", "model_id": "default", "deadline_ms": 120000.0, "kv_handle": "h", "max_tokens": 5.0,
		"temperature": 0.5, "top_p": 0.9, "seed": 7.0, "stop_token_ids": []any{8.0, 9.0},
	}
	assert.Equal(t, want, sent)
}

func TestStreamsArePrintedAndTheirEndsTold(t *testing.T) {
	events, status := "", http.StatusOK
	url := standIn(t, func(w http.ResponseWriter, _ string, body map[string]any) {
		assert.Equal(t, true, body["stream"])
		w.WriteHeader(status)
		_, _ = io.WriteString(w, events)
	})
	decode := func() (string, error) {
		return run(t.Context(), "disagg", "decode", "--base-url", url, "--handle", "h", "--stream")
	}
	events = "data: {\"token_id\":1}\n\n: a comment\n\ndata: {\"token_id\":2}\n\ndata: [DONE]\n\n"
	out, err := decode()
	require.NoError(t, err)
	assert.Equal(t, "{\"token_id\":1}\n{\"token_id\":2}\n", out)

	for text, want := range map[string]string{
		"data: {}\n\n": "ended before its end",
		"event: error\ndata: {\"error\":\"x\"}\n\n":       `failed: {"error":"x"}`,
		"data: " + strings.Repeat("a", maxEvent) + "\n\n": "cannot read the stream",
	} {
		events = text
		_, err := decode()
		assert.ErrorContains(t, err, want)
	}
	events, status = "nothing of that name", http.StatusNotFound
	_, err = decode()
	require.ErrorContains(t, err, "status 404: nothing of that name")

	_, err = run(t.Context(), "disagg", "decode", "--base-url", "ftp://x", "--handle", "h", "--stream")
	assert.Equal(t, exitUsage, statusOf(err))
	_, err = run(t.Context(), "disagg", "decode", "--handle", "h", "--stop-tokens", "a")
	assert.Equal(t, exitUsage, statusOf(err))
	_, err = run(t.Context(), "disagg", "prefill", "--base-url", url, "--tokens", "")
	assert.Equal(t, exitUsage, statusOf(err))
}

func TestDrainAsksUntilNothingIsUnderWay(t *testing.T) {
	var asked atomic.Int64
	url := standIn(t, func(w http.ResponseWriter, path string, _ map[string]any) {
		assert.Equal(t, "/drain", path)
		_, _ = io.WriteString(w, `{"in_flight":`+strconv.FormatInt(max(0, 2-asked.Add(1)), 10)+`}`)
	})
	port := url[strings.LastIndexByte(url, ':')+1:]
	drain := func(more ...string) (string, error) {
		return run(t.Context(), append([]string{"drain", "--host", "127.0.0.1", "--port", port}, more...)...)
	}
	out, err := drain("--wait", "--settle", "0s")
	require.NoError(t, err)
	assert.Contains(t, out, "drained")
	assert.EqualValues(t, 2, asked.Load())

	asked.Store(0)
	_, err = drain()
	require.NoError(t, err)
	assert.EqualValues(t, 1, asked.Load())
	asked.Store(-1000)
	_, err = drain("--wait", "--settle", "0s", "--timeout", "1ms")
	assert.Error(t, err)
}
