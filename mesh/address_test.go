package mesh

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAddressNeedsTheClusterKey(t *testing.T) {
	t.Parallel()
	n := startNode(t, "a", nil)
	now := time.Unix(1_800_000_000, 0)
	header, nonce := authorize(testKey, "GET", AddressPath, "b", now)
	status, body := n.Address("GET", AddressPath, header, now)
	require.Equal(t, 200, status)
	a, err := checkAddress(testKey, body, nonce)
	require.NoError(t, err)
	require.Equal(t, "a", a.Node)
	require.Equal(t, n.GossipAddr(), a.Gossip)
	require.Equal(t, n.DataAddr(), a.Data)

	// The answer is for this request and under this key.
	_, err = checkAddress(testKey, body, nonce+"0")
	require.Error(t, err)
	_, err = checkAddress([]byte("another"), body, nonce)
	require.Error(t, err)
	a.Gossip = "127.0.0.1:1"
	forged, err := json.Marshal(a)
	require.NoError(t, err)
	_, err = checkAddress(testKey, forged, nonce)
	require.Error(t, err)

	for name, ask := range map[string]func() (method, path, header string, at time.Time){
		"no header":      func() (string, string, string, time.Time) { return "GET", AddressPath, "", now },
		"another scheme": func() (string, string, string, time.Time) { return "GET", AddressPath, "Bearer x", now },
		"another method": func() (string, string, string, time.Time) { return "POST", AddressPath, header, now },
		"another path":   func() (string, string, string, time.Time) { return "GET", "/keys", header, now },
		"another node": func() (string, string, string, time.Time) {
			return "GET", AddressPath, strings.Replace(header, "node=b", "node=c", 1), now
		},
		"another nonce": func() (string, string, string, time.Time) {
			return "GET", AddressPath, strings.Replace(header, "nonce=", "nonce=0", 1), now
		},
		"no mac": func() (string, string, string, time.Time) {
			return "GET", AddressPath, header[:strings.Index(header, ",mac=")], now
		},
		"no time": func() (string, string, string, time.Time) {
			return "GET", AddressPath, strings.Replace(header, "time=", "tide=", 1), now
		},
		"too late": func() (string, string, string, time.Time) {
			return "GET", AddressPath, header, now.Add(61 * time.Second)
		},
		"too early": func() (string, string, string, time.Time) {
			return "GET", AddressPath, header, now.Add(-61 * time.Second)
		},
		"too long": func() (string, string, string, time.Time) {
			return "GET", AddressPath, header + strings.Repeat(" ", 512), now
		},
		"another cluster": func() (string, string, string, time.Time) {
			h, _ := authorize([]byte("another"), "GET", AddressPath, "b", now)
			return "GET", AddressPath, h, now
		},
	} {
		before := n.Stats().AuthFailures
		status, body := n.Address(ask())
		require.Equal(t, 401, status, name)
		require.NotContains(t, string(body), n.GossipAddr(), name)
		require.Equal(t, before+1, n.Stats().AuthFailures, name)
	}
	status, _ = n.Address("GET", AddressPath, header, now.Add(59*time.Second))
	require.Equal(t, 200, status)
}

func FuzzCheckAuthorization(f *testing.F) {
	now := time.Unix(1_800_000_000, 0)
	good, _ := authorize(testKey, "GET", AddressPath, "b", now)
	f.Add(good)
	f.Add("Membrane-Peer ")
	f.Add("Membrane-Peer node=,time=,nonce=,mac=")
	f.Fuzz(func(t *testing.T, header string) {
		nonce, err := checkAuthorization(testKey, "GET", AddressPath, header, now)
		if err != nil {
			return
		}
		require.Contains(t, header, nonce)
		_, err = checkAuthorization([]byte("another cluster key"), "GET", AddressPath, header, now)
		require.Error(t, err, "whoever was let in has proved to hold the key")
	})
}
