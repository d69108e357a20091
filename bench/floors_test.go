package bench

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestFloorsNameWhatFellBelowThem(t *testing.T) {
	floors, err := ReadFloors(strings.NewReader("# comment\n\n<= 2 | a\n>= 0.5 | b\n"))
	require.NoError(t, err)
	half, twice := 0.5, 2.0
	good := Report{Rows: []Row{{Name: "a", Ratio: &twice, Value: 99}, {Name: "b", Ratio: &half}}}
	assert.NoError(t, floors.Check(good))
	worse := 2.01
	assert.ErrorContains(t, floors.Check(Report{Rows: []Row{{Name: "a", Ratio: &worse}, {Name: "b", Value: 1}}}), `"a" is at 2.01, its floor is <= 2`)
	assert.ErrorContains(t, floors.Check(Report{Rows: append(good.Rows, Row{Name: "c"})}), `"c" has no floor`)
	assert.ErrorContains(t, floors.Check(Report{Rows: good.Rows[:1]}), `the floor of "b" has no row`)
	assert.NoError(t, floors.Check(good, Report{Rows: []Row{{Name: "a", Ratio: &worse}, {Name: "b", Ratio: &half}}}), "met in another attempt")
	low := 0.4
	err = floors.Check(Report{Rows: []Row{{Name: "a", Ratio: &worse}, {Name: "b", Ratio: &half}}}, Report{Rows: []Row{{Name: "a", Ratio: &worse}, {Name: "b", Ratio: &low}}})
	assert.EqualError(t, err, `"a" is at 2.01, its floor is <= 2`, "each time")
	notRun := Report{Rows: []Row{{Name: "a", Why: "broken"}, {Name: "b", Ratio: &half}}}
	assert.ErrorContains(t, floors.Check(good, notRun), `"a" was not run: broken`)
	for _, bad := range []string{
		"<= 2 a", "fast | a", "<= 2 |", "| a",
		// Bounds that would be taken for others, or that nothing can miss.
		"0.5 | a", "> 0.5 | a", "=> 0.5 | a", ">= -Inf | a", "<= +Inf | a", ">= NaN | a",
	} {
		_, err := ReadFloors(strings.NewReader(bad))
		assert.ErrorContains(t, err, "line 1", bad)
	}
}

func TestTwoFloorsOfOneRowAreRefused(t *testing.T) {
	_, err := ReadFloors(strings.NewReader("<= 2 | a\n<= 20 | a\n"))
	assert.ErrorContains(t, err, "line 2")
}

func TestCommittedFloorsCanBeRead(t *testing.T) {
	for name, rows := range map[string]int{"bench-floors.txt": 12, "bench-vllm-floors.txt": 10} {
		f, err := os.Open("../tools/" + name)
		require.NoError(t, err)
		defer func() { _ = f.Close() }()
		floors, err := ReadFloors(f)
		require.NoError(t, err)
		assert.Len(t, floors, rows, name)
		if name == "bench-vllm-floors.txt" {
			for _, v := range (vllmFigures{}).rows() {
				if v.needs == "" { // the check runs without LMCache
					assert.Contains(t, floors, v.name)
				}
			}
		}
	}
}
