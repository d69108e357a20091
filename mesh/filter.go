package mesh

import (
	"math/bits"
	"slices"

	"membrane/kvwire"
)

const (
	fingerprintBits = 16
	startEvery      = 64 // buckets between two entries of filter.starts
	maxBuckets      = 22 // log2
)

// filter is a node's pages as a peer remembers them: a sorted list of
// fingerprints, cut into buckets by a bit vector (see
// [kvwire.DirectoryFilter]). One fingerprint costs 18 to 19 bits, and digests
// can be added and removed, which a xor or fuse filter cannot do. It is
// immutable and may be read by several goroutines.
//
// A digest that is not listed is found with probability 2^-15 at most.
type filter struct {
	kvwire.DirectoryFilter
	starts []uint32 // fingerprints before bucket 64×i
}

// newFilter lists digests, which are sorted in place.
func newFilter(digests []uint64) *filter {
	slices.Sort(digests)
	if len(digests) > kvwire.MaxDirectoryPages {
		digests = digests[:kvwire.MaxDirectoryPages]
	}
	buckets := uint8(0)
	if n := len(digests); n > 1 {
		buckets = uint8(min(bits.Len(uint(n))-1, maxBuckets))
	}
	values := make([]uint64, len(digests))
	shift := 64 - buckets - fingerprintBits
	for i, d := range digests {
		values[i] = d >> shift
	}
	return packFilter(buckets, values)
}

// packFilter makes a filter of sorted values of buckets + 16 bits.
func packFilter(buckets uint8, values []uint64) *filter {
	f := &filter{DirectoryFilter: kvwire.DirectoryFilter{Buckets: buckets}}
	f.Bits = make([]uint64, f.Words(buckets, len(values)))
	f.Fingerprints = make([]uint16, len(values))
	for i, v := range values {
		f.Fingerprints[i] = uint16(v)
		at := i + int(v>>fingerprintBits)
		f.Bits[at/64] |= 1 << (at % 64)
	}
	f.index()
	return f
}

// receiveFilter takes over a filter that came over the wire and was checked by
// its parser.
func receiveFilter(w kvwire.DirectoryFilter) *filter {
	f := &filter{DirectoryFilter: w}
	f.index()
	return f
}

// index fills starts.
func (f *filter) index() {
	buckets := 1 << f.Buckets
	f.starts = make([]uint32, (buckets+startEvery-1)/startEvery)
	bucket, ones := 0, 0
	for _, w := range f.Bits {
		for inv := ^w; inv != 0 && bucket < buckets-1; inv &= inv - 1 {
			bucket++ // begins behind this zero
			if bucket%startEvery == 0 {
				before := w & (1<<bits.TrailingZeros64(inv) - 1)
				f.starts[bucket/startEvery] = uint32(ones + bits.OnesCount64(before))
			}
		}
		ones += bits.OnesCount64(w)
	}
}

// len returns the number of fingerprints.
func (f *filter) len() int { return len(f.Fingerprints) }

// bytes returns the memory that the filter's lists take, in bytes.
func (f *filter) bytes() int {
	return 8*cap(f.Bits) + 2*cap(f.Fingerprints) + 4*cap(f.starts)
}

// has reports whether the digest seems to be listed.
func (f *filter) has(digest uint64) bool {
	if f == nil || len(f.Fingerprints) == 0 {
		return false
	}
	v := digest >> (64 - f.Buckets - fingerprintBits)
	bucket := int(v >> fingerprintBits)
	key := int(f.starts[bucket/startEvery])
	at := key + bucket/startEvery*startEvery
	key, at = f.skip(key, at, bucket%startEvery)
	for ; f.Bits[at/64]>>(at%64)&1 == 1; at++ {
		if f.Fingerprints[key] == uint16(v) {
			return true
		}
		key++
	}
	return false
}

// skip goes n buckets on from bit at, before which there are key ones.
func (f *filter) skip(key, at, n int) (int, int) {
	for n > 0 {
		w := f.Bits[at/64] >> (at % 64)
		width := 64 - at%64
		inv := ^w
		if width < 64 {
			inv &= 1<<width - 1
		}
		if zeros := bits.OnesCount64(inv); zeros < n {
			n -= zeros
			key += width - zeros
			at += width
			continue
		}
		for range n - 1 {
			inv &= inv - 1
		}
		pos := bits.TrailingZeros64(inv)
		key += bits.OnesCount64(w & (1<<pos - 1))
		return key, at + pos + 1
	}
	return key, at
}

// values returns the buckets and fingerprints as sorted numbers.
func (f *filter) values(dst []uint64) []uint64 {
	key := 0
	for i, w := range f.Bits {
		for ; w != 0; w &= w - 1 {
			// In front of a one stand as many zeros as buckets have ended.
			bucket := i*64 + bits.TrailingZeros64(w) - key
			dst = append(dst, uint64(bucket)<<fingerprintBits|uint64(f.Fingerprints[key]))
			key++
		}
	}
	if !slices.IsSorted(dst) { // a peer's filter with a bucket out of order
		slices.Sort(dst)
	}
	return dst
}

// apply returns the filter with some digests more and some fewer. A removed
// digest that is not listed is ignored.
func (f *filter) apply(added, removed []uint64) *filter {
	if f == nil {
		return newFilter(slices.Clone(added))
	}
	shift := 64 - f.Buckets - fingerprintBits
	less := make([]uint64, 0, len(removed))
	for _, d := range removed {
		less = append(less, d>>shift)
	}
	slices.Sort(less)
	more := make([]uint64, 0, len(added))
	for _, d := range added {
		more = append(more, d>>shift)
	}
	slices.Sort(more)
	old := f.values(make([]uint64, 0, len(f.Fingerprints)))
	all := make([]uint64, 0, len(old)+len(more))
	for _, v := range old {
		for len(less) > 0 && less[0] < v {
			less = less[1:]
		}
		if len(less) > 0 && less[0] == v {
			less = less[1:]
			continue
		}
		for len(more) > 0 && more[0] <= v {
			all = append(all, more[0])
			more = more[1:]
		}
		all = append(all, v)
	}
	all = append(all, more...)
	return packFilter(f.Buckets, all[:min(len(all), kvwire.MaxDirectoryPages)])
}

// crowded reports whether the filter has so many or so few fingerprints for
// its buckets that a new one should be asked for.
func (f *filter) crowded() bool { return f.crowdedBy(len(f.Fingerprints)) }

// crowdedBy is crowded as if there were n fingerprints.
func (f *filter) crowdedBy(n int) bool {
	buckets := 1 << f.Buckets
	return f.Buckets < maxBuckets && n > 4*buckets && n > 1024 || buckets > 4*max(n, 1024)
}
