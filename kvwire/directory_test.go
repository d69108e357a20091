package kvwire

import (
	"encoding/binary"
	"encoding/hex"
	"math/bits"
	"testing"

	"github.com/stretchr/testify/require"
)

// smallAnswer has a filter of 2^1 buckets with fingerprints 5, 9 in the first
// and 7 in the second: bits 1 1 0 1 0.
func smallAnswer() DirectoryAnswer {
	return DirectoryAnswer{
		Epoch: 0x1122, Version: 9, Full: true,
		Filter:  DirectoryFilter{Buckets: 1, Bits: []uint64{0b01011}, Fingerprints: []uint16{5, 9, 7}},
		Added:   []uint64{0xAABB},
		Removed: []uint64{1, 2},
	}
}

const smallAnswerHex = "2211000000000000" + "0900000000000000" + "0100000000000000" +
	"01000000" + "03000000" + "0b00000000000000" + "050009000700" +
	"01000000" + "bbaa000000000000" + "02000000" + "0100000000000000" + "0200000000000000"

func TestDirectoryVectors(t *testing.T) {
	t.Parallel()
	b := AppendDirectoryAnswer(nil, smallAnswer())
	require.Equal(t, smallAnswerHex, hex.EncodeToString(b))
	a, err := ParseDirectoryAnswer(b)
	require.NoError(t, err)
	require.Equal(t, smallAnswer(), a)

	delta := DirectoryAnswer{Epoch: 1, Version: 2}
	a, err = ParseDirectoryAnswer(AppendDirectoryAnswer(nil, delta))
	require.NoError(t, err)
	require.Equal(t, delta, a)

	r := DirectoryRequest{Epoch: 1, Version: 2, WaitUS: 3}
	b = AppendDirectoryRequest(nil, r)
	require.Equal(t, "0100000000000000"+"0200000000000000"+"03000000", hex.EncodeToString(b))
	got, err := ParseDirectoryRequest(b)
	require.NoError(t, err)
	require.Equal(t, r, got)

	v, err := ParseBatchReadAnswer(AppendBatchReadAnswer(nil, 77))
	require.NoError(t, err)
	require.Equal(t, uint64(77), v)

	key := PageKey{Tenant: "public", Namespace: Namespace{1}, Hash: Hash{2}}
	require.NotEqual(t, DirectoryDigest(key, Form{1}), DirectoryDigest(key, Form{2}))
	require.Equal(t, "60340e75e34c787c", hex.EncodeToString(binary.BigEndian.AppendUint64(nil, DirectoryDigest(key, Form{3}))))
}

func TestDirectoryLimits(t *testing.T) {
	t.Parallel()
	full := func(n int, buckets uint8) DirectoryAnswer {
		f := DirectoryFilter{Buckets: buckets, Fingerprints: make([]uint16, n)}
		f.Bits = make([]uint64, f.Words(buckets, n))
		for i := range n { // all in the first bucket
			f.Bits[i/64] |= 1 << (i % 64)
		}
		return DirectoryAnswer{Full: true, Filter: f}
	}
	check := func(a DirectoryAnswer) error {
		b := AppendDirectoryAnswer(nil, a)
		if len(b) > MaxControl {
			return Errorf(CodeInternal, "", "%d bytes do not fit a frame", len(b))
		}
		_, err := ParseDirectoryAnswer(b)
		return err
	}
	most := full(MaxDirectoryPages, 21)
	most.Added = make([]uint64, MaxDirectoryDelta)
	require.NoError(t, check(most), "the largest answer fits a frame")
	require.NoError(t, check(full(10, 22)))
	require.Equal(t, CodeTooLarge, CodeOf(check(full(MaxDirectoryPages+1, 1))))
	require.Equal(t, CodeTooLarge, CodeOf(check(full(10, 23))))
	require.NoError(t, check(DirectoryAnswer{Removed: make([]uint64, MaxDirectoryDelta)}))
	require.Equal(t, CodeTooLarge, CodeOf(check(DirectoryAnswer{Removed: make([]uint64, MaxDirectoryDelta+1)})))
	require.Equal(t, CodeTooLarge, CodeOf(check(DirectoryAnswer{Added: make([]uint64, MaxDirectoryDelta+1)})))

	bad := full(3, 1)
	bad.Filter.Bits[0] |= 1 << 4 // a one too many
	require.Equal(t, CodeBadField, CodeOf(check(bad)))
	bad = full(3, 1)
	bad.Filter.Bits[0] = 0b11 | 1<<9 // behind the last bucket
	require.Equal(t, CodeBadField, CodeOf(check(bad)))

	bad.Filter.Bits[0] = 0b10011 // and the last bucket has no end
	require.Equal(t, CodeBadField, CodeOf(check(bad)))

	good := AppendDirectoryAnswer(nil, smallAnswer())
	for n := range good {
		_, err := ParseDirectoryAnswer(good[:n])
		require.Error(t, err, "%d bytes", n)
	}
	_, err := ParseDirectoryAnswer(append(good, 0))
	require.Equal(t, CodeBadFrame, CodeOf(err))
	for _, at := range []int{16, 17, 23, 25, 27} { // flags and reserved bytes
		b := append([]byte(nil), good...)
		b[at] |= 2
		_, err := ParseDirectoryAnswer(b)
		require.Error(t, err, "byte %d", at)
	}
	_, err = ParseDirectoryRequest(AppendDirectoryRequest(nil, DirectoryRequest{WaitUS: MaxDirectoryWaitUS}))
	require.NoError(t, err)
	_, err = ParseDirectoryRequest(AppendDirectoryRequest(nil, DirectoryRequest{WaitUS: MaxDirectoryWaitUS + 1}))
	require.Equal(t, CodeTooLarge, CodeOf(err))
}

func FuzzParseDirectory(f *testing.F) {
	f.Add(AppendDirectoryAnswer(nil, smallAnswer()))
	f.Add(AppendDirectoryAnswer(nil, DirectoryAnswer{Added: []uint64{1}}))
	f.Add(AppendDirectoryRequest(nil, DirectoryRequest{Epoch: 1}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := ParseDirectoryRequest(b); err == nil {
			require.Equal(t, b, AppendDirectoryRequest(nil, r))
		}
		if v, err := ParseBatchReadAnswer(b); err == nil {
			require.Equal(t, b, AppendBatchReadAnswer(nil, v))
		}
		a, err := ParseDirectoryAnswer(b)
		if err != nil {
			return
		}
		require.Equal(t, b, AppendDirectoryAnswer(nil, a))
		if a.Full {
			ones := 0
			for _, w := range a.Filter.Bits {
				ones += bits.OnesCount64(w)
			}
			require.Len(t, a.Filter.Fingerprints, ones)
		}
	})
}
