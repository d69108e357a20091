package bench

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// realBinary returns the binary that sidecars and engines are started from.
func realBinary(t *testing.T) string {
	t.Helper()
	binary := os.Getenv("MEMBRANE_BIN")
	if binary == "" {
		t.Skip("MEMBRANE_BIN is not set: make test sets it")
	}
	return binary
}

func TestSmallDemoKeepsItsPromises(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	kept := DemoSystem{}
	result, err := Demo(ctx, DemoOptions{
		Binary: realBinary(t), Progress: func(line string) { t.Log(line) }, Keep: func(s DemoSystem) { kept = s },
		shape: demoShape{layers: 2, hidden: 64, prompt: 641, prefix: 128, suffix: 64},
	})
	require.NoError(t, err)
	assert.True(t, result.TokensEqual)
	assert.Equal(t, 641, result.PromptTokens)
	assert.Equal(t, 640, result.TokensReusedLocal)
	assert.Equal(t, 640, result.TokensReusedPeer)
	assert.Equal(t, demoNodes, result.MembersSeen)
	assert.Positive(t, result.RequestsDuringKill)
	assert.Equal(t, result.RequestsDuringKill, result.AnsweredDuringKill)
	assert.Len(t, kept.Engines, demoNodes)
	assert.Len(t, kept.Sidecars, demoNodes)

	var text, js strings.Builder
	require.NoError(t, result.WriteText(&text))
	assert.Contains(t, text.String(), "640 of 641")
	require.NoError(t, result.WriteJSON(&js))
	for _, field := range []string{
		"tokens_equal", "prompt_tokens", "tokens_reused_local", "tokens_reused_peer", "ttft_cold_ms", "ttft_local_ms",
		"ttft_peer_ms", "requests_during_kill", "answered_during_kill", "members_seen", "elapsed_s",
	} {
		assert.Contains(t, js.String(), `"`+field+`"`)
	}
}

func TestDemoSaysWhatDidNotStart(t *testing.T) {
	_, err := Demo(context.Background(), DemoOptions{Binary: "/bin/false"})
	assert.ErrorContains(t, err, "sidecar n1 ended before it was ready")
}

func TestCoreTakesEveryFigure(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	report, err := Core(ctx, CoreOptions{Binary: realBinary(t), Quick: true, Rounds: 1, Progress: func(line string) { t.Log(line) }})
	require.NoError(t, err)
	require.Len(t, report.Ceilings, 5)
	require.Len(t, report.Rows, 24)
	for _, row := range report.Rows[12:] {
		assert.Equal(t, vllmNotRun, row.Why, row.Name)
	}
	for _, row := range append(report.Ceilings, report.Rows[:12]...) {
		assert.Empty(t, row.Why, row.Name)
		if row.Unit != "% of a core" {
			assert.Positive(t, row.Value, row.Name)
		}
	}
	var text strings.Builder
	require.NoError(t, report.WriteText(&text))
	assert.Contains(t, text.String(), "peer fill, 2 MiB pages")
}
