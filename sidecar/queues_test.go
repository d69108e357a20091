package sidecar

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/sidecar/roles"
)

func TestQueuesOfAutoNodesAreMeasuredAndShown(t *testing.T) {
	t.Parallel()
	auto := func(name string, peers ...string) *running {
		s := testSettings(t, name)
		s.Role, s.PrefillRatio, s.Peers = roles.Auto, RatioAuto, peers
		return run(t, s)
	}
	a := auto("a")
	b := auto("b", a.Addresses().HTTP)
	s := testSettings(t, "fixed")
	s.Peers = List{a.Addresses().HTTP}
	fixed := run(t, s)
	var got []roles.Measured
	require.Eventually(t, func() bool {
		got = b.measureQueues(context.Background())
		return len(got) == 2
	}, timeout, tick)
	assert.Equal(t, []roles.Measured{{Role: roles.RoleBoth}, {Role: roles.RoleBoth}}, got, "the fixed node is none of them")
	_, peers := b.get(t, "/peers")
	assert.Equal(t, map[string]any{"prefill": 0.0, "decode": 0.0}, peers["self"].(map[string]any)["queues"])
	for _, p := range peers["peers"].([]any) {
		peer := p.(map[string]any)
		_, known := peer["queues"]
		assert.Equal(t, peer["node_id"] == "a", known, "%v", peer)
	}
	_, status := b.get(t, "/statusz")
	role := status["role"].(map[string]any)
	assert.InDelta(t, 0.5, role["prefill_ratio"], 0)
	assert.Contains(t, role["balance"], "queue_prefill")
	var metrics bytes.Buffer
	b.writeMetrics(&metrics)
	for _, name := range []string{"membrane_prefill_ratio 0.5\n", `membrane_queue_length{phase="prefill"} 0`, `membrane_balance_queue{phase="decode"} 0`, "membrane_balance_steps_total 0"} {
		assert.Contains(t, metrics.String(), name)
	}
	assert.Equal(t, "queues 0.0:0.0", b.ratioWhy())
	_, status = fixed.get(t, "/statusz")
	assert.NotContains(t, status["role"], "prefill_ratio")
	assert.Empty(t, fixed.ratioWhy())
	assert.InDelta(t, 0.5, fixed.prefillRatio(), 0)
}

func TestRatiosAreRead(t *testing.T) {
	t.Parallel()
	var r Ratio
	require.NoError(t, r.Set("auto"))
	assert.Equal(t, RatioAuto, r)
	assert.Equal(t, "auto", r.String())
	require.NoError(t, r.Set("0.25"))
	assert.InDelta(t, 0.25, float64(r), 0)
	assert.Equal(t, "0.25", r.String())
	for _, bad := range []string{"half", "-1", ""} {
		assert.ErrorContains(t, r.Set(bad), "neither", bad)
	}
}
