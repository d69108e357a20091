package sidecar

import (
	"encoding/base64"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/sidecar/auth"
)

func TestSizes(t *testing.T) {
	t.Parallel()
	f := func(text string, want int64) {
		t.Helper()
		got, err := ParseSize(text)
		if want < 0 {
			assert.Error(t, err, text)
			return
		}
		require.NoError(t, err, text)
		assert.EqualValues(t, want, got, text)
	}
	f("1073741824", 1<<30)
	f("1GiB", 1<<30)
	f("512MiB", 512<<20)
	f("1.5 GiB", 3<<29)
	f("2GB", 2e9)
	f("7kB", 7000)
	f("7B", 7)
	f("0", 0)
	for _, bad := range []string{"", "GiB", "-1", "1e3", "0x10", "1_000", "inf", "NaN", "1GiB1", "1gib", "99999999TiB", "+1"} {
		if bad == "1e3" {
			f(bad, 1000)
			continue
		}
		f(bad, -1)
	}
	for _, s := range []Size{0, 1, 1023, 1024, 3 << 20, 1 << 30, 5 << 40} {
		back, err := ParseSize(s.String())
		require.NoError(t, err)
		assert.Equal(t, s, back)
	}
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"1GiB", "1.5MB", "-1", "1e400", "0x1p4"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if s, err := ParseSize(text); err == nil {
			require.GreaterOrEqual(t, int64(s), int64(0))
		}
	})
}

func TestDurations(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{"30": 30 * time.Second, "0.5": 500 * time.Millisecond, "1m30s": 90 * time.Second} {
		var d Seconds
		require.NoError(t, d.Set(text))
		assert.Equal(t, want, time.Duration(d))
	}
	for _, bad := range []string{"", "x", "1e300", "NaN"} {
		assert.Error(t, new(Seconds).Set(bad), bad)
	}
}

func TestAddressesGetTheirPort(t *testing.T) {
	t.Parallel()
	for addr, want := range map[string]string{
		"10.0.0.1": "10.0.0.1:7946", "10.0.0.1:1": "10.0.0.1:1", "name": "name:7946", "::1": "[::1]:7946", "[::1]": "[::1]:7946", "[::1]:5": "[::1]:5",
	} {
		assert.Equal(t, want, withPort(addr, "7946"))
	}
}

// secret writes a file that passes as a secret.
func secret(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

func TestRefusedSettings(t *testing.T) {
	t.Parallel()
	_, line, err := auth.Generate("ops", auth.ScopeAdmin)
	require.NoError(t, err)
	keys := secret(t, line)
	key := secret(t, base64.StdEncoding.EncodeToString(make([]byte, 32)))
	check := func(change func(*Settings)) error {
		s := DefaultSettings()
		change(&s)
		if err := s.Validate(); err != nil {
			return err
		}
		_, err := readSecrets(&s)
		return err
	}
	f := func(flag, value, reason string, change func(*Settings)) {
		t.Helper()
		err := check(change)
		var e *SettingError
		require.ErrorAs(t, err, &e)
		assert.Equal(t, flag, e.Flag)
		assert.Equal(t, value, e.Value)
		assert.Contains(t, e.Reason, reason)
	}
	ok := func(change func(*Settings)) {
		t.Helper()
		require.NoError(t, check(change))
	}
	ok(func(*Settings) {})
	f("node-id", "a b", "letters", func(s *Settings) { s.NodeID = "a b" })
	f("node-id", "", "letters", func(s *Settings) { s.NodeID = "" })
	f("node-id", strings.Repeat("n", 65), "1 to 64", func(s *Settings) { s.NodeID = strings.Repeat("n", 65) })
	ok(func(s *Settings) { s.NodeID = strings.Repeat("n", 64) })
	f("port", "65536", "between 0 and 65535", func(s *Settings) { s.Port = 65536 })
	f("port", "-1", "between 0 and 65535", func(s *Settings) { s.Port = -1 })
	f("host", "", "empty", func(s *Settings) { s.Host = "" })

	// Beyond loopback only with keys.
	for _, host := range []string{"0.0.0.0", "::", "10.1.2.3", "example.com"} {
		f("host", host, "--api-key-file", func(s *Settings) { s.Host = host })
		ok(func(s *Settings) { s.Host, s.APIKeyFile = host, keys })
	}
	for _, host := range []string{"localhost", "127.0.0.2", "::1"} {
		ok(func(s *Settings) { s.Host = host })
	}
	f("engine-addr", "0.0.0.0:7600", "--api-key-file", func(s *Settings) { s.EngineAddr = "0.0.0.0:7600" })
	f("engine-addr", ":7600", "--api-key-file", func(s *Settings) { s.EngineAddr = ":7600" })
	ok(func(s *Settings) { s.EngineAddr, s.APIKeyFile = "0.0.0.0:7600", keys })
	ok(func(s *Settings) { s.EngineAddr = "off" })
	f("resp-addr", "0.0.0.0:6379", "--api-key-file", func(s *Settings) { s.RESPAddr = "0.0.0.0:6379" })
	f("resp-addr", "6379", "HOST:PORT", func(s *Settings) { s.RESPAddr = "6379" })
	ok(func(s *Settings) { s.RESPAddr, s.APIKeyFile = "0.0.0.0:6379", keys })
	ok(func(s *Settings) { s.RESPAddr = "127.0.0.1:0" })
	f("lm-addr", "0.0.0.0:65432", "--lm-open", func(s *Settings) { s.LMAddr, s.APIKeyFile = "0.0.0.0:65432", keys })
	f("lm-addr", "65432", "HOST:PORT", func(s *Settings) { s.LMAddr, s.LMOpen = "65432", true })
	f("lm-open", "true", "not set", func(s *Settings) { s.LMOpen = true })
	ok(func(s *Settings) { s.LMAddr, s.LMOpen = "0.0.0.0:65432", true })
	ok(func(s *Settings) { s.LMAddr = "127.0.0.1:0" })
	f("engine-addr", "7600", "HOST:PORT", func(s *Settings) { s.EngineAddr = "7600" })
	f("data-addr", "0.0.0.0:8081", "--cluster-key-file", func(s *Settings) { s.DataAddr = "0.0.0.0:8081" })
	f("data-addr", "10.0.0.1:8081", "--cluster-key-file", func(s *Settings) { s.DataAddr, s.GossipKeyFile = "10.0.0.1:8081", key })
	f("data-addr", "0.0.0.0:8081", "--advertise-host", func(s *Settings) { s.DataAddr, s.ClusterKeyFile = "0.0.0.0:8081", key })
	ok(func(s *Settings) { s.DataAddr, s.ClusterKeyFile, s.AdvertiseHost = "0.0.0.0:8081", key, "10.0.0.1" })
	ok(func(s *Settings) { s.DataAddr, s.ClusterKeyFile = "10.0.0.1", key })
	f("gossip-addr", "0.0.0.0:7946", "--gossip-key-file", func(s *Settings) { s.GossipAddr = "0.0.0.0" })
	ok(func(s *Settings) { s.GossipAddr, s.GossipKeyFile = "10.0.0.1", key })
	f("gossip-addr", "10.0.0.1:x", "HOST:PORT", func(s *Settings) { s.GossipAddr = "10.0.0.1:x" })

	f("engine-tenant", "a:b", "tenant", func(s *Settings) { s.EngineTenant = "a:b" })
	f("engine-uids", "root", "user id", func(s *Settings) { s.EngineUIDs = List{"0", "root"} })
	f("engine-uids", "4294967296", "user id", func(s *Settings) { s.EngineUIDs = List{"4294967296"} })
	f("memory", "1023KiB", "between 1MiB", func(s *Settings) { s.Memory = 1023 << 10 })
	f("memory", "0", "between 1MiB", func(s *Settings) { s.Memory = 0 })
	f("inbox", "-1", "between 0", func(s *Settings) { s.Inbox = -1 })
	f("page-tokens", "0", "between 1 and 16384", func(s *Settings) { s.PageTokens = 0 })
	f("page-tokens", "16385", "between 1 and 16384", func(s *Settings) { s.PageTokens = 16385 })
	f("peer", "localhost", "HOST:PORT", func(s *Settings) { s.Peers = List{"localhost"} })
	f("peer", "a:70000", "HOST:PORT", func(s *Settings) { s.Peers = List{"a:1", "a:70000"} })
	f("join", "a:70000", "HOST:PORT", func(s *Settings) { s.Join = List{"a", "a:70000"} })
	f("drain-timeout", "-1s", "between 0 and 1h", func(s *Settings) { s.DrainTimeout = Seconds(-time.Second) })
	f("role", "worker", "is not prefill, decode, both or auto", func(s *Settings) { s.Role = "worker" })
	f("prefill-ratio", "1.5", "between 0 and 1", func(s *Settings) { s.PrefillRatio = 1.5 })
	f("grpc-port", "65536", "between -1 (none) and 65535", func(s *Settings) { s.GRPCPort = 65536 })
	f("serve-port", "-2", "between -1 (none) and 65535", func(s *Settings) { s.ServePort = -2 })
	f("serve-port", "80", "--cluster-key-file", func(s *Settings) { s.ServePort, s.Host, s.APIKeyFile = 80, "10.0.0.1", keys })
	ok(func(s *Settings) { s.ServePort, s.Host, s.APIKeyFile, s.ClusterKeyFile = 80, "10.0.0.1", keys, key })
	f("engine-url", "localhost:8000", "http://", func(s *Settings) { s.EngineURL = "localhost:8000" })
	f("prefill-threshold", "-1", "between 0 and 1048576", func(s *Settings) { s.PrefillThreshold = -1 })
	f("prefill-threshold", "1048577", "between 0 and 1048576", func(s *Settings) { s.PrefillThreshold = 1<<20 + 1 })
	f("prefill-timeout", "999ms", "between 1s and 1h", func(s *Settings) { s.PrefillTimeout = Seconds(999 * time.Millisecond) })
	f("serve-max", "0", "between 1 and 65536", func(s *Settings) { s.ServeMax = 0 })
	f("handle-ttl", "2h0m0s", "between 1s and 1h0m0s", func(s *Settings) { s.HandleTTL = Seconds(2 * time.Hour) })
	f("prefill-ratio", "NaN", "between 0 and 1", func(s *Settings) { s.PrefillRatio = Ratio(math.NaN()) })
	f("log-level", "loud", "debug, info", func(s *Settings) { s.LogLevel = "loud" })
	f("log-format", "xml", "text or json", func(s *Settings) { s.LogFormat = "xml" })

	// Key files.
	bad := secret(t, "what:ever")
	f("api-key-file", bad, "line 1", func(s *Settings) { s.APIKeyFile = bad })
	missing := filepath.Join(t.TempDir(), "none")
	f("api-key-file", missing, "no such file", func(s *Settings) { s.APIKeyFile = missing })
	open := secret(t, line)
	require.NoError(t, os.Chmod(open, 0o644))
	f("api-key-file", open, "chmod 600", func(s *Settings) { s.APIKeyFile = open })
	require.NoError(t, os.Chmod(key, 0o600))
	f("cluster-key-file", bad, "base64", func(s *Settings) { s.ClusterKeyFile = bad })
	short := secret(t, base64.StdEncoding.EncodeToString(make([]byte, 16)))
	f("cluster-key-file", short, "too short", func(s *Settings) { s.ClusterKeyFile = short })
	ok(func(s *Settings) { s.GossipKeyFile = short })
	odd := secret(t, base64.StdEncoding.EncodeToString(make([]byte, 17)))
	f("gossip-key-file", odd, "17 bytes", func(s *Settings) { s.GossipKeyFile = odd })
}

func TestGossipKeyFollowsFromTheClusterKey(t *testing.T) {
	t.Parallel()
	a := secret(t, base64.StdEncoding.EncodeToString(make([]byte, 32))+"\n")
	one, err := readSecrets(&Settings{ClusterKeyFile: a})
	require.NoError(t, err)
	assert.Len(t, one.gossip, 32)
	assert.NotEqual(t, one.cluster, one.gossip)
	two, err := readSecrets(&Settings{ClusterKeyFile: a})
	require.NoError(t, err)
	assert.Equal(t, one, two)
	own, err := readSecrets(&Settings{ClusterKeyFile: a, GossipKeyFile: secret(t, base64.StdEncoding.EncodeToString([]byte("0123456789abcdef")))})
	require.NoError(t, err)
	assert.Equal(t, []byte("0123456789abcdef"), own.gossip)
}

func TestFlagsComeBeforeTheEnvironment(t *testing.T) {
	t.Parallel()
	read := func(args []string, env map[string]string) (Settings, error) {
		s := DefaultSettings()
		flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
		s.AddFlags(flags)
		require.NoError(t, flags.Parse(args))
		err := s.ReadEnv(flags, func(name string) (string, bool) { v, ok := env[name]; return v, ok })
		return s, err
	}
	s, err := read(
		[]string{"-n", "n1", "--peer", "a:1,b:2", "--peer", "c:3", "--memory", "2GiB"},
		map[string]string{
			"MEMBRANE_NODE_ID": "other", "MEMBRANE_PORT": "0", "MEMBRANE_PEERS": "d:4", "MEMBRANE_JOIN": "e,f",
			"MEMBRANE_MAX_MEMORY": "1", "MEMBRANE_DAEMON": "true", "MEMBRANE_DRAIN_TIMEOUT": "5", "MEMBRANE_LOG_LEVEL": "",
		})
	require.NoError(t, err)
	assert.Equal(t, "n1", s.NodeID)
	assert.Equal(t, 0, s.Port)
	assert.Equal(t, List{"a:1", "b:2", "c:3"}, s.Peers)
	assert.Equal(t, List{"e", "f"}, s.Join)
	assert.EqualValues(t, 2<<30, s.Memory)
	assert.EqualValues(t, 5*time.Second, s.DrainTimeout)
	assert.Equal(t, "info", s.LogLevel)
	assert.True(t, s.engineAddrIsFree)
	assert.Equal(t, map[string]string{
		"node-id": "flag", "peer": "flag", "memory": "flag", "port": "MEMBRANE_PORT", "join": "MEMBRANE_JOIN",
		"daemon": "MEMBRANE_DAEMON", "drain-timeout": "MEMBRANE_DRAIN_TIMEOUT",
	}, s.Sources())

	s, err = read([]string{"--engine-addr", "127.0.0.1:7600", "--max-memory", "4194304"}, nil)
	require.NoError(t, err)
	assert.False(t, s.engineAddrIsFree)
	assert.EqualValues(t, 4<<20, s.Memory)
	s, err = read(nil, map[string]string{"MEMBRANE_MEMORY": "3MiB", "MEMBRANE_PEERS": "a:1,b:2"})
	require.NoError(t, err)
	assert.EqualValues(t, 3<<20, s.Memory)
	assert.Equal(t, List{"a:1", "b:2"}, s.Peers)

	_, err = read(nil, map[string]string{"MEMBRANE_MEMORY": "much"})
	require.ErrorContains(t, err, `MEMBRANE_MEMORY "much" is not allowed`)
	_, err = read(nil, map[string]string{"MEMBRANE_PORT": "many"})
	require.ErrorContains(t, err, `MEMBRANE_PORT "many" is not allowed: it is not a whole number`)
	_, err = read(nil, map[string]string{"MEMBRANE_PORT": "tcp://10.0.0.1:80"})
	require.ErrorContains(t, err, "enableServiceLinks")
}

func TestWarnings(t *testing.T) {
	t.Parallel()
	s := DefaultSettings()
	s.Peers = List{"localhost:8081"}
	assert.Empty(t, s.warnings())
	s.Peers = List{"10.0.0.2:8080"}
	assert.Len(t, s.warnings(), 2)
	s.GossipAddr, s.DataAddr = "10.0.0.1", "10.0.0.1:8081"
	assert.Empty(t, s.warnings())
}
