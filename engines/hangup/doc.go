// Package hangup notices that an HTTP client has gone away while its request
// is under way, which fasthttp does not tell: nobody reads a connection while a
// handler runs.
//
// It owns looking at the raw connection. It does not own what is given up then.
package hangup
