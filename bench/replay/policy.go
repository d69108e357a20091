package replay

// policy is a cache of blocks, each as large as any other.
type policy interface {
	// request returns how many leading blocks of a prompt are held and stores
	// the others.
	request(blocks []uint64) (held int, err error)
	// evictions returns how many blocks left or were refused so far.
	evictions() uint64
	close() error
}

// maker makes a policy for a trace that holds at most so many blocks.
type maker struct {
	name  string
	about string
	make  func(t *Trace, capacity int) (policy, error)
}

// Names of the policies.
const (
	Membrane  = "membrane"
	LRU       = "lru"
	LRUHeads  = "lru-heads-first"
	Ristretto = "ristretto"
	Optimum   = "optimum"
)

// policies returns the policies in the order of the report.
func policies() []maker {
	return []maker{
		{Membrane, "the project's cache: package cache with its default settings over an arena of as many bytes, window, free reserve and caps on leases included", newMembrane},
		{LRU, "the least recently used block leaves; of one prompt the last block first, as engines order theirs", func(_ *Trace, n int) (policy, error) { return newLRU(n, false), nil }},
		{LRUHeads, "the same, but of one prompt the first block leaves first", func(_ *Trace, n int) (policy, error) { return newLRU(n, true), nil }},
		{Ristretto, "the library alone with this MaxCost: every block of a prompt is asked for, those that are not held are set, and each request waits for its verdicts", newRistretto},
		{Optimum, "offline: of the blocks held and just asked for, those whose next use is farthest leave, of one prompt the last first (Belady's MIN with bypass). Blocks are used only after all before them, so what stays is closed under prefixes, and no policy of equal memory has more hits", func(t *Trace, n int) (policy, error) { return newOptimum(t, n), nil }},
	}
}
