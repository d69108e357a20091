package sidecar

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/pflag"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/sidecar/auth"
	"membrane/sidecar/disagg"
	"membrane/sidecar/proxy"
	"membrane/sidecar/roles"
)

// DefaultEngineSocket is where engines look for the sidecar.
const DefaultEngineSocket = "/run/membrane/engine.sock"

// Settings are everything that `membrane serve` can be told. [DefaultSettings]
// returns what holds where nothing is said.
type Settings struct {
	NodeID           string
	Host             string
	Port             int
	HTTPSocket       string
	EngineSocket     string // "": the default, or a place of this user's
	EngineAddr       string
	RESPAddr         string // "": none
	LMAddr           string // "": none
	LMOpen           bool
	EngineTenant     string
	EngineUIDs       List
	Memory           Size
	Inbox            Size
	PageTokens       int
	DataAddr         string
	GossipAddr       string
	AdvertiseHost    string
	Peers            List
	Join             List
	ClusterName      string
	ClusterKeyFile   string
	GossipKeyFile    string
	APIKeyFile       string
	DrainTimeout     Seconds
	Role             string
	PrefillRatio     Ratio
	HandleTTL        Seconds
	GRPCPort         int // portOff: none
	ServePort        int // portOff: none
	EngineURL        string
	PrefillThreshold int // tokens; 0: never elsewhere
	PrefillTimeout   Seconds
	ServeMax         int
	LogLevel         string
	LogFormat        string
	Daemon           bool
	engineAddrIsFree bool // not given: another port will do

	sources map[string]string // where each setting that is no default came from
}

// SettingError is a setting that cannot be: its flag, its value, and why. The
// process ends with status 2 on one.
type SettingError struct {
	Flag, Value, Reason string
}

// Error returns `--flag "value": reason`.
func (e *SettingError) Error() string {
	return fmt.Sprintf("--%s %q: %s", e.Flag, e.Value, e.Reason)
}

// WhyNot says why a flag has refused a value, in words that do not name Go's parsers.
func WhyNot(err error) string {
	var num *strconv.NumError
	switch {
	case !errors.As(err, &num):
		return err.Error()
	case errors.Is(num.Err, strconv.ErrRange):
		return "is out of range"
	case num.Func == "ParseBool":
		return "is neither true nor false"
	case num.Func == "ParseFloat":
		return "is not a number"
	}
	return "is not a whole number"
}

// DefaultSettings returns the settings of a sidecar that was told nothing.
func DefaultSettings() Settings {
	host, _ := os.Hostname()
	host = strings.Map(func(r rune) rune {
		if nameRune(r) {
			return r
		}
		return '-'
	}, host)
	if host == "" {
		host = "membrane"
	}
	return Settings{
		NodeID: host[:min(len(host), maxNodeID)], Host: "127.0.0.1", Port: 8080, EngineAddr: "127.0.0.1:7600", EngineTenant: auth.PublicTenant,
		Memory: 1 << 30, Inbox: 256 << 20, PageTokens: 64, DataAddr: "127.0.0.1:0", GossipAddr: "127.0.0.1:0",
		DrainTimeout: Seconds(30 * time.Second), Role: "both", PrefillRatio: 0.5, HandleTTL: Seconds(disagg.DefaultTTL), GRPCPort: portOff, ServePort: portOff,
		EngineURL: "http://127.0.0.1:8000", PrefillThreshold: proxy.DefaultThreshold, PrefillTimeout: Seconds(proxy.DefaultPrefillTimeout), ServeMax: proxy.DefaultMaxInFlight,
		LogLevel: "info", LogFormat: "text",
		engineAddrIsFree: true, sources: make(map[string]string),
	}
}

// option is a flag together with its environment variable.
type option struct{ flag, env string }

func (o option) variable() string {
	if o.env != "" {
		return o.env
	}
	return "MEMBRANE_" + strings.ToUpper(strings.ReplaceAll(o.flag, "-", "_"))
}

// envNames are the variables whose name does not follow from the flag's.
var envNames = map[string]string{"peer": "MEMBRANE_PEERS"}

// AddFlags adds a flag for each setting. After the command line is parsed,
// [Settings.ReadEnv] fills in what it does not say.
func (s *Settings) AddFlags(flags *pflag.FlagSet) {
	usage := func(flag, text string) string {
		return text + " (" + option{flag, envNames[flag]}.variable() + ")"
	}
	str := func(p *string, name, short, text string) { flags.StringVarP(p, name, short, *p, usage(name, text)) }
	integer := func(p *int, name, short, text string) { flags.IntVarP(p, name, short, *p, usage(name, text)) }
	value := func(p pflag.Value, name, text string) { flags.Var(p, name, usage(name, text)) }

	str(&s.NodeID, "node-id", "n", "this node's name; letters, digits, '-', '_' and '.'")
	str(&s.Host, "host", "", "where HTTP listens; beyond loopback it needs --api-key-file")
	integer(&s.Port, "port", "p", "port for HTTP, 0 for any free one")
	str(&s.HTTPSocket, "http-socket", "", "Unix socket for HTTP, too")
	str(&s.EngineSocket, "engine-socket", "", "Unix socket for engines (default "+DefaultEngineSocket+", or one in the user's runtime directory)")
	str(&s.EngineAddr, "engine-addr", "", "HOST:PORT for engines, pages inline; 'off' for none; beyond loopback it needs --api-key-file")
	str(&s.LMAddr, "lm-addr", "", "HOST:PORT for LMCache's lm:// clients (default none), who show no credential and have the --engine-tenant's values; beyond loopback it needs --lm-open")
	flags.BoolVar(&s.LMOpen, "lm-open", s.LMOpen, usage("lm-open", "let whoever reaches --lm-addr beyond loopback read and write without a credential"))
	str(&s.RESPAddr, "resp-addr", "", "HOST:PORT for Redis clients (default none); beyond loopback it needs --api-key-file")
	str(&s.EngineTenant, "engine-tenant", "", "tenant of the pages of engines without an API key")
	value(&s.EngineUIDs, "engine-uids", "user ids that may use the engine socket, beside root and the sidecar's own")
	value(&s.Memory, "memory", "size of the cache: 512MiB, 1GiB, or bytes")
	value(&s.Memory, "max-memory", "the same as --memory")
	value(&s.Inbox, "inbox", "shared memory in which engines hand over pages, all engines together")
	integer(&s.PageTokens, "page-tokens", "", "tokens in a page, a multiple of the engine's block")
	str(&s.DataAddr, "data-addr", "", "HOST:PORT for pages between sidecars; beyond loopback it needs --cluster-key-file")
	str(&s.GossipAddr, "gossip-addr", "", "HOST:PORT for gossip, port 7946 if none is given; beyond loopback it needs a key")
	str(&s.AdvertiseHost, "advertise-host", "", "address at which others reach this node, where it listens on all")
	value(&s.Peers, "peer", "HOST:PORT of another sidecar's HTTP; may be repeated; tried for ever")
	value(&s.Join, "join", "HOST[:PORT] of gossip, or a DNS name with many addresses; may be repeated; tried for ever")
	str(&s.ClusterName, "cluster-name", "", "nodes with another name are not heard")
	str(&s.ClusterKeyFile, "cluster-key-file", "", "file with the key that sidecars prove to each other (membrane keys cluster)")
	str(&s.GossipKeyFile, "gossip-key-file", "", "file with the base64 key of gossip, 16, 24 or 32 bytes (default: derived from the cluster key)")
	str(&s.APIKeyFile, "api-key-file", "", "file with entries of membrane keys generate")
	value(&s.DrainTimeout, "drain-timeout", "longest wait for what is under way, at SIGTERM")
	str(&s.Role, "role", "", "what this node serves: prefill, decode, both, or auto (it and the other auto nodes share the two)")
	value(&s.PrefillRatio, "prefill-ratio", "part of the auto nodes that prefill, 0 to 1, or 'auto': it follows the lengths of their queues; at least one of each phase")
	integer(&s.GRPCPort, "grpc-port", "", "port for gRPC on --host, 0 for any free one, -1 for none")
	integer(&s.ServePort, "serve-port", "", "port on --host for OpenAI's API in front of this pod's engine, 0 for any free one, -1 for none")
	str(&s.EngineURL, "engine-url", "", "where this pod's engine serves OpenAI's API")
	integer(&s.PrefillThreshold, "prefill-threshold", "", "tokens of a prompt that no node holds, from which on another pod prefills it; 0 for never")
	value(&s.PrefillTimeout, "prefill-timeout", "longest wait for other pods to prefill a prompt, 1s to 1h; then this pod's engine does")
	integer(&s.ServeMax, "serve-max", "", "most requests under way on --serve-port; others get 503 with Retry-After")
	value(&s.HandleTTL, "handle-ttl", "how long a prefilled prompt waits for its decode, 1s to 1h; its pages are pinned as long, or until they are pulled")
	str(&s.LogLevel, "log-level", "l", "debug, info, warn or error")
	str(&s.LogFormat, "log-format", "", "text or json")
	flags.BoolVarP(&s.Daemon, "daemon", "d", s.Daemon, usage("daemon", "serve in the foreground until a signal, which is what it always does"))
}

// ReadEnv sets whatever the command line has not set from the environment:
// flags come before variables, and both before defaults.
func (s *Settings) ReadEnv(flags *pflag.FlagSet, lookup func(string) (string, bool)) error {
	var first error
	flags.VisitAll(func(f *pflag.Flag) {
		name := option{f.Name, envNames[f.Name]}.variable()
		if f.Changed {
			s.sources[f.Name] = "flag"
			return
		}
		text, ok := lookup(name)
		if !ok || text == "" || f.Name == "help" {
			return
		}
		// --memory and --max-memory are one setting.
		if twin := map[string]string{"memory": "max-memory", "max-memory": "memory"}[f.Name]; twin != "" && flags.Changed(twin) {
			return
		}
		if err := f.Value.Set(text); err != nil && first == nil {
			reason := "is not allowed: it " + WhyNot(err)
			if strings.Contains(text, "://") {
				reason += " (Kubernetes sets it for a Service of this name: enableServiceLinks: false)"
			}
			first = fmt.Errorf("%s %q %s", name, text, reason)
		}
		s.sources[f.Name] = name
	})
	if s.sources["engine-addr"] != "" {
		s.engineAddrIsFree = false
	}
	return first
}

const maxNodeID = 64

func nameRune(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_' || r == '.'
}

// Validate reports the first setting that cannot be, by itself or together
// with others, as a [*SettingError]. It opens no file.
func (s *Settings) Validate() error {
	bad := func(flag, value, format string, args ...any) error {
		return &SettingError{flag, value, fmt.Sprintf(format, args...)}
	}
	if s.NodeID == "" || len(s.NodeID) > maxNodeID || strings.IndexFunc(s.NodeID, func(r rune) bool { return !nameRune(r) }) >= 0 {
		return bad("node-id", s.NodeID, "is not 1 to %d letters, digits, '-', '_' and '.'", maxNodeID)
	}
	if s.Host == "" {
		return bad("host", s.Host, "is empty")
	}
	if s.Port < 0 || s.Port > 65535 {
		return bad("port", strconv.Itoa(s.Port), "is not between 0 and 65535")
	}
	if !isLoopback(s.Host) && s.APIKeyFile == "" {
		return bad("host", s.Host, "listens beyond loopback, which needs --api-key-file (membrane keys generate)")
	}
	for _, l := range []struct{ flag, addr, off string }{{"engine-addr", s.EngineAddr, engineAddrOff}, {"resp-addr", s.RESPAddr, ""}} {
		if l.addr == l.off {
			continue
		}
		host, err := checkAddr(l.flag, l.addr)
		if err != nil {
			return err
		}
		if !isLoopback(host) && s.APIKeyFile == "" {
			return bad(l.flag, l.addr, "listens beyond loopback, which needs --api-key-file (membrane keys generate)")
		}
	}
	if err := s.validateLM(); err != nil {
		return err
	}
	if err := auth.CheckSubject(s.EngineTenant); err != nil {
		return bad("engine-tenant", s.EngineTenant, "cannot be a tenant: %v", err)
	}
	if _, err := s.uids(); err != nil {
		return err
	}
	if s.Memory < cache.MinBudget || s.Memory > 16<<40 {
		return bad("memory", s.Memory.String(), "is not between %v and %v", Size(cache.MinBudget), Size(16<<40))
	}
	if s.Inbox < 0 || s.Inbox > 1<<40 {
		return bad("inbox", s.Inbox.String(), "is not between 0 and %v", Size(1<<40))
	}
	if s.PageTokens < kvwire.MinPageTokens || s.PageTokens > kvwire.MaxPageTokens {
		return bad("page-tokens", strconv.Itoa(s.PageTokens), "is not between %d and %d", kvwire.MinPageTokens, kvwire.MaxPageTokens)
	}
	if err := s.validateMesh(); err != nil {
		return err
	}
	if s.DrainTimeout < 0 || time.Duration(s.DrainTimeout) > time.Hour {
		return bad("drain-timeout", s.DrainTimeout.String(), "is not between 0 and 1h")
	}
	if err := s.validatePhases(); err != nil {
		return err
	}
	switch s.LogLevel {
	case "debug", "info", "warn", "error":
	default:
		return bad("log-level", s.LogLevel, "is not debug, info, warn or error")
	}
	if s.LogFormat != "text" && s.LogFormat != "json" {
		return bad("log-format", s.LogFormat, "is not text or json")
	}
	return nil
}

// validateLM checks the listener whose clients cannot show a credential.
func (s *Settings) validateLM() error {
	if s.LMAddr == "" {
		if s.LMOpen {
			return &SettingError{"lm-open", "true", "says what may reach --lm-addr, which is not set"}
		}
		return nil
	}
	host, err := checkAddr("lm-addr", s.LMAddr)
	if err == nil && !isLoopback(host) && !s.LMOpen {
		err = &SettingError{"lm-addr", s.LMAddr, "listens beyond loopback for clients without a credential, which needs --lm-open"}
	}
	return err
}

// validatePhases checks what prefill and decode on different nodes need.
func (s *Settings) validatePhases() error {
	bad := func(flag, value, format string, args ...any) error {
		return &SettingError{flag, value, fmt.Sprintf(format, args...)}
	}
	if err := roles.Check(s.Role); err != nil {
		return bad("role", s.Role, "%v", err)
	}
	if r := s.PrefillRatio; r != RatioAuto && !(r >= 0 && r <= 1) {
		return bad("prefill-ratio", r.String(), "is not between 0 and 1")
	}
	if s.GRPCPort < portOff || s.GRPCPort > 65535 {
		return bad("grpc-port", strconv.Itoa(s.GRPCPort), "is not between -1 (none) and 65535")
	}
	if s.ServePort < portOff || s.ServePort > 65535 {
		return bad("serve-port", strconv.Itoa(s.ServePort), "is not between -1 (none) and 65535")
	}
	if s.ServePort != portOff && !isLoopback(s.Host) && s.ClusterKeyFile == "" {
		return bad("serve-port", strconv.Itoa(s.ServePort), "listens beyond loopback, which needs --cluster-key-file (membrane keys cluster), out of which cache salts are made")
	}
	if err := proxy.CheckEngineURL(s.EngineURL); err != nil {
		return bad("engine-url", s.EngineURL, "%v", err)
	}
	if s.PrefillThreshold < 0 || s.PrefillThreshold > kvwire.MaxTokens {
		return bad("prefill-threshold", strconv.Itoa(s.PrefillThreshold), "is not between 0 and %d", kvwire.MaxTokens)
	}
	if d := time.Duration(s.PrefillTimeout); d < time.Second || d > time.Hour {
		return bad("prefill-timeout", s.PrefillTimeout.String(), "is not between 1s and 1h")
	}
	if s.ServeMax < 1 || s.ServeMax > maxServe {
		return bad("serve-max", strconv.Itoa(s.ServeMax), "is not between 1 and %d", maxServe)
	}
	if ttl := time.Duration(s.HandleTTL); ttl < time.Second || ttl > cache.MaxTTL {
		return bad("handle-ttl", s.HandleTTL.String(), "is not between 1s and %v", Seconds(cache.MaxTTL))
	}
	return nil
}

func (s *Settings) validateMesh() error {
	gossip, data := withPort(s.GossipAddr, gossipPort), withPort(s.DataAddr, "0")
	for _, l := range []struct {
		flag, addr string
		key        bool
		hint       string
	}{
		{"data-addr", data, s.ClusterKeyFile != "", "--cluster-key-file (membrane keys cluster)"},
		{"gossip-addr", gossip, s.ClusterKeyFile != "" || s.GossipKeyFile != "", "--gossip-key-file or --cluster-key-file (membrane keys cluster)"},
	} {
		host, err := checkAddr(l.flag, l.addr)
		if err != nil {
			return err
		}
		if isLoopback(host) {
			continue
		}
		if !l.key {
			return &SettingError{l.flag, l.addr, "listens beyond loopback, which needs " + l.hint}
		}
		if ip := net.ParseIP(host); s.AdvertiseHost == "" && (host == "" || ip != nil && ip.IsUnspecified()) {
			return &SettingError{l.flag, l.addr, "listens on every address, so --advertise-host must say at which one others reach it"}
		}
	}
	for _, p := range s.Peers {
		if _, port, err := net.SplitHostPort(p); err != nil || !isPort(port) {
			return &SettingError{"peer", p, "is not HOST:PORT"}
		}
	}
	for _, j := range s.Join {
		if _, err := checkAddr("join", withPort(j, gossipPort)); err != nil {
			return err
		}
	}
	if len(s.ClusterName) > 255 {
		return &SettingError{"cluster-name", s.ClusterName[:32] + "…", "has more than 255 bytes"}
	}
	return nil
}

// warnings returns sentences about settings that are allowed and will hardly
// do what they are meant to.
func (s *Settings) warnings() []string {
	var out []string
	for _, other := range append(append([]string(nil), s.Peers...), s.Join...) {
		host, _, err := net.SplitHostPort(withPort(other, gossipPort))
		if err != nil || isLoopback(host) {
			continue
		}
		for _, l := range []struct{ flag, addr string }{{"gossip-addr", withPort(s.GossipAddr, gossipPort)}, {"data-addr", withPort(s.DataAddr, "0")}} {
			if own, _, _ := net.SplitHostPort(l.addr); isLoopback(own) {
				out = append(out, fmt.Sprintf("%s is another machine, which cannot reach this one's --%s %s", other, l.flag, l.addr))
			}
		}
		break
	}
	return out
}

const (
	engineAddrOff = "off"
	portOff       = -1
	gossipPort    = "7946"
	maxServe      = 65536
)

// checkAddr returns the host of HOST:PORT.
func checkAddr(flag, addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || !isPort(port) {
		return "", &SettingError{flag, addr, "is not HOST:PORT"}
	}
	return host, nil
}

func isPort(s string) bool {
	n, err := strconv.Atoi(s)
	return err == nil && n >= 0 && n <= 65535
}

// withPort adds a port to an address that has none.
func withPort(addr, port string) string {
	if _, _, err := net.SplitHostPort(addr); err != nil && !strings.Contains(addr, "]:") {
		if strings.Count(addr, ":") == 1 {
			return addr // HOST: with something that is no port
		}
		return net.JoinHostPort(strings.Trim(addr, "[]"), port)
	}
	return addr
}

// uids returns the user ids that may use the engine socket.
func (s *Settings) uids() ([]uint32, error) {
	var out []uint32
	for _, text := range s.EngineUIDs {
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			return nil, &SettingError{"engine-uids", text, "is not a user id"}
		}
		out = append(out, uint32(n))
	}
	return out, nil
}

// Sources returns where each setting that is no default came from: "flag" or
// the name of a variable.
func (s *Settings) Sources() map[string]string { return s.sources }

// Logger returns a logger to standard error as the settings want it.
func (s *Settings) Logger() zerolog.Logger {
	level, err := zerolog.ParseLevel(s.LogLevel)
	if err != nil {
		level = zerolog.InfoLevel
	}
	if s.LogFormat == "json" {
		return zerolog.New(os.Stderr).Level(level).With().Timestamp().Logger()
	}
	out := zerolog.ConsoleWriter{Out: os.Stderr, TimeFormat: time.TimeOnly, NoColor: true}
	return zerolog.New(out).Level(level).With().Timestamp().Logger()
}
