package mesh

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"membrane/cache"
	"membrane/kvwire"
)

// Store is the part of [cache.Cache] that the mesh uses.
type Store interface {
	// Lookup returns the space of a tenant and namespace, nil if there is none.
	Lookup(tenant string, ns kvwire.Namespace) *cache.Space
	// Subscribe and Range feed the directory.
	Subscribe(fn func(cache.Event)) (cancel func())
	Range(fn func(kvwire.PageKey, kvwire.Form) bool)
}

var _ Store = (*cache.Cache)(nil)

// Config says who this node is, where it listens and how it finds others.
type Config struct {
	// NodeID is this node's name, never used before by another process: pod
	// name and a random suffix. Letters, digits, '-', '_' and '.', at most 100
	// bytes.
	NodeID string
	// ClusterName keeps meshes apart that can reach each other. Up to 255
	// bytes; nodes with another name are not heard.
	ClusterName string
	// GossipAddr and DataAddr are HOST:PORT to listen on; port 0 takes a free
	// one.
	GossipAddr string
	DataAddr   string
	// AdvertiseHost is the IP or name that others reach us at. Empty: the
	// hosts of GossipAddr and DataAddr, which then must be definite.
	AdvertiseHost string
	// HTTPAddr is what others are told about our HTTP listener.
	HTTPAddr string
	// Role and Version are shown to others. Role is "both" if empty.
	Role    string
	Version string
	// Join lists gossip addresses, HOST[:PORT]; a name stands for all its
	// addresses. Tried for ever.
	Join []string
	// Peers lists HTTP listeners, HOST:PORT, that are asked for their gossip
	// address. Tried for ever.
	Peers []string
	// ClusterKey is what peers prove to each other. It may be empty on
	// loopback only.
	ClusterKey []byte
	// GossipKey encrypts gossip: 16, 24 or 32 bytes, or none.
	GossipKey []byte
	// Logger gets what a person should know; gossip's own lines at debug.
	Logger zerolog.Logger
	// Store is the local cache.
	Store Store
	// Manifests are what peers may ask for by handle; nil if none.
	Manifests Manifests
	// Forms returns a descriptor of each form that is known here of a namespace,
	// for peers that ask; nil if none is.
	Forms func(kvwire.Namespace) []kvwire.Descriptor
	// Queues returns how many prompts wait here for prefill and how many requests
	// for decode, for peers that ask; nil: none do.
	Queues func() (prefill, decode int)

	// FillTimeout bounds a fill whose context has no deadline. Default 2 s.
	FillTimeout time.Duration
	// MaxFills is the most pulls at a time, half of them from one peer. Default 32.
	MaxFills int
	// MaxDataConns is the most connections that the data port accepts at a
	// time. Default 512.
	MaxDataConns int
	// DirectoryWait is how long a peer may put off its answer while its
	// directory does not change; it is jittered by a quarter. Default 2 s.
	DirectoryWait time.Duration
	// IdleTimeout closes a data connection without requests. Default 2 min.
	IdleTimeout time.Duration
	// TagPause is the least time between two changes of this node's tags.
	// Default 30 s, or N/3 s in a mesh of more than 90 nodes.
	TagPause time.Duration
}

const (
	maxNodeID     = 100 // leaves room for the suffix after a rebuild
	defaultGossip = 7946
)

func (c Config) fill() (Config, error) {
	if c.NodeID == "" || len(c.NodeID) > maxNodeID || strings.Trim(c.NodeID, nameChars) != "" {
		return c, fmt.Errorf("cannot make mesh with NodeID %q: not 1 to %d letters, digits, '-', '_' and '.'", c.NodeID, maxNodeID)
	}
	if len(c.ClusterName) > 255 {
		return c, fmt.Errorf("cannot make mesh with ClusterName of %d bytes: above 255", len(c.ClusterName))
	}
	for _, a := range []struct{ name, addr string }{{"GossipAddr", c.GossipAddr}, {"DataAddr", c.DataAddr}} {
		host, port, err := net.SplitHostPort(a.addr)
		if err != nil {
			return c, fmt.Errorf("cannot make mesh with %s %q: %w", a.name, a.addr, err)
		}
		if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
			return c, fmt.Errorf("cannot make mesh with %s %q: port is not 0 to 65535", a.name, a.addr)
		}
		if ip := net.ParseIP(host); c.AdvertiseHost == "" && (host == "" || ip != nil && ip.IsUnspecified()) {
			return c, fmt.Errorf("cannot make mesh with %s %q: it listens everywhere, so AdvertiseHost must say where others reach it", a.name, a.addr)
		}
	}
	switch len(c.GossipKey) {
	case 0, 16, 24, 32:
	default:
		return c, fmt.Errorf("cannot make mesh with GossipKey of %d bytes: not 16, 24 or 32", len(c.GossipKey))
	}
	if c.Store == nil {
		return c, fmt.Errorf("cannot make mesh without Store")
	}
	if c.Role == "" {
		c.Role = "both"
	}
	for _, d := range []struct {
		name  string
		value *time.Duration
		def   time.Duration
	}{
		{"FillTimeout", &c.FillTimeout, 2 * time.Second},
		{"DirectoryWait", &c.DirectoryWait, 2 * time.Second},
		{"IdleTimeout", &c.IdleTimeout, 2 * time.Minute},
	} {
		if *d.value == 0 {
			*d.value = d.def
		}
		if *d.value < 0 || *d.value > time.Hour {
			return c, fmt.Errorf("cannot make mesh with %s %v: not above 0 and at most 1h", d.name, *d.value)
		}
	}
	c.DirectoryWait = min(c.DirectoryWait, kvwire.MaxDirectoryWaitUS*time.Microsecond/2)
	for _, n := range []struct {
		name  string
		value *int
		def   int
	}{{"MaxFills", &c.MaxFills, 32}, {"MaxDataConns", &c.MaxDataConns, 512}} {
		if *n.value == 0 {
			*n.value = n.def
		}
		if *n.value < 1 {
			return c, fmt.Errorf("cannot make mesh with %s %d: below 1", n.name, *n.value)
		}
	}
	return c, nil
}

const nameChars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."

// loopback reports whether gossip stays on this machine.
func (c Config) loopback() bool {
	host, _, _ := net.SplitHostPort(c.GossipAddr)
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// advertised returns HOST:PORT for others, given where a listener is bound.
func (c Config) advertised(bound net.Addr) string {
	if c.AdvertiseHost == "" {
		return bound.String()
	}
	_, port, _ := net.SplitHostPort(bound.String())
	return net.JoinHostPort(c.AdvertiseHost, port)
}
