package resp

import (
	"fmt"
	"sort"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// The listener behaves as a map does, whatever is asked in whatever pipeline;
// keys of LMCache keep their first value.
func TestListenerAsAMap(t *testing.T) {
	n := start(t, 64<<20)
	round := 0
	rapid.Check(t, func(rt *rapid.T) {
		c := n.dial(t)
		defer func() { _ = c.Close() }()
		round++
		model := make(map[string]string)
		names := []string{"a", "b", fmt.Sprintf("m@%08x@0@ab", round), fmt.Sprintf("m@%08x@0@cd", round)}
		name := rapid.SampledFrom(names)
		size := rapid.OneOf(rapid.IntRange(0, 3000), rapid.IntRange(0, 600<<10))
		var in []byte
		var want []string
		ask := func(reply string, args ...string) {
			in = append(in, encode(args...)...)
			want = append(want, reply)
		}
		flush := func() {
			sent := in
			go func() { _, _ = c.Write(sent) }()
			for i, w := range want {
				got, err := c.tryReply()
				require.NoError(rt, err)
				require.True(rt, w == got, "reply %d: want %.80q, got %.80q", i, w, got)
			}
			in, want = nil, want[:0]
		}
		get := func(k string) string {
			if v, ok := model[k]; ok {
				return bulk(v)
			}
			return "$-1\r\n"
		}
		ask("+OK\r\n", "FLUSHDB")
		rt.Repeat(map[string]func(*rapid.T){
			"set": func(rt *rapid.T) {
				k, v := name.Draw(rt, "key"), content(rapid.Uint64().Draw(rt, "seed"), size.Draw(rt, "size"))
				args := []string{"SET", k, v}
				cond := rapid.SampledFrom([]string{"", "NX", "XX"}).Draw(rt, "cond")
				if cond != "" {
					args = append(args, cond)
				}
				_, held := model[k]
				if cond == "NX" && held || cond == "XX" && !held {
					ask("$-1\r\n", args...)
					return
				}
				ask("+OK\r\n", args...)
				if !held || !strings.HasPrefix(k, "m@") {
					model[k] = v
				}
			},
			"get": func(rt *rapid.T) { k := name.Draw(rt, "key"); ask(get(k), "GET", k) },
			"mget": func(rt *rapid.T) {
				a, b := name.Draw(rt, "a"), name.Draw(rt, "b")
				ask("*2\r\n"+get(a)+get(b), "MGET", a, b)
			},
			"del": func(rt *rapid.T) {
				k := name.Draw(rt, "key")
				_, held := model[k]
				ask(map[bool]string{true: ":1\r\n", false: ":0\r\n"}[held], "DEL", k)
				delete(model, k)
			},
			"expire": func(rt *rapid.T) {
				k := rapid.SampledFrom(names[:2]).Draw(rt, "key")
				if _, held := model[k]; held {
					ask(":1\r\n", "EXPIRE", k, "1000")
					ask(":1\r\n", "PERSIST", k)
				}
			},
			"size":  func(*rapid.T) { ask(fmt.Sprintf(":%d\r\n", len(model)), "DBSIZE") },
			"flush": func(*rapid.T) { flush() },
		})
		flush()
		lines := strings.Split(c.do("KEYS", "*"), "\r\n")
		var got, keys []string
		for i := 2; i < len(lines); i += 2 {
			got = append(got, lines[i])
		}
		for k := range model {
			keys = append(keys, k)
		}
		sort.Strings(got)
		sort.Strings(keys)
		require.Equal(rt, keys, got)
	})
}
