package llama

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestFolderWeightsIDVectors pins the ids of the committed checkpoints, for
// other languages to compare with.
func TestFolderWeightsIDVectors(t *testing.T) {
	t.Parallel()
	for dir, want := range map[string]string{
		"testdata/small-f32":  "sha256:58f8bb8d12cb0f03089c692ab5b12ca5acff536c4e8a3d15eb7d22ab00256a34",
		"testdata/small-bf16": "sha256:5e278e8e545ed76a254ebd562a84ec97d130a4343006561e5b561aa9a1eef04c",
	} {
		got, err := FolderWeightsID(dir)
		require.NoError(t, err)
		assert.Equal(t, want, got, dir)
	}
}

// TestFolderWeightsIDRecipe computes an id from the recipe as it is written, of
// files around the size from which samples are taken.
func TestFolderWeightsIDRecipe(t *testing.T) {
	t.Parallel()
	for _, size := range []int{10, 4096, 4097, 4096 + 63, 50001} {
		dir := t.TempDir()
		config := []byte(`{"a":1}`)
		file := binary.LittleEndian.AppendUint64(nil, 2)
		file = append(file, "{}"...)
		for i := len(file); i < size; i++ {
			file = append(file, byte(i*i>>3))
		}
		require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), config, 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "a.safetensors"), file, 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "ignored.bin"), file, 0o600))

		var b bytes.Buffer
		b.WriteString("membrane-weights-v1\x00")
		b.WriteString("\x0b\x00\x00\x00\x00\x00\x00\x00config.json\x07\x00\x00\x00\x00\x00\x00\x00")
		b.Write(config)
		b.WriteString("\x0d\x00\x00\x00\x00\x00\x00\x00a.safetensors")
		b.Write(binary.LittleEndian.AppendUint64(nil, uint64(size)))
		b.Write(file[:10])
		if size <= 4096 {
			b.Write(file)
		} else {
			for i := range 64 {
				b.Write(file[i*(size-4096)/63:][:4096])
			}
		}
		sum := sha256.Sum256(b.Bytes())
		got, err := FolderWeightsID(dir)
		require.NoError(t, err)
		assert.Equal(t, "sha256:"+hex.EncodeToString(sum[:]), got)
	}
}

// TestEqualShapesHaveDifferentIDs changes what two checkpoints of one shape may
// differ in: the config, a weight, a name.
func TestEqualShapesHaveDifferentIDs(t *testing.T) {
	t.Parallel()
	id := func(dir string) string {
		got, err := FolderWeightsID(dir)
		require.NoError(t, err)
		return got
	}
	base := id(folder(t, configWith(t, nil), smallTensors(t)))
	assert.Equal(t, base, id(folder(t, configWith(t, nil), smallTensors(t))))
	assert.NotEqual(t, base, id(folder(t, configWith(t, map[string]any{"rope_theta": 20000}), smallTensors(t))))

	tensors := smallTensors(t)
	head := tensors["lm_head.weight"]
	head.data = append([]byte{head.data[0] ^ 1}, head.data[1:]...)
	tensors["lm_head.weight"] = head
	assert.NotEqual(t, base, id(folder(t, configWith(t, nil), tensors)))

	dir := folder(t, configWith(t, nil), smallTensors(t))
	require.NoError(t, os.Rename(filepath.Join(dir, "model.safetensors"), filepath.Join(dir, "other.safetensors")))
	assert.NotEqual(t, base, id(dir))
}

func TestFolderWeightsIDRefuses(t *testing.T) {
	t.Parallel()
	fails := func(dir, want string) {
		t.Helper()
		_, err := FolderWeightsID(dir)
		assert.ErrorContains(t, err, want)
		assert.ErrorContains(t, err, "cannot name weights at")
	}
	dir := t.TempDir()
	fails(filepath.Join(dir, "absent"), "no such file")
	fails(dir, "config.json")
	config := filepath.Join(dir, "config.json")
	require.NoError(t, os.WriteFile(config, []byte(strings.Repeat(" ", MaxConfigBytes)), 0o600))
	fails(dir, "no file ends in .safetensors")
	weights := filepath.Join(dir, "x.safetensors")
	require.NoError(t, os.WriteFile(weights, binary.LittleEndian.AppendUint64(nil, 1), 0o600))
	fails(dir, "the file has 0 bytes after it")
	require.NoError(t, os.WriteFile(weights, binary.LittleEndian.AppendUint64(nil, 0), 0o600))
	_, err := FolderWeightsID(dir)
	require.NoError(t, err, "config.json of exactly the limit")
	require.NoError(t, os.WriteFile(config, []byte(strings.Repeat(" ", MaxConfigBytes+1)), 0o600))
	fails(dir, "larger than 1048576 bytes")
	require.NoError(t, os.WriteFile(config, []byte("{}"), 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "y.safetensors"), 0o700))
	fails(dir, "not a regular file")
}
