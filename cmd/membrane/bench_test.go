package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/bench/capacity"
	"membrane/bench/replay"
)

func TestReplayOfAWorkloadAndAFile(t *testing.T) {
	common := []string{"bench", "replay", "--fractions=0.2", "--policies=membrane,lru"}
	text := runOK(t, append(common, "--workload=chat", "--requests=200")...)
	assert.Contains(t, text, "chat")

	file := filepath.Join(t.TempDir(), "trace.jsonl")
	var lines strings.Builder
	for i := range 120 {
		fmt.Fprintf(&lines, `{"timestamp": %d, "input_length": 1024, "output_length": 8, "hash_ids": [0, %d]}`+"\n", i, i+1)
	}
	require.NoError(t, os.WriteFile(file, []byte(lines.String()), 0o600))
	var report replay.Report
	out := runOK(t, append(common, "--trace", file, "--format=mooncake", "--json")...)
	require.NoError(t, json.Unmarshal([]byte(lastObject(out)), &report))
	require.Len(t, report.Traces, 1)
	assert.Equal(t, "trace", report.Traces[0].Name)
	folder := filepath.Join(t.TempDir(), "out")
	assert.Contains(t, runOK(t, append(common, "--trace", file, "--markdown", "--out", folder)...), "| membrane |")
	for _, name := range []string{"replay.txt", "replay.json", "replay.md"} {
		assert.FileExists(t, filepath.Join(folder, name))
	}
}

func TestCapacityInThisProcess(t *testing.T) {
	var report capacity.Report
	out := runOK(t, "bench", "capacity", "--in-process", "--rounds=1", "--each=1ms", "--json")
	require.NoError(t, json.Unmarshal([]byte(lastObject(out)), &report))
	assert.Len(t, report.InProcess, 3)
	assert.Nil(t, report.Cluster)
}

// lastObject returns the JSON object that ends a text after lines for a person.
func lastObject(text string) string {
	for i := range text {
		if text[i] == '{' && (i == 0 || text[i-1] == '\n') {
			return text[i:]
		}
	}
	return text
}

func TestMistakesInBenchmarksAreTheCallers(t *testing.T) {
	for _, line := range []struct {
		args []string
		want string
	}{
		{[]string{"replay", "--output=xml"}, `--output "xml"`},
		{[]string{"replay", "--format=csv"}, `--format "csv"`},
		{[]string{"replay", "--requests=-1"}, "--requests -1"},
		{[]string{"replay", "--workload=none-such"}, `--workload "none-such"`},
		{[]string{"replay", "--trace=/no/such/file"}, "--trace: open /no/such/file"},
		{[]string{"peers", "--cells=("}, `--cells "("`},
		{[]string{"peers", "--rounds=0"}, "--rounds 0"},
		{[]string{"peers", "--duration=-1s"}, "--duration -1s"},
		{[]string{"capacity", "--rounds=0"}, "--rounds 0"},
		{[]string{"capacity", "--each=2h"}, "--each 2h0m0s"},
	} {
		_, err := run(t.Context(), append([]string{"bench"}, line.args...)...)
		require.ErrorContains(t, err, line.want)
		assert.Equal(t, exitUsage, statusOf(err), line.args)
	}
}
