package llama

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
)

// MaxConfigBytes bounds config.json.
const MaxConfigBytes = 1 << 20

// hfConfig names the fields of config.json that change the numbers. Pointers
// tell an absent field, which takes the default of transformers' LlamaConfig,
// from a zero.
type hfConfig struct {
	Architectures    []string        `json:"architectures"`
	ModelType        string          `json:"model_type"`
	HiddenSize       *int            `json:"hidden_size"`
	IntermediateSize *int            `json:"intermediate_size"`
	Layers           *int            `json:"num_hidden_layers"`
	Heads            *int            `json:"num_attention_heads"`
	KVHeads          *int            `json:"num_key_value_heads"`
	HeadDim          *int            `json:"head_dim"`
	VocabSize        *int            `json:"vocab_size"`
	MaxPositions     *int            `json:"max_position_embeddings"`
	RMSNormEps       *float64        `json:"rms_norm_eps"`
	RopeTheta        *float64        `json:"rope_theta"`
	RopeParameters   *hfRope         `json:"rope_parameters"`
	RopeScaling      *hfRope         `json:"rope_scaling"`
	PartialRotary    *float64        `json:"partial_rotary_factor"`
	Tie              bool            `json:"tie_word_embeddings"`
	HiddenAct        *string         `json:"hidden_act"`
	AttentionBias    bool            `json:"attention_bias"`
	MLPBias          bool            `json:"mlp_bias"`
	SlidingWindow    json.RawMessage `json:"sliding_window"`
	Quantization     json.RawMessage `json:"quantization_config"`
}

type hfRope struct {
	Type          *string  `json:"rope_type"`
	OldType       *string  `json:"type"`
	Theta         *float64 `json:"rope_theta"`
	PartialRotary *float64 `json:"partial_rotary_factor"`
}

// parseConfig reads the bytes of a config.json. Anything that would change the
// numbers and is not built here is refused by the name of its field.
func parseConfig(b []byte) (Config, error) {
	if len(b) > MaxConfigBytes {
		return Config{}, fmt.Errorf("config.json has %d bytes, at most %d allowed", len(b), MaxConfigBytes)
	}
	var hf hfConfig
	if err := json.Unmarshal(b, &hf); err != nil {
		return Config{}, fmt.Errorf("cannot parse config.json: %w", err)
	}
	if err := hf.refuse(); err != nil {
		return Config{}, err
	}
	need := func(name string, p *int) (int, error) {
		if p == nil {
			return 0, fmt.Errorf("%s is missing", name)
		}
		return *p, nil
	}
	c := Config{TieEmbeddings: hf.Tie}
	for _, f := range []struct {
		name string
		from *int
		to   *int
	}{
		{"hidden_size", hf.HiddenSize, &c.HiddenSize},
		{"intermediate_size", hf.IntermediateSize, &c.IntermediateSize},
		{"num_hidden_layers", hf.Layers, &c.Layers},
		{"num_attention_heads", hf.Heads, &c.Heads},
		{"vocab_size", hf.VocabSize, &c.VocabSize},
	} {
		v, err := need(f.name, f.from)
		if err != nil {
			return Config{}, err
		}
		*f.to = v
	}
	c.KVHeads = or(hf.KVHeads, c.Heads)
	if hf.HeadDim == nil && (c.Heads < 1 || c.HiddenSize%c.Heads != 0) {
		return Config{}, fmt.Errorf("head_dim is missing and hidden_size %d is no multiple of num_attention_heads %d", c.HiddenSize, c.Heads)
	}
	if hf.HeadDim != nil {
		c.HeadDim = *hf.HeadDim
	} else {
		c.HeadDim = c.HiddenSize / c.Heads
	}
	c.MaxPositions = or(hf.MaxPositions, 2048)
	c.RMSNormEps = or(hf.RMSNormEps, 1e-6)
	c.RopeTheta = or(hf.RopeTheta, 10000)
	// Newer transformers write theta inside rope_parameters.
	if hf.RopeParameters != nil {
		c.RopeTheta = or(hf.RopeParameters.Theta, c.RopeTheta)
	}
	return c, c.validate()
}

func (hf *hfConfig) refuse() error {
	if hf.ModelType != "llama" {
		return fmt.Errorf("model_type is %q, only \"llama\" is supported", hf.ModelType)
	}
	if !slices.Contains(hf.Architectures, "LlamaForCausalLM") {
		return fmt.Errorf("architectures is %q, must name LlamaForCausalLM", hf.Architectures)
	}
	if act := or(hf.HiddenAct, "silu"); act != "silu" {
		return fmt.Errorf("hidden_act is %q, only \"silu\" is supported", act)
	}
	if hf.AttentionBias {
		return fmt.Errorf("attention_bias is true, biases are not supported")
	}
	if hf.MLPBias {
		return fmt.Errorf("mlp_bias is true, biases are not supported")
	}
	if err := hf.RopeScaling.refuse("rope_scaling"); err != nil {
		return err
	}
	if err := hf.RopeParameters.refuse("rope_parameters"); err != nil {
		return err
	}
	if f := or(hf.PartialRotary, 1); f != 1 {
		return fmt.Errorf("partial_rotary_factor is %g, only 1 is supported", f)
	}
	if present(hf.SlidingWindow) {
		return fmt.Errorf("sliding_window is %s, sliding windows are not supported", hf.SlidingWindow)
	}
	if present(hf.Quantization) {
		return fmt.Errorf("quantization_config is set, quantized weights are not supported")
	}
	return nil
}

func (r *hfRope) refuse(field string) error {
	if r == nil {
		return nil
	}
	kind := r.Type
	if kind == nil {
		kind = r.OldType
	}
	// A rope_scaling object without a type is malformed rather than harmless.
	if kind == nil && field == "rope_scaling" {
		return fmt.Errorf("rope_scaling has no rope_type, scaled RoPE is not supported")
	}
	if t := or(kind, "default"); t != "default" {
		return fmt.Errorf("%s has rope_type %q, only \"default\" is supported", field, t)
	}
	if f := or(r.PartialRotary, 1); f != 1 {
		return fmt.Errorf("%s has partial_rotary_factor %g, only 1 is supported", field, f)
	}
	return nil
}

func present(raw json.RawMessage) bool {
	return len(raw) > 0 && !bytes.Equal(bytes.TrimSpace(raw), []byte("null"))
}

func or[T any](p *T, otherwise T) T {
	if p != nil {
		return *p
	}
	return otherwise
}
