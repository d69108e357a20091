package proxy

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"sync"

	"github.com/tidwall/gjson"
)

// salts makes the cache salt of a request out of who sends it and the salt that
// it names, so that no tenant can name another's pages, in the engine's own
// prefix cache either.
type salts struct{ pool sync.Pool }

func newSalts(key []byte) *salts {
	return &salts{pool: sync.Pool{New: func() any { return hmac.New(sha256.New, key) }}}
}

var errSalt = errors.New("cache_salt is neither a string nor null")

// of returns 64 hexadecimal digits. No salt and an empty one differ. A tenant's
// name has no control characters, so the zero byte ends it.
func (s *salts) of(tenant string, given gjson.Result) (string, error) {
	h, ok := s.pool.Get().(hash.Hash)
	if !ok {
		return "", errors.New("the pool of hashes has something else")
	}
	defer s.pool.Put(h)
	h.Reset()
	_, _ = h.Write([]byte(tenant))
	switch given.Type {
	case gjson.Null: // or not there
		_, _ = h.Write([]byte{0, 0})
	case gjson.String:
		_, _ = h.Write([]byte{0, 1})
		_, _ = h.Write([]byte(given.Str))
	default:
		return "", errSalt
	}
	var sum [sha256.Size]byte
	return hex.EncodeToString(h.Sum(sum[:0])), nil
}
