package kvwire

import (
	"crypto/sha256"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const benchTokens = 100_000

func benchPrompt() []byte {
	b := make([]byte, benchTokens*tokenSize)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

// BenchmarkBareChain is the hashes of BenchmarkChain with nothing around them.
func BenchmarkBareChain(b *testing.B) {
	for _, page := range []int{16, 64, 128} {
		b.Run(fmt.Sprintf("page=%d", page), func(b *testing.B) {
			prompt := benchPrompt()
			buf := make([]byte, HashSize+page*tokenSize)
			for b.Loop() {
				for at := 0; at+page*tokenSize <= len(prompt); at += page * tokenSize {
					copy(buf[HashSize:], prompt[at:at+page*tokenSize])
					sum := sha256.Sum256(buf)
					copy(buf, sum[:])
				}
			}
		})
	}
}

func benchLeased() Leased {
	l := Leased{Handle: 1, Lease: 2, Pages: benchTokens / 16, Shards: 1}
	for i := range benchTokens / 16 {
		l.Locations = append(l.Locations, Location{Offset: uint64(i) << 12, Length: 4096, Sum: Checksum(i)})
	}
	return l
}

func BenchmarkParseLeased(b *testing.B) {
	l := benchLeased()
	body := AppendLeased(nil, l)
	dst := make([]Location, 0, len(l.Locations))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ParseLeased(body, dst); err != nil {
			b.Fatal(err)
		}
	}
}

func TestHotPathsAllocateOncePerRequest(t *testing.T) {
	if raceOn {
		t.Skip("the race detector allocates")
	}
	prompt := benchPrompt()
	assert.LessOrEqual(t, testing.AllocsPerRun(10, func() {
		c, _ := NewChain(16, Scope{})
		if err := c.AppendWire(prompt); err != nil {
			t.Error(err)
		}
	}), 3.0, "chain, its buffer and its hashes")

	l := benchLeased()
	body := AppendLeased(nil, l)
	out := make([]byte, 0, len(body))
	assert.Zero(t, testing.AllocsPerRun(10, func() { AppendLeased(out, l) }), "append leased")
	dst := make([]Location, 0, len(l.Locations))
	assert.Zero(t, testing.AllocsPerRun(10, func() {
		if _, err := ParseLeased(body, dst); err != nil {
			t.Error(err)
		}
	}), "parse leased")
}

// A chain is the same however its tokens come.
func TestChainDoesNotDependOnPieces(t *testing.T) {
	t.Parallel()
	prompt := benchPrompt()[:4*1000]
	whole, err := NewChain(16, Scope{})
	require.NoError(t, err)
	require.NoError(t, whole.AppendWire(prompt))
	require.Len(t, whole.Hashes(), 1000/16)
	for _, step := range []int{4, 12, 64, 68, 128, 1000, 4000} {
		c, err := NewChain(16, Scope{})
		require.NoError(t, err)
		for at := 0; at < len(prompt); at += step {
			require.NoError(t, c.AppendWire(prompt[at:min(at+step, len(prompt))]))
		}
		require.Equal(t, whole.Hashes(), c.Hashes(), "step %d", step)
		wantTail, wantN := whole.Tail()
		tail, n := c.Tail()
		require.Equal(t, wantTail, tail)
		require.Equal(t, wantN, n)
	}
}
