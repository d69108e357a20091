package proxy

import (
	"encoding/json"
	"net/http"

	"github.com/valyala/fasthttp"
)

// problem is an error as OpenAI's and vLLM's clients read it.
type problem struct {
	Error problemBody `json:"error"`
}

type problemBody struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    int     `json:"code"`
}

func fail(c *fasthttp.RequestCtx, status int, kind, param, message string) {
	p := problem{problemBody{Message: message, Type: kind, Code: status}}
	if param != "" {
		p.Error.Param = &param
	}
	b, err := json.Marshal(p)
	if err != nil { // text that JSON does not have
		b = []byte(`{"error":{"message":"","type":"internal","param":null,"code":500}}`)
	}
	c.Response.ResetBody()
	c.Response.SetStatusCode(status)
	c.Response.Header.SetContentType("application/json")
	c.Response.SetBodyRaw(b)
}

// unavailable is a fail that says when to try again.
func unavailable(c *fasthttp.RequestCtx, status int, kind, message string) {
	c.Response.Header.Set("Retry-After", "1")
	fail(c, status, kind, "", message)
}

func (s *Server) refuse(f *flight, why string, status int, kind, param, message string) {
	s.count.refused[why].Inc()
	if status == http.StatusServiceUnavailable {
		unavailable(f.c, status, kind, message)
	} else {
		fail(f.c, status, kind, param, message)
	}
	f.end()
}
