package mesh

import (
	"flag"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	flag.Parse()
	// These tests mostly wait for gossip, so more of them than CPUs may run.
	if f := flag.Lookup("test.parallel"); f != nil {
		_ = f.Value.Set("8")
	}
	goleak.VerifyTestMain(m)
}
