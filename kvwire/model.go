package kvwire

import (
	"crypto/sha256"
	"encoding/binary"
	"strconv"
)

// ModelFacts is everything per engine that changes what the numbers in a page
// mean. Two engines with equal facts may read each other's pages. The adapter
// and the cache salt are not here: they are per request, see [Scope]. The
// layout is not here either: it has the [Form].
type ModelFacts struct {
	// WeightsID names the exact weights: given by the user, or the commit of a
	// hub snapshot, or a digest over the checkpoint's files. Never empty.
	WeightsID string `json:"weights_id"`
	// DType is the logical type of the cache's numbers, such as "bfloat16".
	DType string `json:"dtype"`
	// Quantization names the cache's quantisation, "" for none.
	Quantization string `json:"quantization,omitempty"`
	// Scales identifies the quantisation's scales, "" where there are none.
	Scales string `json:"scales,omitempty"`
	// RoPE is a signature of the rotary embedding: base, scaling, fraction.
	RoPE string `json:"rope"`
	// Layers, KVHeads and HeadSize are those of the whole model, not of one
	// rank.
	Layers   int  `json:"layers"`
	KVHeads  int  `json:"kv_heads"`
	HeadSize int  `json:"head_size"`
	MLA      bool `json:"mla,omitempty"`
	// KVEpoch changes when the engine changes what it writes into a page.
	KVEpoch string `json:"kv_epoch,omitempty"`
}

const maxFact = 1024

// Validate reports the first field with a value that is not allowed.
func (m ModelFacts) Validate() error {
	for _, f := range []struct{ name, value string }{
		{"weights_id", m.WeightsID},
		{"dtype", m.DType},
		{"rope", m.RoPE},
		{"quantization", m.Quantization},
		{"scales", m.Scales},
		{"kv_epoch", m.KVEpoch},
	} {
		if len(f.value) > maxFact {
			return Errorf(CodeTooLarge, "model."+f.name, "%d bytes are more than %d", len(f.value), maxFact)
		}
	}
	if m.WeightsID == "" {
		return Errorf(CodeBadField, "model.weights_id", "is empty: without it two checkpoints of equal shape would share pages")
	}
	if m.DType == "" {
		return Errorf(CodeBadField, "model.dtype", "is empty")
	}
	for _, f := range []struct {
		name  string
		value int
	}{{"layers", m.Layers}, {"kv_heads", m.KVHeads}, {"head_size", m.HeadSize}} {
		if f.value < 1 || f.value > 1<<20 {
			return Errorf(CodeBadField, "model."+f.name, "%d is not between 1 and %d", f.value, 1<<20)
		}
	}
	return nil
}

// Namespace returns the digest of the facts and the page size: SHA-256 over
// "membrane-namespace-v1" and a zero byte, then each of weights_id, dtype,
// quantization, scales, rope, layers, kv_heads, head_size, mla ("true" or
// "false"), page_tokens and kv_epoch in this order, numbers in decimal, each
// after its length in bytes as four-byte little-endian.
func (m ModelFacts) Namespace(pageTokens int) Namespace {
	if !guard.weights() {
		m.WeightsID = ""
	}
	return Namespace(digestFields("membrane-namespace-v1",
		m.WeightsID, m.DType, m.Quantization, m.Scales, m.RoPE,
		strconv.Itoa(m.Layers), strconv.Itoa(m.KVHeads), strconv.Itoa(m.HeadSize),
		strconv.FormatBool(m.MLA), strconv.Itoa(pageTokens), m.KVEpoch))
}

func digestFields(domain string, fields ...string) [sha256.Size]byte {
	b := append([]byte(domain), 0)
	for _, f := range fields {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(f)))
		b = append(b, f...)
	}
	return sha256.Sum256(b)
}

// Descriptor says how the bytes of one rank's shard are laid out.
type Descriptor struct {
	// Layout is the layout's name, such as "vllm-lbhnc" or "canonical".
	Layout string `json:"layout"`
	// DType is the stored type of the numbers.
	DType string `json:"dtype"`
	// Packing names an inner order that the axes cannot express, such as the
	// instruction set of vLLM's CPU backend; "" for none.
	Packing string `json:"packing,omitempty"`
	// BlockTokens is the engine's own block, in tokens. An object is a whole
	// number of blocks, first tokens first.
	BlockTokens int `json:"block_tokens"`
	// BlockBytes is the size of one block of this shard, all its layers, in
	// bytes.
	BlockBytes int64 `json:"block_bytes"`
	// Axes names the axes of one block from the outermost to the innermost,
	// such as layer, kv, head, token, dim; Strides are theirs, in bytes. Both
	// may be empty where Layout says it all.
	Axes    []string `json:"axes,omitempty"`
	Strides []int64  `json:"strides,omitempty"`
	// TPSize and PPSize are the tensor and pipeline parallel sizes, TPRank and
	// PPRank this rank's place in them.
	TPSize int `json:"tp_size"`
	PPSize int `json:"pp_size"`
	TPRank int `json:"tp_rank"`
	PPRank int `json:"pp_rank"`
	// Layers and Heads are the window [first, end) of the model's layers and
	// KV heads that this shard holds.
	Layers [2]int `json:"layers"`
	Heads  [2]int `json:"heads"`
	// Scales are arrays of scales that lie in each block beside its numbers;
	// none where there are none or where they lie in the model.
	Scales []ScaleArray `json:"scales,omitempty"`
	// Group names the cache group of a hybrid model, such as "mamba" or
	// "sliding-window-4096": its blocks are opaque. "" for full attention.
	Group string `json:"group,omitempty"`
}

// ScaleArray says where the scales of a quantised cache lie in a block.
type ScaleArray struct {
	// Per says what shares one scale: [PerTensor], [PerHead] or [PerTokenHead].
	Per string `json:"per"`
	// DType is the type of the scales.
	DType string `json:"dtype"`
	// Offset is the array's first byte in the block. Axes and Strides are as
	// in [Descriptor]. Without axes the array follows what precedes it, in the
	// order layer, kv, head, token, and Offset is 0.
	Offset  int64    `json:"offset,omitempty"`
	Axes    []string `json:"axes,omitempty"`
	Strides []int64  `json:"strides,omitempty"`
}

// What shares one scale.
const (
	PerTensor    = "tensor" // K or V of a layer of a block
	PerHead      = "head"
	PerTokenHead = "token_head"
)

const (
	maxAxes   = 16
	maxScales = 4
)

// Validate reports the first field with a value that is not allowed for the
// given model.
func (d Descriptor) Validate(m ModelFacts) error {
	if err := d.check(); err != nil {
		return err
	}
	if d.Layers[0] < 0 || d.Layers[1] <= d.Layers[0] || d.Layers[1] > m.Layers {
		return Errorf(CodeBadField, "descriptor.layers", "[%d, %d) is not a window of %d layers", d.Layers[0], d.Layers[1], m.Layers)
	}
	if d.Heads[0] < 0 || d.Heads[1] <= d.Heads[0] || d.Heads[1] > m.KVHeads {
		return Errorf(CodeBadField, "descriptor.heads", "[%d, %d) is not a window of %d KV heads", d.Heads[0], d.Heads[1], m.KVHeads)
	}
	return nil
}

// check is what [Descriptor.Validate] can say without the model. What Form and
// Shard may be asked of has passed it.
func (d Descriptor) check() error {
	if d.Layout == "" || len(d.Layout) > maxFact || len(d.DType) > maxFact || len(d.Packing) > maxFact {
		return Errorf(CodeBadField, "descriptor.layout", "layout, dtype and packing need at most %d bytes, layout at least one", maxFact)
	}
	if d.DType == "" {
		return Errorf(CodeBadField, "descriptor.dtype", "is empty")
	}
	if d.BlockTokens < 1 || d.BlockTokens > MaxPageTokens {
		return Errorf(CodeBadField, "descriptor.block_tokens", "%d is not between 1 and %d", d.BlockTokens, MaxPageTokens)
	}
	if d.BlockBytes < 1 || d.BlockBytes > MaxObject {
		return Errorf(CodeBadField, "descriptor.block_bytes", "%d is not between 1 and %d", d.BlockBytes, MaxObject)
	}
	if err := checkAxes("descriptor", d.Axes, d.Strides); err != nil {
		return err
	}
	if err := d.checkScales(); err != nil {
		return err
	}
	for _, p := range []struct {
		name       string
		size, rank int
	}{{"tp", d.TPSize, d.TPRank}, {"pp", d.PPSize, d.PPRank}} {
		if p.size < 1 || p.size > MaxShards {
			return Errorf(CodeBadField, "descriptor."+p.name+"_size", "%d is not between 1 and %d", p.size, MaxShards)
		}
		if p.rank < 0 || p.rank >= p.size {
			return Errorf(CodeBadField, "descriptor."+p.name+"_rank", "%d is not below the size %d", p.rank, p.size)
		}
	}
	if d.TPSize*d.PPSize > MaxShards {
		return Errorf(CodeBadField, "descriptor.pp_size", "%d × %d ranks are more than %d", d.TPSize, d.PPSize, MaxShards)
	}
	return nil
}

func checkAxes(field string, axes []string, strides []int64) error {
	if len(axes) > maxAxes || len(strides) != len(axes) {
		return Errorf(CodeBadField, field+".strides", "%d strides for %d axes, at most %d", len(strides), len(axes), maxAxes)
	}
	for _, a := range axes {
		if a == "" || len(a) > 32 {
			return Errorf(CodeBadField, field+".axes", "%q is not an axis", truncate(a, 32))
		}
	}
	return nil
}

func (d Descriptor) checkScales() error {
	if len(d.Group) > maxFact {
		return Errorf(CodeTooLarge, "descriptor.group", "%d bytes are more than %d", len(d.Group), maxFact)
	}
	if len(d.Scales) > maxScales {
		return Errorf(CodeTooLarge, "descriptor.scales", "%d arrays are more than %d", len(d.Scales), maxScales)
	}
	for _, a := range d.Scales {
		switch a.Per {
		case PerTensor, PerHead, PerTokenHead:
		default:
			return Errorf(CodeBadField, "descriptor.scales.per", "%q is not one of %s, %s, %s", truncate(a.Per, 32), PerTensor, PerHead, PerTokenHead)
		}
		if a.DType == "" || len(a.DType) > maxFact {
			return Errorf(CodeBadField, "descriptor.scales.dtype", "needs 1 to %d bytes", maxFact)
		}
		if a.Offset < 0 || a.Offset > d.BlockBytes {
			return Errorf(CodeBadField, "descriptor.scales.offset", "%d is not between 0 and the block's %d bytes", a.Offset, d.BlockBytes)
		}
		if err := checkAxes("descriptor.scales", a.Axes, a.Strides); err != nil {
			return err
		}
	}
	return nil
}

// Shard returns this rank's shard: pipeline rank major, tensor rank minor.
func (d Descriptor) Shard() Shard {
	return Shard{Index: uint16(d.PPRank*d.TPSize + d.TPRank), Count: uint16(d.TPSize * d.PPSize)}
}

// Form returns the digest of the layout: the first eight bytes of the SHA-256
// over "membrane-form-v1" and a zero byte, then layout, dtype, packing,
// block_tokens, tp_size, pp_size, and for each axis its name and its stride,
// then for each array of scales "scales", per, dtype, offset, and each axis and
// stride, then "group=" and the group where there is one, encoded as for
// [ModelFacts.Namespace]. The rank, its windows and its block size in bytes are
// left out, so that all shards of a page share one form.
func (d Descriptor) Form() Form {
	fields := []string{d.Layout, d.DType, d.Packing, strconv.Itoa(d.BlockTokens), strconv.Itoa(d.TPSize), strconv.Itoa(d.PPSize)}
	fields = appendAxes(fields, d.Axes, d.Strides)
	for _, a := range d.Scales {
		fields = append(fields, "scales", a.Per, a.DType, strconv.FormatInt(a.Offset, 10))
		fields = appendAxes(fields, a.Axes, a.Strides)
	}
	if d.Group != "" {
		fields = append(fields, "group="+d.Group)
	}
	sum := digestFields("membrane-form-v1", fields...)
	return Form(sum[:FormSize])
}

func appendAxes(fields, axes []string, strides []int64) []string {
	for i, a := range axes {
		fields = append(fields, a, strconv.FormatInt(strides[i], 10))
	}
	return fields
}

// PageTokens returns the tokens in a page for an engine block and the page
// size that is asked for: the asked size where the block divides it, else the
// block where the asked size divides the block.
func PageTokens(asked, block int) (int, error) {
	switch {
	case block < 1 || asked < 1:
	case asked%block == 0:
		return asked, nil
	case block%asked == 0:
		return block, nil
	}
	return 0, Errorf(CodeBadField, "block_tokens", "a block of %d tokens and pages of %d do not divide each other: set --page-tokens to a multiple of the block", block, asked)
}
