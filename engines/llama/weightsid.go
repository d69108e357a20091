package llama

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const (
	weightSamples     = 64
	weightSampleBytes = 4096
	maxWeightFiles    = 4096
)

// FolderWeightsID names the weights in a Hugging Face folder without reading
// all of them. It returns "sha256:" and 64 lowercase hexadecimal digits of a
// SHA-256 over, in this order (u64 is 8 bytes, little-endian):
//
//   - the bytes "membrane-weights-v1" and one zero byte;
//   - for config.json: u64 length of the name "config.json", the name, u64 size
//     of the file, its whole content;
//   - for every other entry of the folder whose name ends in ".safetensors"
//     (hidden ones too, subfolders not searched), sorted by the bytes of the
//     name: u64 length of the name, the name, u64 size of the file, the first
//     8+N bytes of the file (N is the u64 in its first 8 bytes, at most
//     100 MiB), then the samples: of a file of at most 4096 bytes the whole
//     file once, of a larger one 64 times 4096 bytes, sample i (0 to 63) at
//     offset floor(i*(size-4096)/63).
//
// Symbolic links are followed. A folder without config.json or without a
// weights file, and a file that is not regular or whose header length does not
// fit it, are errors.
func FolderWeightsID(dir string) (string, error) {
	id, err := folderWeightsID(dir)
	if err != nil {
		return "", fmt.Errorf("cannot name weights at %q: %w", dir, err)
	}
	return id, nil
}

func folderWeightsID(dir string) (string, error) {
	config, err := readConfigFile(dir)
	if err != nil {
		return "", err
	}
	names, err := weightFiles(dir)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	h.Write([]byte("membrane-weights-v1\x00"))
	hashFileHead(h, configName, int64(len(config)))
	h.Write(config)
	for _, name := range names {
		if err := hashWeightFile(h, dir, name); err != nil {
			return "", fmt.Errorf("file %q: %w", name, err)
		}
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), nil
}

func hashFileHead(h hash.Hash, name string, size int64) {
	h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(name))))
	h.Write([]byte(name))
	h.Write(binary.LittleEndian.AppendUint64(nil, uint64(size)))
}

func hashWeightFile(h hash.Hash, dir, name string) error {
	f, err := openRegular(filepath.Join(dir, name))
	if err != nil {
		return err
	}
	defer f.Close()
	header, size, err := readHeader(f)
	if err != nil {
		return err
	}
	hashFileHead(h, name, size)
	h.Write(header)
	if size <= weightSampleBytes {
		_, err := io.CopyN(h, io.NewSectionReader(f, 0, size), size)
		return err
	}
	var sample [weightSampleBytes]byte
	for i := range int64(weightSamples) {
		if _, err := f.ReadAt(sample[:], i*(size-weightSampleBytes)/(weightSamples-1)); err != nil {
			return fmt.Errorf("cannot read sample %d: %w", i, err)
		}
		h.Write(sample[:])
	}
	return nil
}

// weightFiles returns the names of the folder's safetensors files, sorted.
func weightFiles(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".safetensors") {
			names = append(names, e.Name())
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("no file ends in .safetensors")
	}
	if len(names) > maxWeightFiles {
		return nil, fmt.Errorf("%d files end in .safetensors, at most %d allowed", len(names), maxWeightFiles)
	}
	slices.Sort(names)
	return names, nil
}

// openRegular looks before it opens, because opening a pipe would wait.
func openRegular(path string) (*os.File, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%q is not a regular file", filepath.Base(path))
	}
	return os.Open(path)
}

// readBounded returns a whole file of at most limit bytes.
func readBounded(path string, limit int64) ([]byte, error) {
	f, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("file %q is larger than %d bytes", filepath.Base(path), limit)
	}
	return b, nil
}

const configName = "config.json"

func readConfigFile(dir string) ([]byte, error) {
	return readBounded(filepath.Join(dir, configName), MaxConfigBytes)
}
