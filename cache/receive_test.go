package cache

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

// Bytes whose checksum is taken as they come are refused like all others when
// it is not the one that came with them.
func TestReceivedBytesAreChecked(t *testing.T) {
	c := open(t, Config{Budget: 8 << 20})
	s := space(t, c, "a")
	for i, n := range []int{1, PartSize - 1, PartSize, PartSize + 1, 3*PartSize + 5} {
		body := content(i, n)
		sum := kvwire.Sum(body)
		receive := func(h kvwire.Hash, from []byte) PutResult {
			sl, _, err := s.Reserve(one, formA, h, int64(n))
			require.NoError(t, err)
			require.NotNil(t, sl)
			require.NoError(t, sl.Receive(func(piece []byte) error {
				from = from[copy(piece, from):]
				return nil
			}))
			return sl.Publish(sum, c.auth.Sign(sl.Key(), uint64(n), sum))
		}
		wrong := append([]byte(nil), body...)
		wrong[n/2] ^= 4
		assert.Equal(t, kvwire.ReasonCorrupt, receive(hash(i), wrong).Reason, "%d bytes", n)
		assert.False(t, s.Has(formA, hash(i)))
		assert.True(t, receive(hash(i), body).Stored, "%d bytes", n)
		v, why := s.View(one, formA, hash(i), true)
		require.Equal(t, kvwire.ReasonNone, why)
		assert.Equal(t, body, v.Bytes())
		v.Close()
	}
}

func TestReceiveThatFailsLeavesTheRoom(t *testing.T) {
	c := open(t, Config{Budget: 8 << 20})
	s := space(t, c, "a")
	sl, _, err := s.Reserve(one, formA, hash(1), 2*PartSize)
	require.NoError(t, err)
	gone := errors.New("gone")
	calls := 0
	require.ErrorIs(t, sl.Receive(func([]byte) error {
		if calls++; calls == 2 {
			return gone
		}
		return nil
	}), gone)
	copy(sl.Bytes(), content(1, 2*PartSize))
	sum := kvwire.Sum(content(1, 2*PartSize))
	assert.True(t, sl.Publish(sum, c.auth.Sign(sl.Key(), 2*PartSize, sum)).Stored)
}
