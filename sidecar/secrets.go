package sidecar

import (
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"strings"

	"membrane/sidecar/auth"
)

const maxKeyFile = 4 << 10

// secrets are what the key files hold.
type secrets struct {
	api     *auth.Keys // nil: none are asked for
	cluster []byte
	gossip  []byte
}

// readSecrets reads the key files. The key of gossip follows from the cluster
// key where it has no file of its own, so that one file is enough.
func readSecrets(s *Settings) (secrets, error) {
	var out secrets
	var err error
	if s.APIKeyFile != "" {
		if out.api, err = auth.ReadKeyfile(s.APIKeyFile); err != nil {
			return out, &SettingError{"api-key-file", s.APIKeyFile, err.Error()}
		}
	}
	if s.ClusterKeyFile != "" {
		if out.cluster, err = readKey(s.ClusterKeyFile); err != nil {
			return out, &SettingError{"cluster-key-file", s.ClusterKeyFile, err.Error()}
		}
		if len(out.cluster) < 32 {
			return out, &SettingError{"cluster-key-file", s.ClusterKeyFile, fmt.Sprintf("a key of %d bytes is too short: membrane keys cluster makes one of 32", len(out.cluster))}
		}
	}
	switch {
	case s.GossipKeyFile != "":
		if out.gossip, err = readKey(s.GossipKeyFile); err != nil {
			return out, &SettingError{"gossip-key-file", s.GossipKeyFile, err.Error()}
		}
		if n := len(out.gossip); n != 16 && n != 24 && n != 32 {
			return out, &SettingError{"gossip-key-file", s.GossipKeyFile, fmt.Sprintf("a key of %d bytes is not 16, 24 or 32", n)}
		}
	case out.cluster != nil:
		if out.gossip, err = hkdf.Key(sha256.New, out.cluster, nil, "membrane-gossip-v1", 32); err != nil {
			return out, fmt.Errorf("cannot derive the key of gossip: %w", err)
		}
	}
	return out, nil
}

// readKey reads a file with one key in base64.
func readKey(path string) ([]byte, error) {
	b, err := auth.ReadSecretFile(path, maxKeyFile)
	if err != nil {
		return nil, err
	}
	key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(b)))
	if err != nil {
		return nil, fmt.Errorf("it is not one key in base64")
	}
	return key, nil
}
