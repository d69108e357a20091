package peers

import (
	"bufio"
	"encoding/json"
	"fmt"
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
	if os.Getenv("MEMBRANE_PEERS_TEST") == "helper" {
		fakeHelper()
		return
	}
	// fasthttp keeps a clock for the life of the process.
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*HostClient).connsCleaner"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*Client).mCleaner"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*TCPDialer).tcpAddrsClean"))
}

// fakeHelper answers as helper.py does, and refuses batches.
func fakeHelper() {
	scan := bufio.NewScanner(os.Stdin)
	for scan.Scan() {
		var c struct {
			Do      string
			Path    string
			Count   int
			Size    int
			Streams int
			Batch   int
			Seconds float64
		}
		_ = json.Unmarshal(scan.Bytes(), &c)
		switch {
		case c.Do == "load":
			b, err := os.ReadFile(c.Path)
			if err != nil || len(b) != c.Count*c.Size {
				fmt.Printf("{\"error\": \"%d bytes, %v\"}\n", len(b), err)
				continue
			}
			fmt.Println("{}")
		case c.Batch > 1:
			fmt.Println(`{"error": "one at a time"}`)
		default:
			fmt.Println(`{"bytes": 1000000000, "ops": 10, "hits": 10, "elapsed": 0.5, "latencies": [0.001, 0.002]}`)
		}
	}
}
