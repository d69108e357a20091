package proxy

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"

	"membrane/sidecar/auth"
	"membrane/sidecar/roles"
)

// Limits on what comes from outside, and defaults.
const (
	// MaxBody is the longest body of a completion request, in bytes; longer
	// ones are refused with status 413.
	MaxBody = 16 << 20
	// MaxHeaders is the longest head of a request, in bytes (431).
	MaxHeaders = 32 << 10
	// MaxPrefillAnswer is the longest answer of a prefill pod, in bytes, and
	// MaxTransferParams the longest kv_transfer_params in one. Longer ones
	// count as failed prefills.
	MaxPrefillAnswer  = 4 << 20
	MaxTransferParams = 1 << 20
	// MaxTokenizeAnswer is the longest answer of /tokenize, in bytes; a longer
	// one counts as none.
	MaxTokenizeAnswer = 16 << 20

	// DefaultThreshold is how many tokens a prompt must have that nobody holds
	// for it to be prefilled by another pod.
	DefaultThreshold = 1024
	// DefaultPrefillTimeout bounds the attempts to prefill elsewhere, together.
	DefaultPrefillTimeout = 60 * time.Second
	// DefaultMaxInFlight is how many requests may be under way.
	DefaultMaxInFlight = 1024

	tokenizeTimeout = 20 * time.Millisecond
	maxBodies       = 256 << 20 // of completion requests, all together
)

// Pod is a node whose serving port may be asked to prefill.
type Pod struct {
	// Name is the node's in the mesh, "" for one that is only configured.
	Name string
	// Addr is HOST:PORT of its serving port.
	Addr string
	// Role says which phases it serves.
	Role roles.Role
	// Suspect pods do not answer at the moment and are not asked.
	Suspect bool
}

// Prefix is what the cluster holds of one prompt. Its methods are called by one
// goroutine at a time.
type Prefix interface {
	// Here returns how many leading tokens this node holds.
	Here() int
	// At returns how many the pod of that name seems to hold.
	At(pod string) int
	// Follow loads pages as the pod's engine makes them, until all are here or
	// ctx ends.
	Follow(ctx context.Context, pod string)
	// Fetch loads what this node lacks and the pod has into the cache, by the
	// end of ctx, and returns how many leading tokens are here then.
	Fetch(ctx context.Context, pod string) int
}

// Cache is the part of the sidecar's cache that the proxy looks at. There is a
// second implementation in tests.
type Cache interface {
	// Prefix looks up a prompt under a cache salt; nil when no engine has
	// registered.
	Prefix(salt string, tokens []uint32) Prefix
	// PinsFull reports whether hand-overs and leases hold as much as they may.
	PinsFull() bool
}

// Config is what the proxy needs. Fields without a default are required.
type Config struct {
	// Engine is the base URL of this pod's engine, http://HOST:PORT.
	Engine string
	// Keys are asked for on every route but /health; nil leaves all open.
	Keys *auth.Keys
	// ClusterKey makes cache salts. All nodes of a mesh have the same; it may
	// be empty on loopback only.
	ClusterKey []byte
	// Threshold is how many tokens that nobody holds make a prompt worth
	// another pod's prefill. 0 keeps every prefill here.
	Threshold int
	// PrefillTimeout bounds all attempts to prefill elsewhere. Default
	// [DefaultPrefillTimeout].
	PrefillTimeout time.Duration
	// MaxInFlight is how many requests may be under way. Default
	// [DefaultMaxInFlight].
	MaxInFlight int
	// Pods returns the other nodes that have a serving port and are not known
	// to be gone. Nobody changes the list.
	Pods func() []Pod
	// Role returns this node's role now.
	Role func() roles.Role
	// Cache tells what is held where.
	Cache   Cache
	Metrics *metrics.Set
	Log     zerolog.Logger

	tokenizeTimeout time.Duration // longer in tests
	readTimeout     time.Duration // shorter in tests, as the next
	writeTimeout    time.Duration
}

// CheckEngineURL reports whether a URL can be an engine's: http, a host, no
// path, query or user.
func CheckEngineURL(text string) error {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return err
	case u.Scheme != "http" && u.Scheme != "https":
		return fmt.Errorf("does not begin with http:// or https://")
	case u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("is not http://HOST:PORT")
	}
	return nil
}

func (c Config) fill() (Config, error) {
	if c.PrefillTimeout == 0 {
		c.PrefillTimeout = DefaultPrefillTimeout
	}
	if c.MaxInFlight == 0 {
		c.MaxInFlight = DefaultMaxInFlight
	}
	if c.tokenizeTimeout == 0 {
		c.tokenizeTimeout = tokenizeTimeout
	}
	if c.readTimeout == 0 {
		c.readTimeout = readTimeout
	}
	if c.writeTimeout == 0 {
		c.writeTimeout = writeTimeout
	}
	if err := CheckEngineURL(c.Engine); err != nil {
		return c, fmt.Errorf("cannot make the serving proxy with Engine %q: %w", c.Engine, err)
	}
	switch {
	case c.Threshold < 0:
		return c, fmt.Errorf("cannot make the serving proxy with Threshold %d: it is negative", c.Threshold)
	case c.PrefillTimeout < 0:
		return c, fmt.Errorf("cannot make the serving proxy with PrefillTimeout %v: it is negative", c.PrefillTimeout)
	case c.MaxInFlight < 1:
		return c, fmt.Errorf("cannot make the serving proxy with MaxInFlight %d: it is below 1", c.MaxInFlight)
	case c.Pods == nil || c.Role == nil || c.Cache == nil || c.Metrics == nil:
		return c, errors.New("cannot make the serving proxy: a field of its configuration is nil")
	}
	return c, nil
}
