package sidecar

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/rs/zerolog"

	"membrane/cache"
	"membrane/mesh"
	"membrane/sidecar/disagg"
	"membrane/sidecar/engineport"
	"membrane/sidecar/forms"
	"membrane/sidecar/fragments"
	"membrane/sidecar/grpcapi"
	"membrane/sidecar/httpapi"
	"membrane/sidecar/lm"
	"membrane/sidecar/proxy"
	"membrane/sidecar/resp"
	"membrane/sidecar/roles"
)

// Sidecar is a node: its cache, its part of the mesh and its listeners.
type Sidecar struct {
	settings Settings
	version  string
	log      zerolog.Logger
	started  time.Time
	set      *metrics.Set

	cache     *cache.Cache
	mesh      *mesh.Mesh
	roles     *roles.Keeper
	queues    queues
	engines   *engineport.Server
	fragments *fragments.Service
	disagg    *disagg.Service
	http      *httpapi.Server
	resp      *resp.Server    // nil without a listener
	lm        *lm.Server      // nil without a listener
	grpc      *grpcapi.Server // nil without a listener
	proxy     *proxy.Server   // nil without a listener

	httpTCP                     net.Listener
	engineTCP, respTCP, grpcTCP net.Listener // may be nil
	lmTCP, serveTCP             net.Listener // may be nil
	httpUnix, engineSocket      *net.UnixListener

	ready chan struct{}
	now   chan struct{} // closed by StopNow
	undo  []func() error
}

// New opens everything that the settings ask for and serves nothing yet. An
// error of the settings is a [*SettingError]; after any error nothing is left
// open. Version is shown to engines, peers and people.
func New(s Settings, version string, log zerolog.Logger) (*Sidecar, error) {
	if s.sources == nil {
		s.sources = make(map[string]string)
	}
	if err := s.Validate(); err != nil {
		return nil, err
	}
	keys, err := readSecrets(&s)
	if err != nil {
		return nil, err
	}
	for _, w := range s.warnings() {
		log.Warn().Msg(w)
	}
	n := &Sidecar{
		settings: s, version: version, log: log, started: time.Now(), set: metrics.NewSet(),
		ready: make(chan struct{}), now: make(chan struct{}),
	}
	if err := n.open(keys); err != nil {
		return nil, errors.Join(err, n.close())
	}
	return n, nil
}

// open makes the parts in the order in which they need each other.
func (n *Sidecar) open(keys secrets) error {
	s := &n.settings
	var err error
	if n.httpTCP, err = listenHTTP(s); err != nil {
		return err
	}
	n.onClose(n.httpTCP.Close)
	if s.HTTPSocket != "" {
		if n.httpUnix, err = openSocket("http-socket", s.HTTPSocket); err != nil {
			return err
		}
		n.onClose(n.httpUnix.Close)
	}
	if s.EngineAddr != engineAddrOff {
		if n.engineTCP, err = listenEngines(s, n.log); err != nil {
			return err
		}
		n.onClose(n.engineTCP.Close)
	}
	if s.RESPAddr != "" {
		if n.respTCP, err = net.Listen("tcp", s.RESPAddr); err != nil {
			return &SettingError{"resp-addr", s.RESPAddr, fmt.Sprintf("cannot listen there: %v", err)}
		}
		n.onClose(n.respTCP.Close)
	}
	if err = n.listenLM(); err != nil {
		return err
	}
	if n.grpcTCP, err = listenGRPC(s); err != nil {
		return err
	}
	if n.grpcTCP != nil {
		n.onClose(n.grpcTCP.Close)
	}
	if n.serveTCP, err = listenServe(s); err != nil {
		return err
	}
	if n.serveTCP != nil {
		n.onClose(n.serveTCP.Close)
	}
	if n.engineSocket, err = listenSocket(s, n.log); err != nil {
		return err
	}
	n.onClose(n.closeSocket)

	if n.cache, err = cache.New(cache.Config{Budget: int64(s.Memory), ClusterKey: keys.cluster}); err != nil {
		return err
	}
	n.onClose(n.cache.Close)
	manifests := &manifests{}
	known := forms.NewRegistry()
	if n.mesh, err = mesh.New(n.meshConfig(keys, manifests, known)); err != nil {
		return err
	}
	if n.roles, err = n.newRoles(); err != nil {
		return err
	}
	if n.fragments, err = fragments.New(fragments.Config{Cache: n.cache, Fill: n.mesh, Metrics: n.set}); err != nil {
		return err
	}
	n.onClose(func() error { n.fragments.Close(); return nil })
	if err := n.openDisagg(manifests); err != nil {
		return err
	}
	uids, err := s.uids()
	if err != nil {
		return err
	}
	n.engines, err = engineport.New(engineport.Config{
		Node: s.NodeID, Server: "membrane " + n.version, Cache: n.cache, Fill: n.mesh, Forms: known, PeerForms: n.mesh, Keys: keys.api, Tenant: s.EngineTenant,
		UIDs: uids, PageTokens: s.PageTokens, InboxBytes: max(int64(s.Inbox), 1), ClusterKey: keys.cluster, Metrics: n.set, Log: n.log,
	})
	if err != nil {
		return err
	}
	n.onClose(n.engines.Close)
	if n.respTCP != nil {
		if n.resp, err = resp.New(resp.Config{Cache: n.cache, Keys: keys.api, Version: n.version, Metrics: n.set, Log: n.log}); err != nil {
			return err
		}
		n.onClose(n.resp.Close)
	}
	if err = n.openLM(); err != nil {
		return err
	}
	if err = n.openProxy(keys); err != nil {
		return err
	}
	n.http, err = httpapi.New(httpapi.Config{
		NodeID: s.NodeID, Fragments: n.fragments, Disagg: n.disagg, Keys: keys.api, Peers: n.peers, Status: n.status, Summary: n.summary,
		Leave: n.leave, InFlight: n.inFlight, MeshAddress: n.mesh.Address, Metrics: n.set, WriteMetrics: n.writeMetrics, Log: n.log,
	})
	if err != nil || n.grpcTCP == nil {
		return err
	}
	n.grpc, err = grpcapi.New(grpcapi.Config{Disagg: n.disagg, Keys: keys.api, Metrics: n.set, Log: n.log})
	return err
}

func (n *Sidecar) meshConfig(keys secrets, manifests mesh.Manifests, known *forms.Registry) mesh.Config {
	s := &n.settings
	var suffix [4]byte
	_, _ = rand.Read(suffix[:]) // never fails: crypto/rand ends the process instead
	gossip := s.GossipAddr
	if _, _, err := net.SplitHostPort(gossip); err != nil {
		gossip = withPort(gossip, gossipPort)
	}
	join := make([]string, len(s.Join))
	for i, j := range s.Join {
		join[i] = withPort(j, gossipPort)
	}
	return mesh.Config{
		NodeID: s.NodeID + "-" + hex.EncodeToString(suffix[:]), ClusterName: s.ClusterName,
		GossipAddr: gossip, DataAddr: withPort(s.DataAddr, "0"), AdvertiseHost: s.AdvertiseHost, HTTPAddr: n.advertised(n.httpTCP),
		Version: n.version, Join: join, Peers: s.Peers, ClusterKey: keys.cluster, GossipKey: keys.gossip,
		Logger: n.log, Store: n.cache, Manifests: manifests, Forms: known.Descriptors, Queues: n.ownQueues,
	}
}

// advertised returns where others reach a listener.
func (n *Sidecar) advertised(l net.Listener) string {
	host, port, _ := net.SplitHostPort(l.Addr().String())
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = n.settings.AdvertiseHost
		if host == "" { // then gossip is on loopback, and so are all who hear of it
			host = "127.0.0.1"
		}
	}
	return net.JoinHostPort(host, port)
}

// closeSocket closes the engine socket and removes the directory that was made
// for it alone.
func (n *Sidecar) closeSocket() error {
	err := n.engineSocket.Close()
	if path := n.engineSocket.Addr().String(); n.settings.EngineSocket == "" && path != DefaultEngineSocket {
		_ = os.Remove(filepath.Dir(path)) // not if something else is in it
	}
	return err
}

func (n *Sidecar) onClose(f func() error) { n.undo = append(n.undo, f) }

// close undoes what open did, last first.
func (n *Sidecar) close() error {
	var all error
	for i := len(n.undo) - 1; i >= 0; i-- {
		if err := n.undo[i](); err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, cache.ErrClosed) {
			all = errors.Join(all, err)
		}
	}
	n.undo = nil
	return all
}

// Run serves until ctx ends, drains and closes everything. It is called once.
func (n *Sidecar) Run(ctx context.Context) error {
	start, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := n.mesh.Start(start); err != nil {
		if dns := (*net.DNSError)(nil); errors.As(err, &dns) && dns.Name == n.settings.AdvertiseHost {
			err = &SettingError{"advertise-host", dns.Name, "cannot be resolved: " + dns.Err}
		}
		return errors.Join(err, n.close())
	}
	if err := errors.Join(n.engines.ServeSocket(n.engineSocket), n.serveEngines(), n.serveRESP(), n.serveLM()); err != nil {
		return errors.Join(err, n.mesh.Close(start), n.close())
	}
	n.http.Serve(n.httpTCP)
	if n.httpUnix != nil {
		n.http.Serve(n.httpUnix)
	}
	if n.grpc != nil {
		n.grpc.Serve(n.grpcTCP)
	}
	if n.proxy != nil {
		n.proxy.Serve(n.serveTCP)
	}
	n.banner()
	close(n.ready)
	stopRoles := n.runRoles(ctx)
	<-ctx.Done()
	stopRoles()
	return n.stop()
}

func (n *Sidecar) serveEngines() error {
	if n.engineTCP == nil {
		return nil
	}
	return n.engines.ServeTCP(n.engineTCP)
}

func (n *Sidecar) serveRESP() error {
	if n.resp == nil {
		return nil
	}
	return n.resp.Serve(n.respTCP)
}

const (
	startTimeout = 10 * time.Second
	leaveTimeout = 5 * time.Second
	drainPoll    = 10 * time.Millisecond
)

// ErrStopped is returned by Run when StopNow cut the drain short.
var ErrStopped = errors.New("stopped before the drain was done")

// StopNow ends a drain that is under way, or the next one. It is called once
// at most.
func (n *Sidecar) StopNow() { close(n.now) }

// stop refuses new work, waits for what is under way, says goodbye to the
// others, and closes everything.
func (n *Sidecar) stop() error {
	began := time.Now()
	limit := time.Duration(n.settings.DrainTimeout)
	n.log.Info().Dur("timeout", limit).Int("in_flight", n.inFlight()).Msg("draining")
	n.http.Drain()
	if n.grpc != nil {
		n.grpc.Drain()
	}
	if n.proxy != nil {
		n.proxy.Drain()
	}
	n.engines.Drain()
	if n.resp != nil {
		n.resp.Drain()
	}
	if n.lm != nil {
		n.lm.Drain()
	}
	drained, now := n.wait(limit)
	if !drained {
		n.log.Warn().Int("in_flight", n.inFlight()).Msg("not all that was under way is done")
	}
	patience := leaveTimeout
	if now {
		patience = 0
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	// Peers hear of it first; they may read until the data port closes.
	err := n.mesh.Close(ctx)
	if now {
		err = nil // no time was left to say goodbye
	}
	if e := n.http.Close(ctx); e != nil && !now {
		err = errors.Join(err, e)
	}
	if n.grpc != nil {
		if e := n.grpc.Close(ctx); e != nil && !now {
			err = errors.Join(err, e)
		}
	}
	if n.proxy != nil {
		if e := n.proxy.Close(ctx); e != nil && !now {
			err = errors.Join(err, e)
		}
	}
	err = errors.Join(err, n.close())
	n.log.Info().Dur("took", time.Since(began)).Bool("drained", drained).Msg("stopped")
	if now {
		return errors.Join(ErrStopped, err)
	}
	return err
}

// leave lets routers and peers look elsewhere, ahead of a stop.
func (n *Sidecar) leave() {
	if n.proxy != nil {
		n.proxy.Leave()
		n.mesh.SetTag(tagServe, "")
	}
}

// wait returns when nothing is under way, or after limit, or on StopNow.
func (n *Sidecar) wait(limit time.Duration) (drained, now bool) {
	ticker := time.NewTicker(drainPoll)
	defer ticker.Stop()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	for {
		if n.inFlight() == 0 {
			return true, false
		}
		select {
		case <-ticker.C:
		case <-deadline.C:
			return false, false
		case <-n.now:
			return false, true
		}
	}
}

func (n *Sidecar) inFlight() int {
	all := n.engines.InFlight() + n.http.InFlight()
	if n.resp != nil {
		all += n.resp.InFlight()
	}
	if n.lm != nil {
		all += n.lm.InFlight()
	}
	if n.grpc != nil {
		all += n.grpc.InFlight()
	}
	if n.proxy != nil {
		all += n.proxy.InFlight()
	}
	return all
}

// Ready is closed when everything serves.
func (n *Sidecar) Ready() <-chan struct{} { return n.ready }

// Addresses are where a sidecar listens.
type Addresses struct {
	HTTP         string `json:"http"`
	HTTPSocket   string `json:"http_socket,omitempty"`
	EngineSocket string `json:"engine_socket"`
	EngineAddr   string `json:"engine_addr,omitempty"`
	RESP         string `json:"resp,omitempty"`
	LM           string `json:"lm,omitempty"`
	GRPC         string `json:"grpc,omitempty"`
	Serve        string `json:"serve,omitempty"`
	Data         string `json:"data"`
	Gossip       string `json:"gossip"`
}

// Addresses returns where the sidecar listens; data and gossip once it is
// ready.
func (n *Sidecar) Addresses() Addresses {
	a := Addresses{
		HTTP: n.httpTCP.Addr().String(), EngineSocket: n.engineSocket.Addr().String(),
		Data: n.mesh.DataAddr(), Gossip: n.mesh.GossipAddr(),
	}
	if n.httpUnix != nil {
		a.HTTPSocket = n.httpUnix.Addr().String()
	}
	if n.engineTCP != nil {
		a.EngineAddr = n.engineTCP.Addr().String()
	}
	if n.respTCP != nil {
		a.RESP = n.respTCP.Addr().String()
	}
	if n.lmTCP != nil {
		a.LM = n.lmTCP.Addr().String()
	}
	if n.grpcTCP != nil {
		a.GRPC = n.grpcTCP.Addr().String()
	}
	if n.serveTCP != nil {
		a.Serve = n.serveTCP.Addr().String()
	}
	return a
}

// banner logs one line with everything that a script has to know.
func (n *Sidecar) banner() {
	a, s := n.Addresses(), &n.settings
	e := n.log.Info().Str("node", s.NodeID).Str("role", s.Role).Str("http", a.HTTP).Str("engine_socket", a.EngineSocket).Str("engine_addr", a.EngineAddr).
		Str("data", a.Data).Str("gossip", a.Gossip).Str("memory", s.Memory.String()).Int("page_tokens", s.PageTokens).
		Bool("api_keys", s.APIKeyFile != "").Bool("cluster_key", s.ClusterKeyFile != "").Str("version", n.version)
	if a.GRPC != "" {
		e = e.Str("grpc", a.GRPC)
	}
	if a.Serve != "" {
		e = e.Str("serve", a.Serve).Str("engine_url", s.EngineURL).Int("prefill_threshold", s.PrefillThreshold)
	}
	if a.HTTPSocket != "" {
		e = e.Str("http_socket", a.HTTPSocket)
	}
	if a.RESP != "" {
		e = e.Str("resp", a.RESP)
	}
	if a.LM != "" {
		e = e.Str("lm", a.LM)
	}
	if len(s.Peers)+len(s.Join) > 0 {
		e = e.Strs("peers", append(append([]string(nil), s.Peers...), s.Join...))
	}
	for name, source := range s.sources {
		if source != "flag" {
			e = e.Str("from_env_"+name, source)
		}
	}
	e.Msg("serving")
}

func (n *Sidecar) writeMetrics(w io.Writer) {
	n.set.WritePrometheus(w)
	n.writeCacheMetrics(w)
	n.writeMeshMetrics(w)
	n.writeRoleMetrics(w)
	fmt.Fprintf(w, "membrane_build_info{version=%q} 1\n", n.version)
	metrics.WriteProcessMetrics(w)
}
