package capacity

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// The client with which nodes are asked for their peers cleans up in its own time.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*HostClient).connsCleaner"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*Client).mCleaner"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*TCPDialer).tcpAddrsClean"))
}

func TestReportsJudgeOnlyWhatHadItsProcessors(t *testing.T) {
	r := Report{
		Predecessor: Predecessor,
		InProcess: []InProcess{
			{Operation: Operation{Name: "has"}, One: 5e6, Two: 9.5e6, Scaling: 1.9, Got: 0.99},
			{Operation: Operation{Name: "view"}, One: 5e6, Two: 5e6, Scaling: 1, Got: 0.99},
			{Operation: Operation{Name: "lookup"}, One: 5e6, Two: 5e6, Scaling: 1, Got: 0.5},
		},
		Cluster: &Cluster{Share: 0.2, Small: 100, Large: 165, Scaling: 1.65, Got: 0.95},
	}
	assert.Equal(t, []string{"view"}, r.Missed())
	r.Cluster.Scaling = 1.5
	assert.Equal(t, []string{"view", "clusters"}, r.Missed())
	r.Cluster.Why = "no group"
	assert.Equal(t, []string{"view"}, r.Missed())
	var text, markdown, object bytes.Buffer
	require.NoError(t, r.WriteText(&text))
	require.NoError(t, r.WriteMarkdown(&markdown))
	require.NoError(t, r.WriteJSON(&object))
	for _, want := range []string{"8.1 million", "not run: no group", "not judged: it had 50 %"} {
		assert.Contains(t, text.String(), want)
		assert.Contains(t, markdown.String(), want)
	}
	var back Report
	require.NoError(t, json.Unmarshal(object.Bytes(), &back))
	assert.Equal(t, r.Cluster, back.Cluster)
}

// Real sidecars in one mesh, limited where this machine lets them be.
func TestClustersOfRealSidecars(t *testing.T) {
	binary := os.Getenv("MEMBRANE_BIN")
	if binary == "" {
		t.Skip("MEMBRANE_BIN is not set: make test sets it")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	c, err := RunCluster(ctx, binary, 1, 500*time.Millisecond, func(s string) { t.Log(s) })
	require.NoError(t, err)
	if c.Why != "" {
		assert.Zero(t, c.Small)
		return
	}
	assert.Positive(t, c.Small)
	assert.Positive(t, c.Large)
	assert.InDelta(t, 0.6, c.Got, 0.6, "nodes keep to their shares")
}

func TestGroupThatCannotBeMade(t *testing.T) {
	s := &share{root: filepath.Join(t.TempDir(), "no", "group")}
	require.Error(t, s.make("/nowhere"))
	require.ErrorContains(t, s.put(1, 0.2), "cannot make a control group")
	assert.Error(t, s.close())
}
