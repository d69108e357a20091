package fragments

import (
	"crypto/sha256"
	"encoding/hex"

	"membrane/engines/llama"
	"membrane/kvwire"
	"membrane/sidecar/auth"
)

// WindowTokens is how many tokens a fragment has; the last of a prompt may
// have fewer.
const WindowTokens = 128

// Fragment describes a window of KV that is held here. Its JSON form is the
// predecessor's envelope, schema version 5.
type Fragment struct {
	SchemaVersion int      `json:"schema_version"`
	Tenant        string   `json:"tenant_id"`
	Identity      Identity `json:"identity"`
	// PayloadRef is the payload hash.
	PayloadRef string `json:"payload_ref"`
	// PayloadSize is the size of the KV, in bytes.
	PayloadSize int64 `json:"payload_size"`
	// TTL, ReuseScore and VersionID are the predecessor's defaults. Nothing
	// expires here by time: a fragment leaves when the cache needs its room.
	TTL        float64 `json:"ttl"`
	ReuseScore float64 `json:"reuse_score"`
	VersionID  int     `json:"version_id"`
	// Consistency is "eventual": a fragment is where it was made or fetched,
	// and others learn of it through the directory.
	Consistency string `json:"consistency"`
	HLC         int64  `json:"hlc"`
	Compat      string `json:"fingerprint_compat"`
}

// Identity is the ten fields that say what a fragment is.
type Identity struct {
	// PayloadHash is the SHA-256 of the KV bytes, in hexadecimal.
	PayloadHash       string `json:"payload_hash"`
	ModelID           string `json:"model_id"`
	ModelRevision     string `json:"model_revision"`
	TokenizerName     string `json:"tokenizer_name"`
	TokenizerRevision string `json:"tokenizer_revision"`
	// LayerRange, HeadRange and TokenSpan are inclusive; heads are KV heads.
	LayerRange [2]int `json:"layer_range"`
	HeadRange  [2]int `json:"head_range"`
	TokenSpan  [2]int `json:"token_span"`
	DType      string `json:"dtype"`
	// Shape is [layers, 2 (key, value), KV heads, tokens, head size].
	Shape []int `json:"shape"`
}

// layout is what a model's pages are called.
type layout struct {
	namespace kvwire.Namespace
	form      kvwire.Form
}

// layoutOf names the pages of a model. A short window has fewer tokens on its
// token axis, so the form gives the order of the axes and no strides.
func layoutOf(m *llama.Model) layout {
	c := m.Config()
	facts := kvwire.ModelFacts{
		WeightsID: m.WeightsID(), DType: "float32", RoPE: "base=10000",
		Layers: c.Layers, KVHeads: c.KVHeads, HeadSize: c.HeadDim,
	}
	d := kvwire.Descriptor{Layout: "fragment-layer-kv-head-token-dim", DType: "float32", BlockTokens: WindowTokens, TPSize: 1, PPSize: 1}
	return layout{facts.Namespace(WindowTokens), d.Form()}
}

// describe returns a window's public description.
func describe(tenant, modelID, payloadHash string, c llama.Config, start, tokens int, size int64) Fragment {
	return Fragment{
		SchemaVersion: 5, Tenant: tenant, PayloadRef: payloadHash, PayloadSize: size,
		TTL: 3600, ReuseScore: 0.5, VersionID: 1, Consistency: "eventual",
		Identity: Identity{
			PayloadHash: payloadHash, ModelID: modelID, TokenizerName: modelID,
			LayerRange: [2]int{0, c.Layers - 1}, HeadRange: [2]int{0, c.KVHeads - 1},
			TokenSpan: [2]int{start, start + tokens - 1}, DType: "float32",
			Shape: []int{c.Layers, 2, c.KVHeads, tokens, c.HeadDim},
		},
	}
}

func payloadHash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// StorageKey returns the name of a fragment in an inventory: the payload hash
// for the tenant public, else "tenant:hash".
func (f Fragment) StorageKey() string {
	if f.Tenant == auth.PublicTenant {
		return f.PayloadRef
	}
	return f.Tenant + ":" + f.PayloadRef
}
