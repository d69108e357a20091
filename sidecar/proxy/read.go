package proxy

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"github.com/valyala/fasthttp"
)

// smallBody is read into without asking for room.
const smallBody = 64 << 10

var errManyBodies = errors.New("too many large bodies at a time")

// readBody reads the body of a completion as its bytes come: what a client has
// only announced takes no memory. It has answered when ok is false. The bytes
// are valid until the handler returns.
func (s *Server) readBody(f *flight) (body []byte, ok bool) {
	body, err := s.receive(f)
	if err != nil {
		s.refuseBody(f, err)
		return nil, false
	}
	return body, true
}

// refuseBody answers for a body that does not come as it should.
func (s *Server) refuseBody(f *flight, err error) {
	var timeout net.Error
	switch {
	case errors.Is(err, fasthttp.ErrBodyTooLarge):
		s.refuse(f, "too_large", http.StatusRequestEntityTooLarge, "invalid_request_error", "body", fmt.Sprintf("a body has at most %d bytes", MaxBody))
	case errors.Is(err, errManyBodies):
		s.refuse(f, "saturated", http.StatusServiceUnavailable, "saturated", "", fmt.Sprintf("bodies of %d bytes are on their way, which is the most", maxBodies))
	case errors.As(err, &timeout) && timeout.Timeout():
		s.refuse(f, "bad_body", http.StatusRequestTimeout, "invalid_request_error", "body", "the body did not arrive in time")
	default:
		s.refuse(f, "bad_body", http.StatusBadRequest, "invalid_request_error", "body", "the body is cut off or is not chunked as it says")
	}
	f.c.SetConnectionClose() // the rest of the body may still come
}

func (s *Server) receive(f *flight) (b []byte, err error) {
	c := f.c
	if c.Request.Header.ContentLength() > MaxBody {
		return nil, fasthttp.ErrBodyTooLarge
	}
	r := c.RequestBodyStream()
	if r == nil {
		return c.Request.Body(), nil
	}
	b = (*f.buffers.read)[:0]
	// One more than announced, so that the end is seen without another round.
	if first := min(max(c.Request.Header.ContentLength(), 4<<10), smallBody) + 1; cap(b) < first {
		b = make([]byte, 0, first)
	}
	defer func() { f.buffers.keep(f.buffers.read, b) }()
	for {
		if len(b) > MaxBody {
			return nil, fasthttp.ErrBodyTooLarge
		}
		if len(b) == cap(b) {
			n := min(2*cap(b), MaxBody+1)
			more := max(int64(n)-f.taken.Load(), 0)
			if !s.bodies.TryAcquire(more) {
				return nil, errManyBodies
			}
			f.taken.Add(more)
			b = append(make([]byte, 0, n), b...)
		}
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if errors.Is(err, io.EOF) {
			return b, nil
		}
		if err != nil {
			return nil, err
		}
	}
}
