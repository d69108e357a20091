package engineport

import (
	"encoding/binary"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// rawEngine is a registered connection that speaks in bytes.
func rawEngine(t *testing.T, p *port, engine string) *raw {
	t.Helper()
	r := newRaw(t, "unix", p.socket)
	reg := registration(engine)
	reg.InboxSlots = 0
	_, err := r.Write(registerFrame(t, reg))
	require.NoError(t, err)
	h, _, err := kvwire.ReadFrame(r.r, nil)
	require.NoError(t, err)
	require.Equal(t, kvwire.TypeRegister|kvwire.AnswerBit, h.Type)
	return r
}

// Tokens are hashed as they come: however a match is cut into writes, the
// chain is the same.
func TestMatchComesInPieces(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	salt := strings.Repeat("s", kvwire.MaxSalt)
	m := kvwire.Match{
		Scope: kvwire.Scope{ExtraKey: &salt, CacheSalt: &salt}, Flags: kvwire.MatchPresence,
		Tokens: tokens(40_010, 1), // more than the connection's buffer holds
	}
	const pages = 40_010 / 64
	c := attach(t, p.tcp, registration("a"))
	l := match(t, c, m)
	require.EqualValues(t, pages, l.ChainPages)
	want, err := kvwire.NewChain(64, m.Scope)
	require.NoError(t, err)
	require.NoError(t, want.AppendWire(m.Tokens))
	for i := range pages {
		got, err := c.Write(within(t), kvwire.PageRef{Handle: l.Handle, Page: uint32(i)}, bytesOf(0))
		require.NoError(t, err)
		require.Equal(t, kvwire.StoreStored, got.Status)
	}
	space := p.cache.Lookup("public", registration("a").Model.Namespace(64))
	n, why := space.Match(registration("a").Descriptor.Form(), want.Hashes())
	require.Equal(t, pages, n, why.String())

	r := rawEngine(t, p, "b")
	b := frame(kvwire.TypeMatch, kvwire.AppendMatch(nil, m))
	for _, step := range []int{101, 4097, 65_536, len(b)} {
		for at := 0; at < len(b); at += step {
			_, err := r.Write(b[at:min(at+step, len(b))])
			require.NoError(t, err)
		}
		h, body, err := kvwire.ReadFrame(r.r, nil)
		require.NoError(t, err)
		require.Equal(t, kvwire.TypeMatch|kvwire.AnswerBit, h.Type)
		got, err := kvwire.ParseLeased(body, nil)
		require.NoError(t, err)
		require.EqualValues(t, pages, got.Pages, "step %d", step)
	}
}

// After a match that is refused, wherever that shows, the next frame is found.
func TestRefusedMatchIsReadToItsEnd(t *testing.T) {
	t.Parallel()
	p := newPort(t)
	r := rawEngine(t, p, "a")
	good := kvwire.AppendMatch(nil, kvwire.Match{Tokens: tokens(40_000, 1)})
	count := len(good) - 4*40_000 - 4 // where the number of tokens stands
	change := func(f func(b []byte) []byte) []byte { return f(append([]byte(nil), good...)) }
	long := strings.Repeat("s", kvwire.MaxSalt+1)
	for name, c := range map[string]struct {
		body  []byte
		code  kvwire.Code
		field string
	}{
		"empty":         {nil, kvwire.CodeBadFrame, "match"},
		"half a head":   {good[:count-1], kvwire.CodeBadFrame, "match"},
		"too few":       {good[:len(good)-4], kvwire.CodeBadFrame, "match"},
		"too many":      {change(func(b []byte) []byte { return append(b, 0) }), kvwire.CodeBadFrame, "match"},
		"flags":         {change(func(b []byte) []byte { b[12] = 0xFF; return b }), kvwire.CodeBadField, "flags"},
		"held":          {change(func(b []byte) []byte { binary.LittleEndian.PutUint32(b, 40_001); return b }), kvwire.CodeBadField, "held"},
		"above limit":   {change(func(b []byte) []byte { binary.LittleEndian.PutUint32(b[count:], kvwire.MaxTokens+1); return b }), kvwire.CodeTooLarge, "tokens"},
		"long salt":     {kvwire.AppendMatch(nil, kvwire.Match{Scope: kvwire.Scope{CacheSalt: &long}, Tokens: tokens(1000, 1)}), kvwire.CodeTooLarge, "cache_salt"},
		"long extra":    {kvwire.AppendMatch(nil, kvwire.Match{Scope: kvwire.Scope{ExtraKey: &long}, Tokens: tokens(1000, 1)}), kvwire.CodeTooLarge, "extra_key"},
		"count of 2^32": {change(func(b []byte) []byte { binary.LittleEndian.PutUint32(b[count:], 1<<32-1); return b }), kvwire.CodeTooLarge, "tokens"},
	} {
		wantError(t, r.ask(t, frame(kvwire.TypeMatch, c.body)), c.code, c.field)
		_, err := r.Write(frame(kvwire.TypePing, nil))
		require.NoError(t, err, name)
		h, _, err := kvwire.ReadFrame(r.r, nil)
		require.NoError(t, err, name)
		require.Equal(t, kvwire.TypePing|kvwire.AnswerBit, h.Type, name)
	}
	at := kvwire.AppendMatch(nil, kvwire.Match{Flags: kvwire.MatchPresence, Tokens: make([]byte, 4*kvwire.MaxTokens)})
	_, err := r.Write(frame(kvwire.TypeMatch, at))
	require.NoError(t, err)
	h, _, err := kvwire.ReadFrame(r.r, nil)
	require.NoError(t, err)
	require.Equal(t, kvwire.TypeMatch|kvwire.AnswerBit, h.Type, "at the limit")
}
