package bench

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
)

func TestPDTakesEveryFigure(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	r, err := PD(ctx, PDOptions{
		Binary: realBinary(t), Lengths: []int{130, 300}, Rounds: 1, Requests: 4, Rate: 20, Prompt: 130, Answer: 3, Aborts: 40,
		Progress: func(line string) { t.Log(line) },
	})
	require.NoError(t, err)
	require.Len(t, r.Arms, 2)
	for _, a := range r.Arms {
		assert.Zero(t, a.Failed, a.Name)
		assert.Equal(t, 4, a.Requests)
		assert.Positive(t, a.TTFT.P50)
		assert.Zero(t, a.Recomputed)
	}
	require.Len(t, r.Handover, 2)
	for _, h := range r.Handover {
		assert.Positive(t, h.PrefillMS)
		assert.Positive(t, h.Plain.Median)
	}
	for _, row := range r.Rows {
		if strings.Contains(row.Name, "left by 40 aborted requests") {
			assert.LessOrEqual(t, row.Value, 0.0, row.Name)
		}
	}
}

func TestPlacementsThatFailAreNotFaster(t *testing.T) {
	whole := PDArm{Requests: 60, TTFT: Percentiles{P50: 100}, ITL: Percentiles{P99: 10}, LongestGap: Percentiles{P50: 20}}
	rows := comparePlacements(whole, PDArm{Requests: 60, TTFT: Percentiles{P50: 50}, ITL: Percentiles{P99: 5}, LongestGap: Percentiles{P50: 5}})
	require.Len(t, rows, 3)
	assert.InDelta(t, 0.5, *rows[0].Ratio, 1e-9)
	assert.InDelta(t, 50, rows[0].Value, 1e-9)
	for _, row := range comparePlacements(whole, PDArm{Requests: 60, Failed: 60}) { // of which there are no times
		assert.Nil(t, row.Ratio, row.Name)
		assert.Contains(t, row.Why, "60 disaggregated requests failed")
	}
}

func TestWhatOneNodeLacksIsNotWhatTheOtherLeaks(t *testing.T) {
	assert.InDelta(t, 3, leaked([]float64{10, 20}, []float64{7, 23}), 0)
	assert.InDelta(t, 0, leaked([]float64{10, 20}, []float64{7, 20}), 0)
}

func TestPDReportHasItsForms(t *testing.T) {
	ok, target := true, "<= 1"
	r := PDReport{
		Report:   Report{Machine: Machine{CPU: "x"}, Rows: []Row{{Name: "row", OK: &ok, Target: &target}}},
		Workload: PDWorkload{Requests: 7, Rate: 2},
		Arms:     []PDArm{{Name: "colocated", Requests: 7, Failed: 1}, {Name: "vllm", Why: "no vLLM"}},
		Handover: []PDHandover{{Tokens: 512, Plain: PDTimes{1, 2, 3}}},
	}
	var text, md, js strings.Builder
	require.NoError(t, r.WriteText(&text))
	assert.Contains(t, text.String(), "colocated")
	assert.Contains(t, text.String(), "not run: no vLLM")
	require.NoError(t, r.WriteMarkdown(&md))
	assert.Contains(t, md.String(), "| 512 |")
	assert.Contains(t, md.String(), "| vllm | not run: no vLLM | ")
	require.NoError(t, r.WriteJSON(&js))
	var back PDReport
	require.NoError(t, json.Unmarshal([]byte(js.String()), &back))
	assert.Equal(t, r, back)
}

func TestPDOptionsAreChecked(t *testing.T) {
	o, err := PDOptions{}.fill()
	require.NoError(t, err)
	assert.Equal(t, 10_000, o.Aborts)
	for says, bad := range map[string]PDOptions{
		"rounds: -1": {Rounds: -1}, "lengths: 0": {Lengths: []int{0}}, "lengths: 32769": {Lengths: []int{32769}}, "rate:": {Rate: -1},
		"aborts: -5": {Aborts: -5}, "prompt tokens: 40000": {Prompt: 40000},
	} {
		assert.ErrorContains(t, bad.Check(), says)
	}
}

func TestWhatAProxyAddsIsBesideABareOne(t *testing.T) {
	round := func(p50, p99 float64) samples {
		s := make(samples, 1000)
		for i := range s {
			s[i] = p50
		}
		for i := 980; i < 1000; i++ {
			s[i] = p99
		}
		return s
	}
	b := &pd{}
	require.NoError(t, b.judgeProxy([3][]samples{{round(100, 900), round(110, 900)}, {round(150, 902), round(160, 902)}, {round(250, 1000), round(250, 1000)}}))
	require.Len(t, b.report.Rows, 2)
	p50, p99 := b.report.Rows[0], b.report.Rows[1]
	assert.InDelta(t, 140, p50.Value, 11)
	assert.InDelta(t, 2.8, *p50.Ratio, 0.5)
	assert.True(t, *p50.OK)
	assert.Nil(t, p99.OK)
	assert.Contains(t, p99.Why, "the bare proxy adds 2 µs")
	assert.Len(t, b.report.Ceilings, 2)
}

// A server that stalls holds back requests for which no worker is free; their
// wait counts.
func TestAStallShowsInWhatIsHeldBack(t *testing.T) {
	open := make(chan struct{})
	stall := time.AfterFunc(400*time.Millisecond, func() { close(open) })
	defer stall.Stop()
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-open }))
	defer server.Close()
	client := fasthttp.Client{MaxConnsPerHost: proxyWorkers}
	defer client.CloseIdleConnections()
	took, err := (&pd{opts: PDOptions{Quick: true}}).askProxy(t.Context(), &client, server.URL)
	require.NoError(t, err)
	slow := 0
	for _, us := range took {
		if us > 20_000 {
			slow++
		}
	}
	assert.Greater(t, slow, proxyWorkers+20, "of about 75 that were due before it went on")
}

func TestTheReverseProxyPassesOn(t *testing.T) {
	a := &proxyArms{}
	defer a.shut()
	engine, err := a.source(realBinary(t), "")
	require.NoError(t, err)
	through, err := a.source(realBinary(t), engine)
	require.NoError(t, err)
	for _, at := range []string{engine, through} {
		status, body, err := a.client.Post(nil, "http://"+at+"/v1/completions", nil)
		require.NoError(t, err)
		assert.Equal(t, 200, status)
		assert.JSONEq(t, completionAnswer, string(body))
	}
}
