package llama

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// Limits of a safetensors header.
const (
	MaxHeaderBytes = 100 << 20
	MaxTensors     = 1 << 13 // the deepest Config needs 2,307
	maxRank        = 8
)

// dtypeBytes lists the element sizes of the safetensors format. Only F32, F16
// and BF16 are read; the others are here so that a header is checked in full
// and an unreadable tensor is refused with its name.
var dtypeBytes = map[string]int64{
	"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1,
	"I16": 2, "U16": 2, "F16": 2, "BF16": 2,
	"I32": 4, "U32": 4, "F32": 4,
	"I64": 8, "U64": 8, "F64": 8,
}

// tensorInfo places one tensor: bytes begin to end of the data section.
type tensorInfo struct {
	dtype      string
	shape      []int64
	begin, end int64
}

// parseHeader reads the JSON header of a safetensors file whose data section
// has dataLen bytes. It checks what the format promises: no name twice, each
// tensor's bytes equal to its shape times its element size, and the tensors
// covering the data section without gap or overlap.
func parseHeader(header []byte, dataLen int64) (map[string]tensorInfo, error) {
	if len(header) > MaxHeaderBytes {
		return nil, fmt.Errorf("header has %d bytes, at most %d allowed", len(header), MaxHeaderBytes)
	}
	dec := json.NewDecoder(bytes.NewReader(header))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, fmt.Errorf("header is not a JSON object")
	}
	tensors := map[string]tensorInfo{}
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return nil, fmt.Errorf("cannot parse header: %w", err)
		}
		name, ok := t.(string)
		if !ok {
			return nil, fmt.Errorf("header has a key that is not a string")
		}
		if name == "__metadata__" {
			var meta map[string]string
			if err := dec.Decode(&meta); err != nil {
				return nil, fmt.Errorf("cannot parse __metadata__: %w", err)
			}
			continue
		}
		if _, twice := tensors[name]; twice {
			return nil, fmt.Errorf("tensor %q appears twice", name)
		}
		if len(tensors) == MaxTensors {
			return nil, fmt.Errorf("header names more than %d tensors", MaxTensors)
		}
		info, err := parseTensor(dec, dataLen)
		if err != nil {
			return nil, fmt.Errorf("tensor %q: %w", name, err)
		}
		tensors[name] = info
	}
	if _, err := dec.Token(); err != nil {
		return nil, fmt.Errorf("cannot parse header: %w", err)
	}
	// Writers pad the header with spaces to align the data.
	if rest := header[dec.InputOffset():]; len(bytes.TrimSpace(rest)) != 0 {
		return nil, fmt.Errorf("header has %d bytes after its JSON object", len(rest))
	}
	return tensors, checkCover(tensors, dataLen)
}

func parseTensor(dec *json.Decoder, dataLen int64) (tensorInfo, error) {
	var raw struct {
		Dtype   string  `json:"dtype"`
		Shape   []int64 `json:"shape"`
		Offsets []int64 `json:"data_offsets"`
	}
	if err := dec.Decode(&raw); err != nil {
		return tensorInfo{}, fmt.Errorf("cannot parse: %w", err)
	}
	size, ok := dtypeBytes[raw.Dtype]
	if !ok {
		return tensorInfo{}, fmt.Errorf("dtype %q is unknown", raw.Dtype)
	}
	if len(raw.Shape) > maxRank {
		return tensorInfo{}, fmt.Errorf("shape has %d dimensions, at most %d allowed", len(raw.Shape), maxRank)
	}
	if len(raw.Offsets) != 2 {
		return tensorInfo{}, fmt.Errorf("data_offsets has %d values, must have 2", len(raw.Offsets))
	}
	begin, end := raw.Offsets[0], raw.Offsets[1]
	if begin < 0 || end < begin || end > dataLen {
		return tensorInfo{}, fmt.Errorf("data_offsets [%d, %d] do not lie in the %d bytes of data", begin, end, dataLen)
	}
	// A zero dimension makes the product zero whatever the others are, so it is
	// looked for first; then each factor is checked before it is multiplied in.
	for _, d := range raw.Shape {
		if d < 0 {
			return tensorInfo{}, fmt.Errorf("shape %v has a negative dimension", raw.Shape)
		}
	}
	if slices.Contains(raw.Shape, 0) {
		size = 0
	}
	for _, d := range raw.Shape {
		if size > 0 && d > dataLen/size {
			return tensorInfo{}, fmt.Errorf("shape %v of %s is larger than the %d bytes of data", raw.Shape, raw.Dtype, dataLen)
		}
		size *= d
	}
	if size != end-begin {
		return tensorInfo{}, fmt.Errorf("data_offsets [%d, %d] hold %d bytes, shape %v of %s needs %d", begin, end, end-begin, raw.Shape, raw.Dtype, size)
	}
	return tensorInfo{dtype: raw.Dtype, shape: raw.Shape, begin: begin, end: end}, nil
}

func checkCover(tensors map[string]tensorInfo, dataLen int64) error {
	type placed struct {
		name string
		tensorInfo
	}
	order := make([]placed, 0, len(tensors))
	for name, t := range tensors {
		order = append(order, placed{name, t})
	}
	slices.SortFunc(order, func(a, b placed) int {
		if a.begin != b.begin {
			return int(min(1, max(-1, a.begin-b.begin)))
		}
		if a.end != b.end {
			return int(min(1, max(-1, a.end-b.end)))
		}
		return strings.Compare(a.name, b.name)
	})
	var at int64
	for _, t := range order {
		if t.begin != at {
			return fmt.Errorf("tensor %q begins at %d, must begin at %d: gap or overlap", t.name, t.begin, at)
		}
		at = t.end
	}
	if at != dataLen {
		return fmt.Errorf("tensors end at %d, data has %d bytes", at, dataLen)
	}
	return nil
}
