package layout

import (
	"strings"

	"membrane/kvwire"
)

// dtypes are the types of numbers and scales, and their sizes in bytes. The
// names are torch's.
var dtypes = map[string]int{
	"float32":       4,
	"float16":       2,
	"bfloat16":      2,
	"float8_e4m3fn": 1,
	"float8_e5m2":   1,
	"int8":          1,
}

// rawBytes are the names under which engines keep 8-bit floats in tensors of
// bytes. What they mean then stands in the model's quantisation.
const rawBytes = "uint8"

// eightBit are the quantisations of a KV cache, as engines call them, that say
// which numbers the bytes are.
var eightBit = map[string]string{
	"fp8":                 "float8_e4m3fn",
	"fp8_e4m3":            "float8_e4m3fn",
	"fp8_e5m2":            "float8_e5m2",
	"int8":                "int8",
	"int8_per_token_head": "int8",
}

// dtypeOf returns the type of the numbers, with the same name for every engine
// that keeps the same numbers.
func dtypeOf(m kvwire.ModelFacts, name string) (string, int, error) {
	if name == rawBytes {
		meant, ok := eightBit[m.Quantization]
		if !ok {
			return "", 0, refuse("model.quantization", m.Quantization, phrase("one that says what numbers the bytes are: "+names(eightBit)))
		}
		name = meant
	}
	size, ok := dtypes[name]
	if !ok {
		return "", 0, refuse("descriptor.dtype", name, phrase("one of "+names(dtypes)))
	}
	if meant, ok := eightBit[m.Quantization]; ok && meant != name {
		return "", 0, refuse("descriptor.dtype", name, phrase(meant+" as model.quantization "+m.Quantization+" says"))
	}
	return name, size, nil
}

func names[V any](m map[string]V) string { return strings.Join(sortedKeys(m), ", ") }
