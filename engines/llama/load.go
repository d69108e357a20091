package llama

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
)

const (
	indexName     = "model.safetensors.index.json"
	maxIndexBytes = 64 << 20
)

// Load reads a Hugging Face folder: config.json of a LlamaForCausalLM and its
// weights in F32, F16 or BF16, which become float32. Weights are the files
// that model.safetensors.index.json names, or, without it, the one file whose
// name ends in ".safetensors". A feature that would change the numbers and is
// not supported, and a tensor that has no place in the model, are refused by
// name.
func Load(dir string) (*Model, error) {
	m, err := load(dir)
	if err != nil {
		return nil, fmt.Errorf("cannot load model at %q: %w", dir, err)
	}
	return m, nil
}

func load(dir string) (*Model, error) {
	raw, err := readConfigFile(dir)
	if err != nil {
		return nil, err
	}
	c, err := parseConfig(raw)
	if err != nil {
		return nil, err
	}
	id, err := folderWeightsID(dir)
	if err != nil {
		return nil, err
	}
	w, err := openWeights(dir)
	if err != nil {
		return nil, err
	}
	defer w.close()
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	m := &Model{config: c, id: filepath.Base(abs), weightsID: id, threads: 1}
	if err := m.readWeights(w); err != nil {
		return nil, err
	}
	m.setRope()
	return m, nil
}

func (m *Model) readWeights(w *weightSet) error {
	c := m.config
	hidden, inter := int64(c.HiddenSize), int64(c.IntermediateSize)
	q, kv := int64(c.Heads*c.HeadDim), int64(c.KVHeads*c.HeadDim)

	table := w.read("model.embed_tokens.weight", int64(c.VocabSize), hidden)
	m.norm = w.read("model.norm.weight", hidden)
	if m.head = table; !c.TieEmbeddings {
		m.head = w.read("lm_head.weight", int64(c.VocabSize), hidden)
	} else {
		// Some writers keep the tied matrix under its second name as well.
		w.ignore("lm_head.weight")
	}
	for i := 0; i < c.Layers && w.err == nil; i++ {
		p := fmt.Sprintf("model.layers.%d.", i)
		m.layers = append(m.layers, layer{
			attnNorm: w.read(p+"input_layernorm.weight", hidden),
			mlpNorm:  w.read(p+"post_attention_layernorm.weight", hidden),
			q:        w.read(p+"self_attn.q_proj.weight", q, hidden),
			k:        w.read(p+"self_attn.k_proj.weight", kv, hidden),
			v:        w.read(p+"self_attn.v_proj.weight", kv, hidden),
			o:        w.read(p+"self_attn.o_proj.weight", hidden, q),
			gate:     w.read(p+"mlp.gate_proj.weight", inter, hidden),
			up:       w.read(p+"mlp.up_proj.weight", inter, hidden),
			down:     w.read(p+"mlp.down_proj.weight", hidden, inter),
		})
		// Old checkpoints store the frequencies, which follow from rope_theta.
		w.ignore(p + "self_attn.rotary_emb.inv_freq")
	}
	if err := w.finish(); err != nil {
		return err
	}
	m.embed = func(dst []float32, token uint32) {
		copy(dst, table[int(token)*c.HiddenSize:])
	}
	return nil
}

// weightSet is the open files of a folder and which file has which tensor. The
// first failed read stays in err, so that callers may check once.
type weightSet struct {
	files  map[string]*tensorFile // by file name
	where  map[string]string      // tensor to file name
	unused map[string]bool
	err    error
}

func openWeights(dir string) (*weightSet, error) {
	w := &weightSet{files: map[string]*tensorFile{}, where: map[string]string{}, unused: map[string]bool{}}
	if err := w.open(dir); err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

func (w *weightSet) open(dir string) error {
	indexed, err := readIndex(dir)
	if err != nil {
		return err
	}
	names, err := weightFiles(dir)
	if err != nil {
		return err
	}
	if indexed != nil {
		names = nil
		for _, file := range indexed {
			names = append(names, file)
		}
		slices.Sort(names)
		names = slices.Compact(names)
		if len(names) > maxWeightFiles {
			return fmt.Errorf("%s names %d files, at most %d allowed", indexName, len(names), maxWeightFiles)
		}
	} else if len(names) != 1 {
		return fmt.Errorf("%d weight files %q and no %s", len(names), names, indexName)
	}
	for _, name := range names {
		f, err := openTensorFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		w.files[name] = f
		for tensor := range f.tensors {
			if indexed != nil && indexed[tensor] != name {
				return fmt.Errorf("tensor %q lies in %q, %s places it in %q", tensor, name, indexName, indexed[tensor])
			}
			w.where[tensor] = name
			w.unused[tensor] = true
		}
	}
	return nil
}

// readIndex returns tensor name to file name, or nil if the folder has no index.
func readIndex(dir string) (map[string]string, error) {
	raw, err := readBounded(filepath.Join(dir, indexName), maxIndexBytes)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return parseIndex(raw)
}

func parseIndex(raw []byte) (map[string]string, error) {
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(raw, &index); err != nil {
		return nil, fmt.Errorf("cannot parse %s: %w", indexName, err)
	}
	if len(index.WeightMap) == 0 {
		return nil, fmt.Errorf("%s has an empty weight_map", indexName)
	}
	for tensor, file := range index.WeightMap {
		// Only the folder's own files: an index must not reach elsewhere.
		if filepath.Base(file) != file || !strings.HasSuffix(file, ".safetensors") {
			return nil, fmt.Errorf("%s places tensor %q in %q, which is no plain .safetensors file name", indexName, tensor, file)
		}
	}
	return index.WeightMap, nil
}

func (w *weightSet) read(tensor string, shape ...int64) []float32 {
	if w.err != nil {
		return nil
	}
	file, ok := w.where[tensor]
	if !ok {
		w.err = fmt.Errorf("tensor %q is missing", tensor)
		return nil
	}
	delete(w.unused, tensor)
	values, err := w.files[file].read(tensor, shape...)
	if err != nil {
		w.err = fmt.Errorf("file %q: %w", file, err)
	}
	return values
}

func (w *weightSet) ignore(tensor string) { delete(w.unused, tensor) }

// finish returns the first error, or names a tensor that nothing has read: a
// bias or an adapter left out would give wrong numbers without a word.
func (w *weightSet) finish() error {
	if w.err != nil {
		return w.err
	}
	left := make([]string, 0, len(w.unused))
	for tensor := range w.unused {
		left = append(left, tensor)
	}
	if len(left) > 0 {
		return fmt.Errorf("tensor %q is not part of a Llama model of this shape", slices.Min(left))
	}
	return nil
}

func (w *weightSet) close() {
	for _, f := range w.files {
		f.close()
	}
}
