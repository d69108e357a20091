package roles

import (
	"cmp"
	"fmt"
	"math"

	"github.com/zeebo/xxh3"
)

// Node is a member as the decision sees it.
type Node struct {
	// ID is the name that its user gave it. It outlives restarts, so that a
	// node that comes back takes the place that it had.
	ID string
	// Name is its name in the mesh, which nobody else has.
	Name string
}

// Decision is what an auto node should be, and why.
type Decision struct {
	Role Role
	// Why is a short sentence for people, at most maxWhy bytes.
	Why string
}

// Decide returns what self should be among the live auto nodes. Those whose
// rank by hash is below round(ratio × n) prefill, at least one and at most all
// but one; a node without others does both. live may name self or not; ratio is
// cut to 0 to 1.
//
// It is a pure function: nodes that know the same members agree.
func Decide(self Node, live []Node, ratio float64) Decision {
	rank, n := 0, 1
	own := xxh3.HashString(self.ID)
	for _, other := range live {
		if other == self {
			continue
		}
		n++
		if before(xxh3.HashString(other.ID), other, own, self) {
			rank++
		}
	}
	if n == 1 {
		return Decision{RoleBoth, "no other auto node is alive"}
	}
	prefill := prefillNodes(n, ratio)
	d := Decision{RoleDecode, fmt.Sprintf("rank %d of %d auto nodes, %d of them prefill", rank+1, n, prefill)}
	if rank < prefill {
		d.Role = RolePrefill
	}
	return d
}

// prefillNodes returns how many of n auto nodes prefill.
func prefillNodes(n int, ratio float64) int {
	if math.IsNaN(ratio) {
		ratio = 0
	}
	return min(max(int(math.Round(min(max(ratio, 0), 1)*float64(n))), 1), n-1)
}

func before(ha uint64, a Node, hb uint64, b Node) bool {
	return cmp.Or(cmp.Compare(ha, hb), cmp.Compare(a.ID, b.ID), cmp.Compare(a.Name, b.Name)) < 0
}
