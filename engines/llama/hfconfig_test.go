package llama

import (
	"encoding/json"
	"maps"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// configWith returns the committed config.json with fields changed; a nil
// value removes the field.
func configWith(t *testing.T, change map[string]any) []byte {
	t.Helper()
	raw, err := os.ReadFile("testdata/small-f32/config.json")
	require.NoError(t, err)
	var c map[string]any
	require.NoError(t, json.Unmarshal(raw, &c))
	maps.Copy(c, change)
	maps.DeleteFunc(c, func(_ string, v any) bool { return v == nil })
	raw, err = json.Marshal(c)
	require.NoError(t, err)
	return raw
}

func TestParseConfig(t *testing.T) {
	t.Parallel()
	c, err := parseConfig(configWith(t, nil))
	require.NoError(t, err)
	assert.Equal(t, Config{
		HiddenSize: 64, IntermediateSize: 96, Layers: 2, Heads: 4, KVHeads: 2, HeadDim: 16,
		VocabSize: 256, MaxPositions: 2048, RMSNormEps: 1e-5, RopeTheta: 10000,
	}, c)

	c, err = parseConfig(configWith(t, map[string]any{
		"num_key_value_heads": nil, "head_dim": nil, "rms_norm_eps": nil, "rope_theta": nil,
		"hidden_act": nil, "max_position_embeddings": nil,
	}))
	require.NoError(t, err, "fields with defaults")
	assert.Equal(t, 4, c.KVHeads)
	assert.Equal(t, 16, c.HeadDim)
	assert.Equal(t, 1e-6, c.RMSNormEps)
	assert.Equal(t, 10000.0, c.RopeTheta)

	c, err = parseConfig(configWith(t, map[string]any{
		"rope_theta":      nil,
		"rope_parameters": map[string]any{"rope_type": "default", "rope_theta": 5e5},
	}))
	require.NoError(t, err, "where newer transformers write theta")
	assert.Equal(t, 5e5, c.RopeTheta)

	_, err = parseConfig(configWith(t, map[string]any{"num_hidden_layers": MaxLayers}))
	require.NoError(t, err, "exactly the limit")
}

func TestParseConfigRefuses(t *testing.T) {
	t.Parallel()
	type fields = map[string]any
	for _, c := range []struct {
		change fields
		want   string
	}{
		{fields{"model_type": "mistral"}, `model_type is "mistral"`},
		{fields{"architectures": []string{"LlamaModel"}}, "LlamaForCausalLM"},
		{fields{"architectures": nil}, "LlamaForCausalLM"},
		{fields{"hidden_act": "gelu"}, `hidden_act is "gelu"`},
		{fields{"attention_bias": true}, "attention_bias is true"},
		{fields{"mlp_bias": true}, "mlp_bias is true"},
		{fields{"rope_scaling": fields{"rope_type": "llama3", "factor": 8}}, `rope_scaling has rope_type "llama3"`},
		{fields{"rope_scaling": fields{"type": "linear", "factor": 2}}, `rope_scaling has rope_type "linear"`},
		{fields{"rope_scaling": fields{"factor": 2}}, "rope_scaling has no rope_type"},
		{fields{"rope_parameters": fields{"rope_type": "yarn"}}, `rope_parameters has rope_type "yarn"`},
		{fields{"rope_parameters": fields{"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"},
		{fields{"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"},
		{fields{"sliding_window": 128}, "sliding_window is 128"},
		{fields{"quantization_config": fields{"quant_method": "awq"}}, "quantization_config is set"},
		{fields{"hidden_size": nil}, "hidden_size is missing"},
		{fields{"vocab_size": nil}, "vocab_size is missing"},
		{fields{"hidden_size": 0}, "hidden_size is 0"},
		{fields{"hidden_size": -64}, "hidden_size is -64"},
		{fields{"hidden_size": MaxHiddenSize + 1}, "hidden_size is 16385"},
		{fields{"num_hidden_layers": MaxLayers + 1}, "num_hidden_layers is 257"},
		{fields{"intermediate_size": MaxIntermediateSize + 1}, "intermediate_size is 65537"},
		{fields{"vocab_size": MaxVocabSize + 1}, "vocab_size is 1048577"},
		{fields{"max_position_embeddings": MaxMaxPositions + 1}, "max_position_embeddings is 16777217"},
		{fields{"head_dim": MaxHeadDim + 2}, "head_dim is 514"},
		{fields{"head_dim": 15}, "head_dim is 15, must be even"},
		{fields{"head_dim": nil, "num_attention_heads": 0}, "head_dim is missing"},
		{fields{"head_dim": nil, "num_attention_heads": 5}, "head_dim is missing"},
		{fields{"num_attention_heads": MaxHeads + 2}, "num_attention_heads is 258"},
		{fields{"num_key_value_heads": 3}, "multiple of num_key_value_heads 3"},
		{fields{"rms_norm_eps": 0}, "rms_norm_eps is 0"},
		{fields{"rope_theta": 0.5}, "rope_theta is 0.5"},
		{fields{"hidden_size": 1.5}, "cannot parse config.json"},
	} {
		_, err := parseConfig(configWith(t, c.change))
		assert.ErrorContains(t, err, c.want, "%v", c.change)
	}
	_, err := parseConfig([]byte("[]"))
	assert.ErrorContains(t, err, "cannot parse config.json")
	_, err = parseConfig([]byte(strings.Repeat(" ", MaxConfigBytes+1)))
	assert.ErrorContains(t, err, "at most 1048576 allowed")
}

func FuzzParseConfig(f *testing.F) {
	raw, err := os.ReadFile("testdata/small-f32/config.json")
	require.NoError(f, err)
	f.Add(raw)
	f.Add([]byte(`{"rope_scaling":{},"num_attention_heads":0}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, err := parseConfig(b); err == nil {
			require.NoError(t, c.validate())
			require.Positive(t, c.kvRow())
		}
	})
}
