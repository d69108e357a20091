package bench

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestEveryWayOfAFirstTokenIsMeasured(t *testing.T) {
	python := fakePython(t, "")
	opts := VLLMOptions{Python: python, LMCache: python, settle: 50 * time.Millisecond}
	f, err := measureVLLM(deadline(t), opts, realBinary(t), t.TempDir(), 2, func(line string) { t.Log(line) })
	require.NoError(t, err)
	for _, s := range []samples{f.cold, f.missed, f.filled, f.baseline, f.local, f.peer, f.lmcache, f.overhead} {
		assert.Len(t, s, 2)
	}
	for _, share := range f.overhead {
		assert.Positive(t, share)
	}
}

func TestAMeasurementThatIsNotWhatItSaysIsRefused(t *testing.T) {
	for fault, want := range map[string]string{
		"tokens":  "tokens differ",
		"promise": "tokens cached, not",
		"boot":    "vllm-membrane ended before it was ready",
	} {
		t.Run(fault, func(t *testing.T) {
			opts := VLLMOptions{Python: fakePython(t, fault), settle: 50 * time.Millisecond, Logs: t.TempDir()}
			_, err := measureVLLM(deadline(t), opts, realBinary(t), t.TempDir(), 1, func(string) {})
			assert.ErrorContains(t, err, want)
		})
	}
}

func TestTheConnectorsPackageMustBeThere(t *testing.T) {
	opts := VLLMOptions{Python: fakePython(t, ""), Connector: t.TempDir()}
	_, err := measureVLLM(deadline(t), opts, "/bin/false", t.TempDir(), 1, func(string) {})
	assert.ErrorContains(t, err, "cannot find the package membrane_kv")
	opts = VLLMOptions{Python: "/bin/false"}
	_, err = measureVLLM(deadline(t), opts, "/bin/false", t.TempDir(), 1, func(string) {})
	assert.ErrorContains(t, err, "cannot make the model")
}
