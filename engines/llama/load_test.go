package llama

import (
	"encoding/binary"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// rawTensor is one tensor of a file made in a test.
type rawTensor struct {
	dtype string
	shape []int64
	data  []byte
}

func writeTensors(t *testing.T, path string, tensors map[string]rawTensor) {
	t.Helper()
	header, data := map[string]any{}, []byte{}
	for _, name := range slices.Sorted(maps.Keys(tensors)) {
		x := tensors[name]
		header[name] = map[string]any{"dtype": x.dtype, "shape": x.shape, "data_offsets": []int{len(data), len(data) + len(x.data)}}
		data = append(data, x.data...)
	}
	raw, err := json.Marshal(header)
	require.NoError(t, err)
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(raw)))
	require.NoError(t, os.WriteFile(path, slices.Concat(b, raw, data), 0o600))
}

// smallTensors returns the tensors of the committed F32 checkpoint.
func smallTensors(t *testing.T) map[string]rawTensor {
	t.Helper()
	const path = "testdata/small-f32/model.safetensors"
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	f, err := openTensorFile(path)
	require.NoError(t, err)
	defer f.close()
	out := map[string]rawTensor{}
	for name, info := range f.tensors {
		out[name] = rawTensor{info.dtype, info.shape, raw[f.data+info.begin : f.data+info.end]}
	}
	return out
}

// folder writes a checkpoint of one file.
func folder(t *testing.T, config []byte, tensors map[string]rawTensor) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), config, 0o600))
	writeTensors(t, filepath.Join(dir, "model.safetensors"), tensors)
	return dir
}

func TestLoad(t *testing.T) {
	t.Parallel()
	m, err := Load("testdata/small-bf16")
	require.NoError(t, err)
	assert.Equal(t, "small-bf16", m.ID())
	id, err := FolderWeightsID("testdata/small-bf16")
	require.NoError(t, err)
	assert.Equal(t, id, m.WeightsID())
	assert.True(t, m.Config().TieEmbeddings)
	assert.False(t, m.Config().AnyInputID)
}

// TestLoadHalfPrecision keeps one matrix as F16, whose values are exact there.
func TestLoadHalfPrecision(t *testing.T) {
	t.Parallel()
	tensors := smallTensors(t)
	name := "lm_head.weight"
	var data []byte
	for i := range 256 * 64 {
		data = binary.LittleEndian.AppendUint16(data, uint16(0x3c00+i%1024))
	}
	tensors[name] = rawTensor{"F16", []int64{256, 64}, data}
	m, err := Load(folder(t, configWith(t, nil), tensors))
	require.NoError(t, err)
	for i, v := range m.head {
		require.Equal(t, 1+float32(i%1024)/1024, v)
	}
}

func TestLoadRefuses(t *testing.T) {
	t.Parallel()
	change := func(name string, x *rawTensor) string {
		tensors := smallTensors(t)
		delete(tensors, name)
		if x != nil {
			tensors[name] = *x
		}
		return folder(t, configWith(t, nil), tensors)
	}
	withConfig := func(fields map[string]any) string {
		return folder(t, configWith(t, fields), smallTensors(t))
	}
	const k = "model.layers.1.self_attn.k_proj.weight"
	for want, dir := range map[string]string{
		`tensor "` + k + `" is missing`:                change(k, nil),
		"has shape [64 32], must have [32 64]":         change(k, &rawTensor{"F32", []int64{64, 32}, make([]byte, 64*32*4)}),
		"has dtype I32, only F32, F16 and BF16":        change(k, &rawTensor{"I32", []int64{32, 64}, make([]byte, 64*32*4)}),
		`"x.bias" is not part`:                         change("x.bias", &rawTensor{"F32", []int64{1}, make([]byte, 4)}),
		"has shape [256 64], must have [255 64]":       withConfig(map[string]any{"vocab_size": 255, "tie_word_embeddings": false}),
		`"model.layers.1.`:                             withConfig(map[string]any{"num_hidden_layers": 1}),
		`"model.layers.2.input_layernorm.weight" is m`: withConfig(map[string]any{"num_hidden_layers": 3}),
		"rope_scaling":                                 withConfig(map[string]any{"rope_scaling": map[string]any{"rope_type": "yarn"}}),
		"config.json":                                  t.TempDir(),
	} {
		_, err := Load(dir)
		require.ErrorContains(t, err, want)
		assert.ErrorContains(t, err, "cannot load model at")
	}
	// Tied or old checkpoints may hold tensors that nothing needs.
	_, err := Load(withConfig(map[string]any{"tie_word_embeddings": true}))
	assert.NoError(t, err)
	_, err = Load(change("model.layers.0.self_attn.rotary_emb.inv_freq", &rawTensor{"F32", []int64{8}, make([]byte, 32)}))
	assert.NoError(t, err)

	dir := withConfig(nil)
	require.NoError(t, os.Truncate(filepath.Join(dir, "model.safetensors"), 380000))
	_, err = Load(dir)
	assert.ErrorContains(t, err, "do not lie in the")

	dir = withConfig(nil)
	writeTensors(t, filepath.Join(dir, "more.safetensors"), nil)
	_, err = Load(dir)
	assert.ErrorContains(t, err, "2 weight files")
}

func TestIndexStaysInTheFolder(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "", ".", "..", "model.bin"} {
		raw, err := json.Marshal(map[string]any{"weight_map": map[string]string{"a": file}})
		require.NoError(t, err)
		_, err = parseIndex(raw)
		assert.ErrorContains(t, err, "no plain .safetensors file name", file)
	}
	_, err := parseIndex([]byte(`{}`))
	assert.ErrorContains(t, err, "empty weight_map")
	_, err = parseIndex([]byte(`{`))
	assert.ErrorContains(t, err, "cannot parse")

	dir := folder(t, configWith(t, nil), smallTensors(t))
	index := []byte(`{"weight_map":{"lm_head.weight":"model.safetensors"}}`)
	require.NoError(t, os.WriteFile(filepath.Join(dir, indexName), index, 0o600))
	_, err = Load(dir)
	assert.ErrorContains(t, err, "places it in")
}

func FuzzParseIndex(f *testing.F) {
	raw, err := os.ReadFile("testdata/small-bf16/" + indexName)
	require.NoError(f, err)
	f.Add(raw)
	f.Add([]byte(`{"weight_map":{"a":"../x.safetensors"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		index, err := parseIndex(b)
		if err != nil {
			return
		}
		for _, file := range index {
			require.Equal(t, "dir/"+file, filepath.Join("dir", file))
		}
	})
}
