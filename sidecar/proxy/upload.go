package proxy

import (
	"io"
	"sync"
	"time"

	"github.com/valyala/fasthttp"
)

// upload is a request's body on its way to the engine. net/http may read it on
// while the answer comes, and after that: then it must be fasthttp's no more.
type upload struct {
	c    *fasthttp.RequestCtx
	from io.Reader

	mu       sync.Mutex
	detached bool
}

// Read reads on until detach.
func (u *upload) Read(p []byte) (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.detached {
		return 0, io.ErrClosedPipe
	}
	return u.from.Read(p)
}

// detach ends a read that waits for the client; the connection is of no more
// use then.
func (u *upload) detach() {
	if !u.mu.TryLock() {
		u.c.SetConnectionClose()
		_ = u.c.Conn().SetReadDeadline(time.Unix(1, 0))
		u.mu.Lock()
	}
	u.detached = true
	u.mu.Unlock()
}
