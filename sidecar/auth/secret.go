package auth

import (
	"fmt"
	"io"
	"os"
)

// ReadSecretFile reads a file of at most limit bytes after [CheckSecretFile].
func ReadSecretFile(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	if err := CheckSecretFile(f); err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("it has more than %d bytes", limit)
	}
	return b, nil
}

// CheckSecretFile refuses a file that its group may write or that others may
// touch at all. Group-readable is fine: that is how Kubernetes mounts secrets
// under an fsGroup.
func CheckSecretFile(f *os.File) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("it is not a regular file")
	}
	if mode := st.Mode().Perm(); mode&0o027 != 0 {
		return fmt.Errorf("its mode is %04o, so others than its owner can use it: chmod 600 %q", mode, f.Name())
	}
	return nil
}
