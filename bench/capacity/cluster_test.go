package capacity

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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
