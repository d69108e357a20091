package httpapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"membrane/kvwire"
)

const (
	// MaxBody is the longest body of a request, in bytes: the longest prompt
	// in decimal, with room for spaces.
	MaxBody = 4 << 20

	smallBody = 64 << 10
	maxBodies = 32 << 20 // of bodies above smallBody, all together
	maxHeavy  = 2        // requests at a time that are being decoded, or list everything
)

var errManyBodies = errors.New("too many large bodies at a time")

// body reads the body of a request as its bytes come: what a client has only
// announced takes no memory. Taken is to be given back to s.bodies, also after
// an error.
func (s *Server) body(c *fasthttp.RequestCtx) (b []byte, taken int64, err error) {
	if c.Request.Header.ContentLength() > MaxBody {
		return nil, 0, fasthttp.ErrBodyTooLarge
	}
	r := c.RequestBodyStream()
	if r == nil {
		return c.Request.Body(), 0, nil
	}
	b = make([]byte, 0, 4<<10)
	for {
		if len(b) > MaxBody {
			return nil, taken, fasthttp.ErrBodyTooLarge
		}
		if len(b) == cap(b) {
			n := min(2*cap(b), MaxBody+1)
			if n > smallBody {
				more := int64(n) - taken
				if !s.bodies.TryAcquire(more) {
					return nil, taken, errManyBodies
				}
				taken += more
			}
			b = append(make([]byte, 0, n), b...)
		}
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if errors.Is(err, io.EOF) {
			return b, taken, nil
		}
		if err != nil {
			return nil, taken, err
		}
	}
}

func (s *Server) refuseBody(c *fasthttp.RequestCtx, err error) {
	var timeout net.Error
	switch {
	case errors.Is(err, fasthttp.ErrBodyTooLarge):
		fail(c, http.StatusRequestEntityTooLarge, "too_large", "body", fmt.Sprintf("a body has at most %d bytes", MaxBody))
	case errors.Is(err, errManyBodies):
		unavailable(c, "busy", fmt.Sprintf("bodies of %d bytes are on their way, which is the most", maxBodies), time.Second)
	case errors.As(err, &timeout) && timeout.Timeout():
		fail(c, http.StatusRequestTimeout, "timeout", "body", "the body did not arrive in time")
	default:
		fail(c, http.StatusBadRequest, "bad_request", "body", "the body is cut off or is not chunked as it says")
	}
	c.SetConnectionClose() // the rest of the body may still come
}

// decode reads a JSON object from the body. What is no JSON is a 400; what is
// JSON of another shape is a 422.
func (s *Server) decode(c *fasthttp.RequestCtx, v any) bool {
	body, taken, err := s.body(c)
	defer func() { s.bodies.Release(taken) }()
	if err != nil {
		s.refuseBody(c, err)
		return false
	}
	s.heavy <- struct{}{}
	defer func() { <-s.heavy }()
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	err = d.Decode(v)
	if err == nil {
		if _, err := d.Token(); !errors.Is(err, io.EOF) {
			fail(c, http.StatusBadRequest, "bad_request", "body", "something follows the JSON object")
			return false
		}
		return true
	}
	var wrong *json.UnmarshalTypeError
	switch field, unknown := strings.CutPrefix(err.Error(), "json: unknown field "); {
	case errors.As(err, &wrong):
		fail(c, http.StatusUnprocessableEntity, kvwire.CodeBadField.String(), wrong.Field, fmt.Sprintf("a %s is not allowed here", wrong.Value))
	case unknown:
		name, _ := strconv.Unquote(field)
		fail(c, http.StatusUnprocessableEntity, kvwire.CodeBadField.String(), clip(name), "is not a field of this request")
	default:
		fail(c, http.StatusBadRequest, "bad_request", "body", "the body is not JSON: "+err.Error())
	}
	return false
}
