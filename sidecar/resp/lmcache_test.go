package resp

import (
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

const (
	chunkKey = "meta-llama/Llama-3.1-8B-Instruct@00000001@0@8f3a2b1c9d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8"
	pairKey  = "mistralai/Mistral-7B@2@0@f4a1b2c3d4e5f607@half"
)

func TestKeys(t *testing.T) {
	t.Parallel()
	f := func(text string, want kind) {
		t.Helper()
		k := parseKey([]byte(text))
		assert.Equal(t, want, k.kind, text)
		assert.Equal(t, text, string(k.text)+k.kind.suffix())
		assert.NotEmpty(t, headerSize(&k))
	}
	f(chunkKey, chunk)
	f(chunkKey+"@salt", chunk)
	f(chunkKey+"@salt@with@ats", chunk)
	f("odd@model@DEADBEEF@1f@0", chunk)
	f("m@00000001@0@", plain)
	f("m@00000001@0@xyz", plain)
	f("m@0000001@0@ab", plain)
	f("m@00000001@g@ab", plain)
	f("@00000001@0@ab", plain)
	f("m@00000001@0", plain)
	f("", plain)
	f("@", plain)
	f("foo", plain)
	f(pairKey+"kv_bytes", pairBytes)
	f(pairKey+"metadata", pairMetadata)
	f(pairKey+"@3kv_bytes", pairBytes)
	f(pairKey+"@lora%a@5metadata", pairMetadata)
	f("a@b/c@2@0@ab@torch.bfloat16kv_bytes", pairBytes)
	f(pairKey, plain)
	f(pairKey+"@xkv_bytes", plain)
	f(pairKey+"@%xkv_bytes", plain)
	f("m@x@0@ab@halfkv_bytes", plain)
	f("m@2@0@ab@kv_bytes", plain)
	f("kv_bytes", plain)
	f("metadata", plain)

	bytes, metadata := parseKey([]byte(pairKey+"kv_bytes")), parseKey([]byte(pairKey+"metadata"))
	assert.Equal(t, bytes.hash, metadata.hash)
	base := parseKey([]byte(pairKey))
	assert.NotEqual(t, bytes.hash, base.hash, "a value under the base name is another")
}

// What LMCache's multiprocess adapter sends and expects, byte by byte.
func TestAdapterTranscript(t *testing.T) {
	t.Parallel()
	n := start(t, 64<<20)
	c := n.dial(t)
	value := content(1, 2<<20)
	head := fmt.Sprintf("$%d\r\n%s\r\n", len(chunkKey), chunkKey)
	f := func(request, reply string) {
		t.Helper()
		c.send([]byte(request))
		got := make([]byte, len(reply))
		_, err := io.ReadFull(c.r, got)
		require.NoError(t, err)
		require.True(t, reply == string(got), "%.80q, got %.80q", request, got)
		require.Zero(t, c.r.Buffered())
	}
	exists, get, del := "*2\r\n$6\r\nEXISTS\r\n"+head, "*2\r\n$3\r\nGET\r\n"+head, "*2\r\n$3\r\nDEL\r\n"+head
	set := func(v string) string { return "*3\r\n$3\r\nSET\r\n" + head + bulk(v) }
	f(exists, ":0\r\n")
	f(get, "$-1\r\n")
	f(set(value), "+OK\r\n")
	f(exists, ":1\r\n")
	f(get, bulk(value))
	f(set(value), "+OK\r\n")
	assert.EqualValues(t, 1, n.counter("existing_total"))
	assert.EqualValues(t, 0, n.counter("conflicts_total"))
	other := "x" + value[1:]
	f(set(other), "+OK\r\n")
	f(set(value[1:]), "+OK\r\n")
	assert.EqualValues(t, 3, n.counter("existing_total"))
	assert.EqualValues(t, 2, n.counter("conflicts_total"))
	f(get, bulk(value))
	c.want("$-1\r\n", "SET", chunkKey, "x", "NX")
	c.want("+OK\r\n", "SET", chunkKey, "x", "XX")
	c.fails("immutable", "EXPIRE", chunkKey, "10")
	f(del, ":1\r\n")
	f(del, ":0\r\n")
	f(exists, ":0\r\n")
	c.want("$-1\r\n", "SET", chunkKey, "x", "XX")
	c.want("+OK\r\n", "SET", chunkKey, value, "EX", "100")
	c.want(":100\r\n", "TTL", chunkKey)
	conflicts := n.counter("conflicts_total")
	f(set(value), "+OK\r\n")
	assert.Equal(t, conflicts, n.counter("conflicts_total"), "the same value, whatever its time to live")
}

// Invariant 3: a pair is there when both halves are, and one object from then
// on.
func TestPairIsHiddenUntilComplete(t *testing.T) {
	t.Parallel()
	n := start(t, 64<<20)
	c := n.dial(t)
	value, meta := content(1, 1<<20), strings.Repeat("m", 28)
	bytesKey, metaKey := pairKey+"kv_bytes", pairKey+"metadata"
	for _, order := range [][2]string{{bytesKey, metaKey}, {metaKey, bytesKey}} {
		of := map[string]string{bytesKey: value, metaKey: meta}
		c.want("+OK\r\n", "SET", order[0], of[order[0]])
		c.want(":0\r\n", "EXISTS", bytesKey, metaKey)
		c.want("$-1\r\n", "GET", bytesKey)
		c.want("$-1\r\n", "GET", metaKey)
		c.want("*0\r\n", "KEYS", "*")
		c.want("+OK\r\n", "SET", order[0], of[order[0]])
		c.want("+OK\r\n", "SET", order[1], of[order[1]])
		hits := n.counter("hits_total")
		c.want(":1\r\n", "EXISTS", metaKey)
		c.want(bulk(meta), "GET", metaKey)
		require.Equal(t, bulk(value), c.do("GET", bytesKey))
		assert.Equal(t, hits+1, n.counter("hits_total"), "one hit")
		c.want(":2\r\n", "EXISTS", bytesKey, metaKey)
		assert.EqualValues(t, 1, n.cache.Stats().Pages)
		assert.Contains(t, c.do("KEYS", "*"), metaKey)
		assert.Contains(t, c.do("SCAN", "0"), bytesKey)
		c.want(":1\r\n", "DEL", order[1])
		c.want(":0\r\n", "EXISTS", bytesKey, metaKey)
		assert.Zero(t, n.cache.Stats().Pages)
	}
	// The connector deletes the metadata of bytes that are missing.
	c.want("+OK\r\n", "SET", metaKey, meta)
	c.want(":0\r\n", "DEL", metaKey)
	assert.Zero(t, n.cache.Stats().Pages)
	assert.Zero(t, n.counter("conflicts_total"))
}

// A pair whose one half expires is gone, and can be stored again.
func TestPairsExpireTogether(t *testing.T) {
	t.Parallel()
	n := start(t, 16<<20)
	c := n.dial(t)
	bytesKey, metaKey := pairKey+"kv_bytes", pairKey+"metadata"
	for _, mortal := range []string{bytesKey, metaKey} {
		for _, name := range []string{bytesKey, metaKey} {
			args := []string{"SET", name, "value"}
			if name == mortal {
				args = append(args, "PX", "20")
			}
			c.want("+OK\r\n", args...)
		}
		require.Eventually(t, func() bool { return c.do("EXISTS", bytesKey, metaKey) == ":0\r\n" }, timeout, tick)
		c.want("*2\r\n$-1\r\n$-1\r\n", "MGET", metaKey, bytesKey)
		c.want("+OK\r\n", "SET", bytesKey, "new")
		c.want("+OK\r\n", "SET", metaKey, "new", "EX", "100")
		c.want(bulk("new"), "GET", bytesKey)
		c.want(":2\r\n", "EXISTS", bytesKey, metaKey)
		c.want(":1\r\n", "DEL", metaKey)
	}
}

// Invariant 3: what leaves, leaves whole and for a counted reason.
func TestPairsLeaveTogether(t *testing.T) {
	t.Parallel()
	n := start(t, 8<<20)
	c := n.dial(t)
	const pairs = 60
	name := func(i int) string { return fmt.Sprintf("m@1@0@%x@half", i+1) }
	for i := range pairs {
		c.want("+OK\r\n", "SET", name(i)+"kv_bytes", content(uint64(i), 300<<10))
		c.want("+OK\r\n", "SET", name(i)+"metadata", strings.Repeat("m", 28))
	}
	here := 0
	for i := range pairs {
		a, b := c.do("GET", name(i)+"metadata"), c.do("GET", name(i)+"kv_bytes")
		assert.Equal(t, a == "$-1\r\n", b == "$-1\r\n", "%d", i)
		if b != "$-1\r\n" {
			here++
			require.Equal(t, bulk(content(uint64(i), 300<<10)), b)
		}
	}
	assert.Positive(t, here)
	st := n.cache.Stats()
	assert.EqualValues(t, pairs, uint64(here)+st.Evictions[kvwire.ReasonCapacity]+st.Evictions[kvwire.ReasonRejected])
}
