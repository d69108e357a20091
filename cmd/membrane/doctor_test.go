package main

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestDoctorSaysWhatIsWrong(t *testing.T) {
	out, err := run(t.Context(), "doctor", "--engine", filepath.Join(t.TempDir(), "none.sock"))
	assert.ErrorContains(t, err, "there is no engine socket at")
	assert.Equal(t, exitFailed, statusOf(err))
	assert.Empty(t, out)
	for _, args := range [][]string{{"--engine="}, {"--timeout=0s"}, {"x"}} {
		_, err := run(t.Context(), append([]string{"doctor"}, args...)...)
		assert.Equal(t, exitUsage, statusOf(err), "%v", err)
	}
	help := runOK(t, "doctor", "--help")
	assert.Contains(t, help, "membrane doctor --engine /run/membrane/engine.sock")
}
