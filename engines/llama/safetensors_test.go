package llama

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParseHeader(t *testing.T) {
	t.Parallel()
	got, err := parseHeader([]byte(`{"__metadata__":{"format":"pt"},`+
		`"b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]},`+
		`"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},`+
		`"scalar":{"dtype":"U8","shape":[],"data_offsets":[14,15]},`+
		`"none":{"dtype":"I64","shape":[0,9223372036854775807],"data_offsets":[8,8]}}   `), 15)
	require.NoError(t, err)
	assert.Equal(t, map[string]tensorInfo{
		"a":      {"F32", []int64{1, 2}, 0, 8},
		"b":      {"BF16", []int64{3}, 8, 14},
		"none":   {"I64", []int64{0, 9223372036854775807}, 8, 8},
		"scalar": {"U8", []int64{}, 14, 15},
	}, got)
	got, err = parseHeader([]byte(`{}`), 0)
	require.NoError(t, err)
	assert.Empty(t, got)
}

func TestParseHeaderRefuses(t *testing.T) {
	t.Parallel()
	one := func(dtype, shape, offsets string) string {
		return fmt.Sprintf(`{"a":{"dtype":%q,"shape":%s,"data_offsets":%s}}`, dtype, shape, offsets)
	}
	for _, c := range []struct{ header, want string }{
		{``, "not a JSON object"},
		{`[]`, "not a JSON object"},
		{`{"a"`, "tensor \"a\""},
		{`{"a":1}`, `tensor "a"`},
		{`{} {}`, "after its JSON object"},
		{`{"__metadata__":{"x":1}}`, "__metadata__"},
		{`{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}`, "appears twice"},
		{one("F4", "[8]", "[0,8]"), `dtype "F4" is unknown`},
		{one("U8", "[8]", "[0,8,9]"), "data_offsets has 3 values"},
		{one("U8", "[8]", "[]"), "data_offsets has 0 values"},
		{one("U8", "[8]", "[-1,7]"), "do not lie in the 8 bytes"},
		{one("U8", "[8]", "[8,0]"), "do not lie in the 8 bytes"},
		{one("U8", "[9]", "[0,9]"), "do not lie in the 8 bytes"},
		{one("U8", "[7]", "[0,8]"), "needs 7"},
		{one("U8", "[-8]", "[0,8]"), "negative dimension"},
		{one("U8", "[0,-8]", "[0,0]"), "negative dimension"},
		{one("F32", "[4611686018427387904,4]", "[0,0]"), "is larger than the 8 bytes"},
		{one("U8", "[1,1,1,1,1,1,1,1,8]", "[0,8]"), "9 dimensions"},
		{one("U8", "[7]", "[1,8]"), "must begin at 0"},
		{one("U8", "[7]", "[0,7]"), "tensors end at 7"},
		{`{"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}`, "gap or overlap"},
	} {
		_, err := parseHeader([]byte(c.header), 8)
		assert.ErrorContains(t, err, c.want, c.header)
	}
	_, err := parseHeader([]byte(one("U8", "[1,1,1,1,1,1,1,8]", "[0,8]")), 8)
	assert.NoError(t, err, "exactly the highest rank")
}

func TestParseHeaderCountsTensors(t *testing.T) {
	t.Parallel()
	header := func(n int) []byte {
		var b strings.Builder
		b.WriteByte('{')
		for i := range n {
			fmt.Fprintf(&b, `"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},`, i)
		}
		return []byte(strings.TrimSuffix(b.String(), ",") + "}")
	}
	got, err := parseHeader(header(MaxTensors), 0)
	require.NoError(t, err)
	assert.Len(t, got, MaxTensors)
	_, err = parseHeader(header(MaxTensors+1), 0)
	assert.ErrorContains(t, err, "more than 8192 tensors")
}

// TestReadHeaderBoundsLength writes lengths that the file does not have; none
// may be allocated.
func TestReadHeaderBoundsLength(t *testing.T) {
	t.Parallel()
	write := func(n uint64, rest int) error {
		path := filepath.Join(t.TempDir(), "x.safetensors")
		b := binary.LittleEndian.AppendUint64(nil, n)
		require.NoError(t, os.WriteFile(path, append(b, bytes.Repeat([]byte(" "), rest)...), 0o600))
		_, err := openTensorFile(path)
		return err
	}
	assert.ErrorContains(t, write(1<<63, 10), "header length is 9223372036854775808")
	assert.ErrorContains(t, write(MaxHeaderBytes+1, 10), "at most 104857600 allowed")
	assert.ErrorContains(t, write(MaxHeaderBytes, 10), "the file has 10 bytes after it")
	assert.ErrorContains(t, write(11, 10), "the file has 10 bytes after it")
	assert.ErrorContains(t, write(10, 10), "not a JSON object")

	path := filepath.Join(t.TempDir(), "short.safetensors")
	require.NoError(t, os.WriteFile(path, []byte("1234567"), 0o600))
	_, err := openTensorFile(path)
	assert.ErrorContains(t, err, "file has 7 bytes")
	_, err = openTensorFile(t.TempDir())
	assert.ErrorContains(t, err, "not a regular file")
}

func FuzzParseHeader(f *testing.F) {
	raw, err := os.ReadFile("testdata/small-f32/model.safetensors")
	require.NoError(f, err)
	n := int64(binary.LittleEndian.Uint64(raw))
	f.Add(raw[8:8+n], int64(len(raw))-8-n)
	f.Add([]byte(`{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}`), int64(0))
	f.Add([]byte(`{"a":{"dtype":"U8","shape":[0,9223372036854775807],"data_offsets":[0,0]}} `), int64(0))
	f.Fuzz(func(t *testing.T, header []byte, dataLen int64) {
		tensors, err := parseHeader(header, dataLen)
		if err != nil {
			return
		}
		var total int64
		for name, info := range tensors {
			size := dtypeBytes[info.dtype]
			for _, d := range info.shape {
				size *= d
			}
			require.Equal(t, info.end-info.begin, size, name)
			total += size
		}
		require.Equal(t, dataLen, total)
	})
}
