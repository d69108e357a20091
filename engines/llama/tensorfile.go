package llama

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
)

// tensorFile is an open safetensors file whose header has been checked.
type tensorFile struct {
	file    *os.File
	tensors map[string]tensorInfo
	data    int64 // offset of the data section
}

func openTensorFile(path string) (*tensorFile, error) {
	f, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	t, err := newTensorFile(f)
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("cannot read weights at %q: %w", path, err)
	}
	return t, nil
}

func newTensorFile(f *os.File) (*tensorFile, error) {
	header, size, err := readHeader(f)
	if err != nil {
		return nil, err
	}
	data := int64(len(header))
	tensors, err := parseHeader(header[8:], size-data)
	if err != nil {
		return nil, err
	}
	return &tensorFile{file: f, tensors: tensors, data: data}, nil
}

// readHeader returns the first 8+N bytes of a safetensors file, N being the
// little-endian length in the first 8, and the size of the file.
func readHeader(f *os.File) (header []byte, size int64, err error) {
	st, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	size = st.Size()
	if size < 8 {
		return nil, 0, fmt.Errorf("file has %d bytes, a safetensors file has at least 8", size)
	}
	var prefix [8]byte
	if _, err := f.ReadAt(prefix[:], 0); err != nil {
		return nil, 0, fmt.Errorf("cannot read header length: %w", err)
	}
	n := binary.LittleEndian.Uint64(prefix[:])
	if n > MaxHeaderBytes {
		return nil, 0, fmt.Errorf("header length is %d, at most %d allowed", n, MaxHeaderBytes)
	}
	if int64(n) > size-8 {
		return nil, 0, fmt.Errorf("header length is %d, the file has %d bytes after it", n, size-8)
	}
	header = make([]byte, 8+n)
	if _, err := f.ReadAt(header, 0); err != nil {
		return nil, 0, fmt.Errorf("cannot read header: %w", err)
	}
	return header, size, nil
}

// read returns a tensor as float32 in row-major order, refusing another shape.
func (t *tensorFile) read(name string, shape ...int64) ([]float32, error) {
	info, ok := t.tensors[name]
	if !ok {
		return nil, fmt.Errorf("tensor %q is missing", name)
	}
	if !slices.Equal(info.shape, shape) {
		return nil, fmt.Errorf("tensor %q has shape %v, must have %v", name, info.shape, shape)
	}
	var decode func(b []byte) float32
	switch info.dtype {
	case "F32":
		decode = func(b []byte) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(b)) }
	case "BF16":
		decode = func(b []byte) float32 { return bf16(binary.LittleEndian.Uint16(b)) }
	case "F16":
		decode = func(b []byte) float32 { return f16(binary.LittleEndian.Uint16(b)) }
	default:
		return nil, fmt.Errorf("tensor %q has dtype %s, only F32, F16 and BF16 are supported", name, info.dtype)
	}
	width := int(dtypeBytes[info.dtype])
	out := make([]float32, 0, (info.end-info.begin)/int64(width))
	r := io.NewSectionReader(t.file, t.data+info.begin, info.end-info.begin)
	buf := make([]byte, 64<<10)
	for len(out) < cap(out) {
		b := buf[:min(len(buf), (cap(out)-len(out))*width)]
		if _, err := io.ReadFull(r, b); err != nil {
			return nil, fmt.Errorf("cannot read tensor %q: %w", name, err)
		}
		for ; len(b) > 0; b = b[width:] {
			out = append(out, decode(b))
		}
	}
	return out, nil
}

func (t *tensorFile) close() { _ = t.file.Close() }

func bf16(u uint16) float32 { return math.Float32frombits(uint32(u) << 16) }

func f16(u uint16) float32 {
	sign, exp, frac := uint32(u>>15)<<31, uint32(u>>10)&31, uint32(u)&1023
	switch {
	case exp == 31:
		return math.Float32frombits(sign | 0xff<<23 | frac<<13)
	case exp == 0:
		// Subnormal halves are multiples of 2^-24, exact in float32.
		v := float32(frac) * (1.0 / (1 << 24))
		return math.Float32frombits(math.Float32bits(v) | sign)
	default:
		return math.Float32frombits(sign | (exp+112)<<23 | frac<<13)
	}
}
