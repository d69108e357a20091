package kvwire

import (
	"encoding/binary"
	"math/bits"
)

// Limits of a directory.
const (
	// MaxDirectoryPages is the most pages that one node's filter may list.
	MaxDirectoryPages = 3 << 20
	// MaxDirectoryDelta is the most added, and the most removed, pages in one
	// answer.
	MaxDirectoryDelta = 1 << 16
	// MaxDirectoryWaitUS is the longest that an answer may be put off, in
	// microseconds.
	MaxDirectoryWaitUS = 30_000_000

	maxDirectoryBuckets = 22 // log2
)

// DirectoryDigest names a page that is complete in one form: 64 bits, for
// directories, which can bear a false positive. It is the page's
// [PageKey.Digest] xor the form as a little-endian number times
// 0x9E3779B97F4A7C15, mixed with the finaliser of MurmurHash3.
func DirectoryDigest(k PageKey, f Form) uint64 {
	x := k.Digest() ^ binary.LittleEndian.Uint64(f[:])*0x9E3779B97F4A7C15
	x ^= x >> 33
	x *= 0xFF51AFD7ED558CCD
	x ^= x >> 33
	x *= 0xC4CEB9FE1A85EC53
	return x ^ x>>33
}

// DirectoryRequest asks a peer which pages it holds. Epoch and Version are
// those of the answer that the asker has, both 0 for none. The answer comes at
// once if it differs from that, else as soon as it does or when WaitUS has
// passed.
//
//	offset  size  field
//	0       8     epoch
//	8       8     version
//	16      4     wait: microseconds
type DirectoryRequest struct {
	Epoch   uint64
	Version uint64
	WaitUS  uint32
}

// AppendDirectoryRequest appends the message in wire form.
func AppendDirectoryRequest(b []byte, r DirectoryRequest) []byte {
	b = binary.LittleEndian.AppendUint64(b, r.Epoch)
	b = binary.LittleEndian.AppendUint64(b, r.Version)
	return binary.LittleEndian.AppendUint32(b, r.WaitUS)
}

// ParseDirectoryRequest decodes the message.
func ParseDirectoryRequest(body []byte) (DirectoryRequest, error) {
	d := decoder{b: body}
	r := DirectoryRequest{Epoch: d.u64(), Version: d.u64(), WaitUS: d.u32()}
	if err := d.end("directory"); err != nil {
		return r, err
	}
	if r.WaitUS > MaxDirectoryWaitUS {
		return r, Errorf(CodeTooLarge, "wait", "%d µs are more than %d", r.WaitUS, MaxDirectoryWaitUS)
	}
	return r, nil
}

// DirectoryAnswer brings the asker's picture of a node to Version: a whole
// filter in place of what it has (Full), then digests to add and to remove.
// The epoch is drawn anew when the node starts.
//
//	offset  size  field
//	0       8     epoch
//	8       8     version
//	16      1     flags: 1 a filter is here
//	17      7     zero
//	…             filter, if it is here (see [DirectoryFilter])
//	…       4     number of digests to add
//	…       8×n  digests
//	…       4     number of digests to remove
//	…       8×n  digests
type DirectoryAnswer struct {
	Epoch   uint64
	Version uint64
	Full    bool
	Filter  DirectoryFilter
	Added   []uint64
	Removed []uint64
}

// DirectoryFilter lists digests by 16-bit fingerprints. A digest belongs to
// the bucket that its first Buckets bits name; its next 16 bits are its
// fingerprint. Fingerprints stand bucket by bucket, in ascending order within
// one. Bits holds for each bucket as many ones as it has fingerprints, then a
// zero; bit i is bit i mod 64 of word i / 64, the last word is filled with
// zeros.
//
//	offset  size  field
//	0       1     log2 of the number of buckets, at most 22
//	1       3     zero
//	4       4     n: fingerprints
//	8       8×w  bits; w = ceil((n + buckets) / 64)
//	…       2×n  fingerprints
type DirectoryFilter struct {
	Buckets      uint8
	Bits         []uint64
	Fingerprints []uint16
}

// Words returns how many 64-bit words the bits of n fingerprints in 1<<buckets
// buckets fill.
func (DirectoryFilter) Words(buckets uint8, n int) int { return (n + 1<<buckets + 63) / 64 }

// AppendDirectoryAnswer appends the message in wire form.
func AppendDirectoryAnswer(b []byte, a DirectoryAnswer) []byte {
	b = binary.LittleEndian.AppendUint64(b, a.Epoch)
	b = binary.LittleEndian.AppendUint64(b, a.Version)
	if a.Full {
		b = append(b, 1, 0, 0, 0, 0, 0, 0, 0)
		b = append(b, a.Filter.Buckets, 0, 0, 0)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(a.Filter.Fingerprints)))
		for _, w := range a.Filter.Bits {
			b = binary.LittleEndian.AppendUint64(b, w)
		}
		for _, f := range a.Filter.Fingerprints {
			b = binary.LittleEndian.AppendUint16(b, f)
		}
	} else {
		b = append(b, 0, 0, 0, 0, 0, 0, 0, 0)
	}
	for _, list := range [][]uint64{a.Added, a.Removed} {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(list)))
		for _, x := range list {
			b = binary.LittleEndian.AppendUint64(b, x)
		}
	}
	return b
}

// ParseDirectoryAnswer decodes the message and checks that the filter is
// consistent. Nothing in the answer is a view of body.
func ParseDirectoryAnswer(body []byte) (DirectoryAnswer, error) {
	d := decoder{b: body}
	a := DirectoryAnswer{Epoch: d.u64(), Version: d.u64()}
	flags := d.u64()
	if flags > 1 {
		return a, Errorf(CodeBadField, "flags", "%#x has bits that are not defined", flags)
	}
	if a.Full = flags == 1; a.Full {
		var err error
		if a.Filter, err = parseFilter(&d); err != nil {
			return a, err
		}
	}
	for _, list := range []struct {
		name string
		to   *[]uint64
	}{{"added", &a.Added}, {"removed", &a.Removed}} {
		n := d.u32()
		if n > MaxDirectoryDelta {
			return a, Errorf(CodeTooLarge, list.name, "%d digests are more than %d", n, MaxDirectoryDelta)
		}
		raw := d.bytes(int(n) * 8)
		if n == 0 || raw == nil {
			continue
		}
		*list.to = make([]uint64, n)
		for i := range *list.to {
			(*list.to)[i] = binary.LittleEndian.Uint64(raw[8*i:])
		}
	}
	return a, d.end("directory")
}

func parseFilter(d *decoder) (DirectoryFilter, error) {
	f := DirectoryFilter{Buckets: d.u8()}
	zero := [3]byte(append(d.bytes(3), 0, 0, 0))
	n := d.u32()
	switch {
	case zero != [3]byte{}:
		return f, Errorf(CodeBadFrame, "filter", "a reserved byte is not zero")
	case f.Buckets > maxDirectoryBuckets:
		return f, Errorf(CodeTooLarge, "buckets", "1<<%d are more than 1<<%d", f.Buckets, maxDirectoryBuckets)
	case n > MaxDirectoryPages:
		return f, Errorf(CodeTooLarge, "fingerprints", "%d are more than %d", n, MaxDirectoryPages)
	}
	words := f.Words(f.Buckets, int(n))
	rawBits := d.bytes(words * 8)
	rawPrints := d.bytes(int(n) * 2)
	if d.short {
		return f, d.end("filter")
	}
	f.Bits = make([]uint64, words)
	ones := 0
	for i := range f.Bits {
		f.Bits[i] = binary.LittleEndian.Uint64(rawBits[8*i:])
		ones += bits.OnesCount64(f.Bits[i])
	}
	// Behind the zero that ends the last bucket nothing may stand.
	last := (int(n) + 1<<f.Buckets - 1) % 64
	tail := bits.OnesCount64(f.Bits[words-1] >> last)
	if ones != int(n) || tail != 0 {
		return f, Errorf(CodeBadField, "bits", "%d ones, %d of them behind the last bucket, for %d fingerprints", ones, tail, n)
	}
	f.Fingerprints = make([]uint16, n)
	for i := range f.Fingerprints {
		f.Fingerprints[i] = binary.LittleEndian.Uint16(rawPrints[2*i:])
	}
	return f, nil
}

// AppendBatchReadAnswer appends the body of the frame that ends a batch read:
// the version of the answerer's directory, eight bytes.
func AppendBatchReadAnswer(b []byte, version uint64) []byte {
	return binary.LittleEndian.AppendUint64(b, version)
}

// ParseBatchReadAnswer decodes the body of the frame that ends a batch read.
func ParseBatchReadAnswer(body []byte) (version uint64, err error) {
	d := decoder{b: body}
	version = d.u64()
	return version, d.end("batch_read")
}
