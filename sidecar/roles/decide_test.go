package roles

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func nodes(ids ...string) (out []Node) {
	for _, id := range ids {
		out = append(out, Node{ID: id, Name: id + "-1"})
	}
	return out
}

// roles returns what each of the nodes decides about itself.
func decideAll(live []Node, ratio float64) map[Node]Role {
	out := make(map[Node]Role)
	for _, n := range live {
		out[n] = Decide(n, live, ratio).Role
	}
	return out
}

func count(roles map[Node]Role, r Role) (n int) {
	for _, have := range roles {
		if have == r {
			n++
		}
	}
	return n
}

func genNodes(least int) *rapid.Generator[[]Node] {
	node := rapid.Custom(func(t *rapid.T) Node {
		// Ids may be given twice; names are never.
		return Node{ID: rapid.StringMatching(`[a-c]{0,2}`).Draw(t, "id"), Name: rapid.StringMatching(`[a-z]{1,8}`).Draw(t, "name")}
	})
	return rapid.SliceOfNDistinct(node, least, 40, func(n Node) string { return n.Name })
}

func TestDecisionsAgree(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		live := genNodes(1).Draw(t, "live")
		ratio := rapid.Float64Range(0, 1).Draw(t, "ratio")
		got := decideAll(live, ratio)
		n := len(live)
		if n == 1 {
			assert.Equal(t, RoleBoth, got[live[0]])
			return
		}
		want := min(max(int(math.Round(ratio*float64(n))), 1), n-1)
		assert.Equal(t, want, count(got, RolePrefill))
		assert.Equal(t, n-want, count(got, RoleDecode))
		shuffled := rapid.Permutation(live).Draw(t, "shuffled")
		assert.Equal(t, got, decideAll(shuffled, ratio), "the order of the members does not matter")
		for _, d := range live {
			assert.LessOrEqual(t, len(Decide(d, live, ratio).Why), 64)
		}
	})
}

func TestBothPartsOfADividedMeshKeepBothPhases(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		live := genNodes(2).Draw(t, "live")
		ratio := rapid.Float64Range(0, 1).Draw(t, "ratio")
		cut := rapid.IntRange(1, len(live)-1).Draw(t, "cut")
		for _, part := range [][]Node{live[:cut], live[cut:]} {
			got := decideAll(part, ratio)
			for _, p := range []Phase{Prefill, Decode} {
				assert.True(t, slices.ContainsFunc(part, func(n Node) bool { return got[n].Serves(p) }), "%s in %v", p, got)
			}
		}
	})
}

// A node that comes or goes moves the border by one place at most, so that at
// most two nodes change.
func TestOneMemberMoreChangesFew(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		live := genNodes(3).Draw(t, "live")
		ratio := rapid.Float64Range(0, 1).Draw(t, "ratio")
		fewer := decideAll(live[1:], ratio)
		changed := 0
		for n, r := range decideAll(live, ratio) {
			if old, ok := fewer[n]; ok && old != r {
				changed++
			}
		}
		assert.LessOrEqual(t, changed, 1)
	})
}

func TestDecideByHand(t *testing.T) {
	t.Parallel()
	f := func(n int, ratio float64, want int) {
		t.Helper()
		var live []Node
		for i := range n {
			live = append(live, Node{ID: fmt.Sprint("n", i), Name: fmt.Sprint("n", i)})
		}
		require.Equal(t, want, count(decideAll(live, ratio), RolePrefill), "%d nodes at %v", n, ratio)
	}
	f(2, 0, 1)
	f(2, 1, 1)
	f(4, 0.5, 2)
	f(4, 0.25, 1)
	f(10, 0.25, 3) // round half up
	f(10, math.NaN(), 1)
	f(10, -1, 1)
	f(10, 7, 9)
	alone := Decide(Node{ID: "a", Name: "a"}, nil, 0.5)
	assert.Equal(t, RoleBoth, alone.Role)
	assert.Equal(t, alone, Decide(Node{ID: "a", Name: "a"}, nodes()[:0], 0.5))
}

func TestRolesServe(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		role            Role
		prefill, decode bool
	}{{RolePrefill, true, false}, {RoleDecode, false, true}, {RoleBoth, true, true}, {"", true, true}} {
		assert.Equal(t, c.prefill, c.role.Serves(Prefill), c.role)
		assert.Equal(t, c.decode, c.role.Serves(Decode), c.role)
	}
	for _, good := range []string{"prefill", "decode", "both", "auto"} {
		assert.NoError(t, Check(good))
	}
	for _, bad := range []string{"", "Prefill", "prefill_worker"} {
		assert.Error(t, Check(bad))
	}
}
