package peers

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// TestMain is also the program that some tests start as a system: it then
// does what MEMBRANE_PEERS_TEST says instead of testing.
func TestMain(m *testing.M) {
	switch os.Getenv("MEMBRANE_PEERS_TEST") {
	case "bare":
		_ = ServeBare(os.Stdin, os.Stdout)
		return
	case "empty":
		_ = ServeEmpty(os.Stdin, os.Stdout)
		return
	}
	// fasthttp keeps a clock for the life of the process.
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*HostClient).connsCleaner"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*Client).mCleaner"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*TCPDialer).tcpAddrsClean"))
}
