package cache

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

func TestSumOfParts(t *testing.T) {
	for _, n := range []int{1, PartSize - 1, PartSize, PartSize + 1, 3*PartSize + 5} {
		b := content(n, n)
		var want []byte
		for at := 0; at < n; at += PartSize {
			want = binary.LittleEndian.AppendUint64(want, uint64(kvwire.Sum(b[at:min(at+PartSize, n)])))
		}
		assert.Equal(t, kvwire.Sum(want), SumParts(b))
		var s PartSums
		for range 2 { // parts may change, and the value be used again
			s.Reset()
			for i := 0; i*PartSize < n; i++ {
				s.Set(i, []byte("something else"))
			}
			for i := 0; i*PartSize < n; i++ {
				s.Set(i, b[i*PartSize:min((i+1)*PartSize, n)])
			}
			assert.Equal(t, SumParts(b), s.Sum())
		}
	}
}

// Objects with a checksum of parts are checked like others, and this node's
// alone: nobody hears of them who would ask a peer for them.
func TestPartsAreCheckedAndLocal(t *testing.T) {
	c := open(t, Config{})
	s := space(t, c, "a")
	heard := make(chan Event, 10)
	c.Subscribe(func(e Event) { heard <- e })
	require.True(t, set(t, s, 1, 1, 3*PartSize, Always).Stored)
	c.Range(func(kvwire.PageKey, kvwire.Form) bool { t.Error("in Range"); return true })
	v, why := s.View(one, formA, hash(1), true)
	require.Equal(t, kvwire.ReasonNone, why)
	assert.True(t, v.Local())
	assert.True(t, v.Check(SumParts(v.Bytes())))
	v.Bytes()[2*PartSize] ^= 1
	assert.False(t, v.Check(SumParts(v.Bytes())))
	assert.False(t, v.Check(0), "condemned once")
	v.Close()
	assert.False(t, s.Has(formA, hash(1)))

	require.True(t, set(t, s, 1, 1, 3*PartSize, Always).Stored)
	v, _ = s.View(one, formA, hash(1), false)
	v.Bytes()[0] ^= 1
	v.Close()
	_, why = s.View(one, formA, hash(1), true)
	assert.Equal(t, kvwire.ReasonCorrupt, why)
	assert.EqualValues(t, 2, c.Stats().Corrupt)
	put(t, s, 2, 100)
	e := <-heard
	assert.Equal(t, hash(2), e.Key.Hash, "the first that anybody hears of")
}
