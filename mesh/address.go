package mesh

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"membrane/kvwire"
)

// AddressPath is where a sidecar's HTTP listener serves [Mesh.Address].
const AddressPath = "/mesh/address"

const (
	addressScheme = "Membrane-Peer"
	addressSkew   = 60 * time.Second
	maxAuthHeader = 512
	strangeLines  = 10
)

// addressAnswer is the body of the answer. MAC covers the other fields and the
// asker's nonce.
type addressAnswer struct {
	Node   string `json:"node"`
	Gossip string `json:"gossip"`
	Data   string `json:"data"`
	MAC    string `json:"mac"`
}

// Address answers GET /mesh/address: the HTTP status and a JSON body with this
// node's name, gossip and data addresses for a peer that proves in the
// Authorization header that it holds the cluster key, else 401 and an error.
// The answer proves the same to the peer.
func (m *Mesh) Address(method, path, authorization string, now time.Time) (status int, body []byte) {
	nonce, err := checkAuthorization(m.cfg.ClusterKey, method, path, authorization, now)
	if err != nil {
		m.counters.authFailures.Add(1)
		m.strange.Warn().Err(err).Msg("refused a peer that asked for our address")
		body, _ = json.Marshal(map[string]string{"error": "unauthorized", "message": err.Error()})
		return http.StatusUnauthorized, body
	}
	a := addressAnswer{Node: m.Name(), Gossip: m.GossipAddr(), Data: m.DataAddr()}
	a.MAC = addressMAC(m.cfg.ClusterKey, "membrane-address-answer-v1", a.Node, a.Gossip, a.Data, nonce)
	body, _ = json.Marshal(a)
	return http.StatusOK, body
}

// authorize returns the header of a request and the nonce in it.
func authorize(key []byte, method, path, node string, now time.Time) (header, nonce string) {
	n := kvwire.NewNonce()
	nonce = hex.EncodeToString(n[:])
	at := strconv.FormatInt(now.Unix(), 10)
	mac := addressMAC(key, "membrane-address-v1", method, path, node, at, nonce)
	return fmt.Sprintf("%s node=%s,time=%s,nonce=%s,mac=%s", addressScheme, node, at, nonce, mac), nonce
}

// checkAuthorization returns the nonce of a request with a good header. The
// request changes nothing, so a repeated one is no harm within the skew.
func checkAuthorization(key []byte, method, path, header string, now time.Time) (nonce string, err error) {
	scheme, rest, _ := strings.Cut(header, " ")
	if scheme != addressScheme || len(header) > maxAuthHeader {
		return "", fmt.Errorf("cannot accept the Authorization header: not %s", addressScheme)
	}
	fields := map[string]string{}
	for _, f := range strings.Split(rest, ",") {
		k, v, _ := strings.Cut(strings.TrimSpace(f), "=")
		fields[k] = v
	}
	at, err := strconv.ParseInt(fields["time"], 10, 64)
	if err != nil {
		return "", fmt.Errorf("cannot accept the Authorization header: time %.32q is not a number of seconds", fields["time"])
	}
	mac := addressMAC(key, "membrane-address-v1", method, path, fields["node"], fields["time"], fields["nonce"])
	if !hmac.Equal([]byte(mac), []byte(fields["mac"])) {
		return "", fmt.Errorf("cannot accept the Authorization header: mac of %.32q does not fit the cluster key", fields["node"])
	}
	if d := now.Sub(time.Unix(at, 0)); d > addressSkew || d < -addressSkew {
		return "", fmt.Errorf("cannot accept the Authorization header: time is off by %v, more than %v", d.Round(time.Second), addressSkew)
	}
	return fields["nonce"], nil
}

// checkAddress decodes an answer and checks its proof.
func checkAddress(key, body []byte, nonce string) (addressAnswer, error) {
	var a addressAnswer
	if err := json.Unmarshal(body, &a); err != nil {
		return a, fmt.Errorf("cannot decode the address: %w", err)
	}
	mac := addressMAC(key, "membrane-address-answer-v1", a.Node, a.Gossip, a.Data, nonce)
	if !hmac.Equal([]byte(mac), []byte(a.MAC)) {
		return a, fmt.Errorf("cannot accept the address: mac does not fit the cluster key")
	}
	return a, nil
}

// addressMAC is HMAC-SHA256 over the domain and the fields, a zero byte behind
// each, in hexadecimal.
func addressMAC(key []byte, domain string, fields ...string) string {
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(domain + "\x00"))
	for _, f := range fields {
		mac.Write([]byte(f + "\x00"))
	}
	return hex.EncodeToString(mac.Sum(nil))
}
