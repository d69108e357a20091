package resp

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/sidecar/auth"
)

// withKeys makes a key for each subject:scopes.
func withKeys(t testing.TB, subjects ...string) (map[string]string, func(*Config)) {
	t.Helper()
	made := make(map[string]string)
	var file strings.Builder
	for _, s := range subjects {
		name, list, _ := strings.Cut(s, ":")
		scopes, err := auth.ParseScopes(list)
		require.NoError(t, err)
		k, line, err := auth.Generate(name, scopes)
		require.NoError(t, err)
		made[name] = k
		file.WriteString(line + "\n")
	}
	keys, err := auth.ParseKeyfile([]byte(file.String()))
	require.NoError(t, err)
	return made, func(c *Config) { c.Keys = keys }
}

func TestScopesAndTenants(t *testing.T) {
	t.Parallel()
	keys, with := withKeys(t, "reader:read", "writer:write", "boss:admin", "engine:engine")
	n := start(t, 16<<20, with)
	c := n.dial(t)
	for _, args := range [][]string{{"GET", "a"}, {"SET", "a", "b"}, {"PING"}, {"INFO"}, {"FLUSHDB"}, {"COMMAND"}, {"NONE"}, {"HELLO", "3"}} {
		c.fails("", args...)
		assert.True(t, strings.HasPrefix(c.do(args...), "-NOAUTH "))
	}
	c.fails("WRONGPASS", "AUTH", "nope")
	c.fails("WRONGPASS", "AUTH", "writer", "nope")
	c.fails("WRONGPASS", "HELLO", "3", "AUTH", "writer", "nope")
	c.want("+OK\r\n", "AUTH", keys["writer"])
	c.want("+OK\r\n", "SET", "a", "1")
	c.want(bulk("1"), "GET", "a")
	c.fails("NOPERM", "FLUSHDB")

	// The tenant is the key's, whatever user is named.
	c.want("+OK\r\n", "AUTH", "writer", keys["reader"])
	c.want("$-1\r\n", "GET", "a")
	c.fails("NOPERM", "SET", "a", "2")
	c.fails("NOPERM", "DEL", "a")
	c.want(":0\r\n", "DBSIZE")
	c.want("*0\r\n", "KEYS", "*")
	c.want("*2\r\n$1\r\n0\r\n*0\r\n", "SCAN", "0")

	require.Contains(t, c.do("HELLO", "3", "AUTH", "anybody", keys["boss"], "SETNAME", "x"), "proto\r\n:3\r\n")
	c.want("+OK\r\n", "SET", "a", "3")
	c.want("+OK\r\n", "FLUSHDB")
	c.want("_\r\n", "GET", "a")
	c.want("+OK\r\n", "AUTH", keys["writer"])
	c.want(bulk("1"), "GET", "a")

	c.want("+OK\r\n", "AUTH", keys["engine"])
	c.fails("NOPERM", "GET", "a")
	c.want("+RESET\r\n", "RESET")
	c.fails("NOAUTH", "GET", "a")
	assert.EqualValues(t, 3, n.counter("wrong_keys_total"))
}

func TestStrangersMayDoLittle(t *testing.T) {
	t.Parallel()
	keys, with := withKeys(t, "writer:write")
	n := start(t, 16<<20, with)
	f := func(in, reply string) {
		t.Helper()
		c := n.dial(t)
		c.send([]byte(in))
		require.Equal(t, reply, c.reply())
		c.closed()
	}
	f(fmt.Sprintf("*%d\r\n", maxStrangerArgs+1), "-ERR Protocol error: unauthenticated multibulk length\r\n")
	f(fmt.Sprintf("*2\r\n$4\r\nAUTH\r\n$%d\r\n", maxStrangerArg+1), "-ERR Protocol error: unauthenticated bulk length\r\n")
	c := n.dial(t)
	c.fails("WRONGPASS", "AUTH", strings.Repeat("x", maxStrangerArg))
	for range maxWrongKeys - 1 {
		c.fails("WRONGPASS", "AUTH", "x")
	}
	c.closed()

	// The oldest stranger makes room; who has said who he is stays.
	known := n.dial(t)
	known.want("+OK\r\n", "AUTH", keys["writer"])
	var all []*peer
	for range maxStrangers + 1 {
		c := n.dial(t)
		c.fails("NOAUTH", "PING")
		all = append(all, c)
	}
	all[0].closed()
	all[maxStrangers].want("+OK\r\n", "AUTH", keys["writer"])
	known.want("+PONG\r\n", "PING")
}

func TestStrangersHaveADeadline(t *testing.T) {
	t.Parallel()
	keys, with := withKeys(t, "writer:write")
	n := start(t, 16<<20, with, func(c *Config) { c.greetTimeout = 100 * time.Millisecond })
	silent, known := n.dial(t), n.dial(t)
	known.want("+OK\r\n", "AUTH", keys["writer"])
	assert.Contains(t, silent.reply(), "-ERR timeout")
	silent.closed()
	known.want("+PONG\r\n", "PING")
	known.want("+RESET\r\n", "RESET")
	assert.Contains(t, known.reply(), "-ERR timeout")
}
