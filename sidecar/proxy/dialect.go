package proxy

import (
	"net"
	"strconv"
	"strings"

	"github.com/tidwall/gjson"
)

// The headers in which routers in front name pods (llm-d).
const (
	prefillerHeader   = "x-prefiller-host-port"
	cacheSourceHeader = "x-kv-cache-source-host-port"

	maxNamedPods = 16
	maxHostPort  = 255 // bytes
)

// parseHostPorts reads HOST:PORT[, HOST:PORT…]. It returns nil when the text is
// something else, or names more than maxNamedPods.
func parseHostPorts(text string) []string {
	if len(text) > maxNamedPods*(maxHostPort+2) || strings.Count(text, ",") >= maxNamedPods {
		return nil
	}
	var out []string
	for one := range strings.SplitSeq(text, ",") {
		one = strings.TrimSpace(one)
		host, port, err := net.SplitHostPort(one)
		if err != nil || host == "" || len(one) > maxHostPort {
			return nil
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return nil
		}
		out = append(out, one)
	}
	return out
}

// leg says which part of a request that is split between pods this one is.
type leg uint8

const (
	wholeRequest leg = iota
	prefillLeg       // one output token; the KV is what is asked for
	decodeLeg        // the prompt was prefilled elsewhere already
)

// legOf reads kv_transfer_params as vLLM's connectors and the proxies in front
// of them write it.
func legOf(params gjson.Result) leg {
	if !params.IsObject() {
		return wholeRequest
	}
	of := wholeRequest
	params.ForEach(func(key, value gjson.Result) bool {
		switch key.Str {
		case "do_remote_decode", "remote_decoder":
			if value.Type == gjson.True || value.IsObject() {
				of = prefillLeg
			}
		case "do_remote_prefill", "remote_prefiller":
			if (value.Type == gjson.True || value.IsObject()) && of == wholeRequest {
				of = decodeLeg
			}
		}
		return true
	})
	return of
}

// prefillParams returns the kv_transfer_params of a prefill leg: what the client
// gave, and vLLM's way of saying that another engine decodes. The transfer id is
// this proxy's own: engines change request ids.
func prefillParams(given gjson.Result, transferID string) string {
	const mode = `"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null,"transfer_id":"`
	var b strings.Builder
	b.WriteByte('{')
	if given.IsObject() {
		given.ForEach(func(key, value gjson.Result) bool {
			switch key.Str {
			case "do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "transfer_id":
			default:
				b.WriteString(key.Raw + ":" + value.Raw + ",")
			}
			return true
		})
	}
	b.WriteString(mode + transferID + `"}`)
	return b.String()
}
