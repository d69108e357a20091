package bench

import (
	"fmt"
	"io"
	"net"

	"github.com/valyala/fasthttp"
)

// completionAnswer is what the engine of the benchmark says to every request.
const completionAnswer = `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"a","finish_reason":"length"}],"usage":{"prompt_tokens":64,"completion_tokens":1,"total_tokens":65}}`

// ReverseProxy listens on a free loopback port, prints the address, and passes
// every request to the server at to (HOST:PORT) until stdin ends. It does
// nothing else, and is what a proxy that does more is measured beside. Without
// to it answers everything with one completion, as an engine that needs no time.
func ReverseProxy(stdin io.Reader, stdout io.Writer, to string) error {
	upstream := fasthttp.HostClient{Addr: to, MaxConns: 1024}
	s := fasthttp.Server{Handler: func(c *fasthttp.RequestCtx) {
		if to == "" {
			c.SetContentType("application/json")
			c.SetBodyString(completionAnswer)
			return
		}
		c.Request.Header.Del(fasthttp.HeaderConnection)
		if err := upstream.Do(&c.Request, &c.Response); err != nil {
			c.Error(err.Error(), fasthttp.StatusBadGateway)
		}
		c.Response.Header.Del(fasthttp.HeaderConnection)
	}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("cannot listen: %w", err)
	}
	fmt.Fprintln(stdout, l.Addr())
	go func() {
		_, _ = io.Copy(io.Discard, stdin)
		_ = s.Shutdown()
	}()
	return s.Serve(l)
}
