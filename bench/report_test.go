package bench

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestRatioIsTheMedianOfTheRoundsRatios(t *testing.T) {
	// The machine halves its speed after two rounds; the ratio stays.
	ours, theirs := samples{2, 2, 4, 4, 4}, samples{1, 1, 2, 2, 8}
	row, err := ours.against(ours.row("ours", "µs"), theirs, "theirs", "<= 2.5")
	require.NoError(t, err)
	assert.InDelta(t, 2, *row.Ratio, 1e-9)
	assert.Equal(t, "theirs", *row.RatioTo)
	assert.True(t, *row.OK)
	assert.InDelta(t, 4, row.Value, 0)
	assert.InDelta(t, 2, row.Min, 0)
}

func TestTargetsAreBounds(t *testing.T) {
	for _, c := range []struct {
		value  float64
		target string
		ok     bool
	}{{2.5, "<= 2.5", true}, {2.51, "<= 2.5", false}, {0.9, ">= 0.9", true}, {0.89, ">= 0.9", false}} {
		row, err := Row{}.judge(c.value, c.target)
		require.NoError(t, err)
		assert.Equal(t, c.ok, *row.OK, c)
	}
	_, err := Row{Name: "r"}.judge(1, "fast")
	assert.ErrorContains(t, err, `target "fast" of r`)
	_, err = samples{1}.against(Row{Name: "r"}, samples{1, 2}, "o", "")
	assert.ErrorContains(t, err, "1 and 2 rounds")
}

func TestReportNamesWhatWasMissedAndWhatWasNotRun(t *testing.T) {
	missed, err := Row{Name: "slow", Unit: "s"}.judge(2, "<= 1")
	require.NoError(t, err)
	r := Report{Machine: thisMachine("test"), Rows: []Row{missed, samples{}.row("absent", "s")}}
	assert.Equal(t, []string{"slow"}, r.Missed())
	assert.Positive(t, r.Machine.MemoryGiB)
	assert.NotEmpty(t, r.Machine.Kernel)
	var text strings.Builder
	require.NoError(t, r.WriteText(&text))
	assert.Contains(t, text.String(), "MISSED")
	assert.Contains(t, text.String(), "not run: no round was run")
	var js strings.Builder
	require.NoError(t, r.WriteJSON(&js))
	var back struct{ Rows []map[string]any }
	require.NoError(t, json.Unmarshal([]byte(js.String()), &back))
	for _, field := range []string{"name", "value", "unit", "ratio", "ratio_to", "target", "ok"} {
		assert.Contains(t, back.Rows[1], field)
	}
	assert.Nil(t, back.Rows[1]["ok"])
}

func TestStreamsAreReadToTheirEnd(t *testing.T) {
	good := "data: {\"choices\":[{\"token_ids\":[7]}]}\n\n" +
		"data: {\"choices\":[{\"token_ids\":[8]}],\"membrane\":{\"reused_tokens\":64,\"miss_reason\":\"absent\"}}\n\ndata: [DONE]\n\n"
	begin := time.Unix(1, 0)
	s, err := readEvents(strings.NewReader(good), func() time.Time { return begin.Add(time.Second) })
	require.NoError(t, err)
	a := answerOf(s, begin)
	assert.Equal(t, time.Second, a.firstToken)
	assert.Equal(t, []uint32{7, 8}, a.tokens)
	assert.Equal(t, 64, a.reused)
	assert.Equal(t, "absent", a.reason)
	for stream, want := range map[string]string{
		strings.TrimSuffix(good, "data: [DONE]\n\n"):       "without [DONE]",
		"data: {\"error\":{\"message\":\"too long\"}}\n\n": "too long",
		"data: {not json}\n\n":                             "cannot decode",
	} {
		_, err := readEvents(strings.NewReader(stream), time.Now)
		assert.ErrorContains(t, err, want)
	}
}

func TestMarkdownSaysWhatTextSays(t *testing.T) {
	missed, err := Row{Name: "slow", Unit: "s", Value: 2}.judge(2, "<= 1")
	require.NoError(t, err)
	absent := samples{}.row("absent", "s")
	absent.Why = "it is not here"
	var b strings.Builder
	require.NoError(t, Report{Rows: []Row{missed, absent}}.WriteMarkdown(&b))
	assert.Contains(t, b.String(), "| slow | 2 | 0 | 0 | s |  |  | ≤ 1 | **missed** |")
	assert.Contains(t, b.String(), "not run: it is not here")
}

func TestMedianOfEvenRoundsIsBetweenTheMiddleTwo(t *testing.T) {
	assert.InDelta(t, 1.05, (samples{1.3, 0.8}).median(), 1e-9, "and not the better of two rounds")
	assert.InDelta(t, 2, (samples{3, 1, 2}).median(), 1e-9)
	assert.InDelta(t, 2.5, (samples{4, 1, 3, 2}).median(), 1e-9)
	assert.Zero(t, samples(nil).median())
}
