package kvwire

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"

	"github.com/zeebo/xxh3"
)

// Sizes of the names, in bytes.
const (
	HashSize      = sha256.Size
	NamespaceSize = sha256.Size
	FormSize      = 8
	AuthSize      = 16
)

// Hash is the content hash of a page: one link of a [Chain].
type Hash [HashSize]byte

// String returns the hash in lowercase hexadecimal.
func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// Namespace is the digest of everything per engine that changes what the
// numbers in a page mean. See [ModelFacts.Namespace].
type Namespace [NamespaceSize]byte

// String returns the namespace in lowercase hexadecimal.
func (n Namespace) String() string { return hex.EncodeToString(n[:]) }

// Form is the digest of how a shard's bytes are laid out. All shards of a page
// written by one engine share one form. See [Descriptor.Form].
type Form [FormSize]byte

// String returns the form in lowercase hexadecimal.
func (f Form) String() string { return hex.EncodeToString(f[:]) }

// Shard names one rank's part of a page: part Index of Count. Count is at
// least 1 and Index is below Count.
type Shard struct {
	Index uint16
	Count uint16
}

// String returns the shard as "index/count".
func (s Shard) String() string { return fmt.Sprintf("%d/%d", s.Index, s.Count) }

// PageKey names a page: P consecutive tokens of one prompt prefix, all layers.
type PageKey struct {
	Tenant    string
	Namespace Namespace
	Hash      Hash
}

// Digest returns a 64-bit digest of the key, for filters and tables that can
// bear a false positive (XXH3 over tenant, a zero byte, namespace and hash).
func (k PageKey) Digest() uint64 {
	var b [MaxTenant + 1 + NamespaceSize + HashSize]byte
	n := copy(b[:MaxTenant], k.Tenant)
	b[n] = 0
	n++
	n += copy(b[n:], k.Namespace[:])
	n += copy(b[n:], k.Hash[:])
	return xxh3.Hash(b[:n])
}

// ObjectKey names the bytes of one shard of a page in one form.
type ObjectKey struct {
	PageKey
	Shard Shard
	Form  Form
}

// Checksum is the XXH3-64 digest of an object's bytes, with seed 0.
// It guards against accidents; [Authenticator] guards against relays.
type Checksum uint64

// Sum returns the checksum of b.
func Sum(b []byte) Checksum { return Checksum(xxh3.Hash(b)) }

// Summer computes the checksum of bytes that come piece by piece. The zero value
// is ready for use.
type Summer struct{ h xxh3.Hasher }

// Add takes the next piece.
func (s *Summer) Add(b []byte) { _, _ = s.h.Write(b) }

// Sum returns the checksum of all pieces so far.
func (s *Summer) Sum() Checksum { return Checksum(s.h.Sum64()) }

// Auth is an authenticator: HMAC-SHA256 cut to 16 bytes.
type Auth [AuthSize]byte

// Authenticator proves to holders of the cluster key that the sidecar which
// took a store gave these bytes this name. Without a cluster key it is
// computed with the empty key and proves nothing; that is allowed on loopback
// only.
//
// It may be used by several goroutines at once.
type Authenticator struct{ key []byte }

// NewAuthenticator returns an authenticator for the given cluster key.
// It keeps its own copy of the key.
func NewAuthenticator(clusterKey []byte) *Authenticator {
	return &Authenticator{key: append([]byte(nil), clusterKey...)}
}

// Sign returns the authenticator of key, length and sum.
func (a *Authenticator) Sign(key ObjectKey, length uint64, sum Checksum) Auth {
	mac := hmac.New(sha256.New, a.key)
	var b [8]byte
	mac.Write([]byte("membrane-object-v1\x00"))
	binary.LittleEndian.PutUint64(b[:], uint64(len(key.Tenant)))
	mac.Write(b[:])
	mac.Write([]byte(key.Tenant))
	mac.Write(key.Namespace[:])
	mac.Write(key.Hash[:])
	binary.LittleEndian.PutUint16(b[0:], key.Shard.Index)
	binary.LittleEndian.PutUint16(b[2:], key.Shard.Count)
	mac.Write(b[:4])
	mac.Write(key.Form[:])
	binary.LittleEndian.PutUint64(b[:], length)
	mac.Write(b[:])
	binary.LittleEndian.PutUint64(b[:], uint64(sum))
	mac.Write(b[:])
	var out Auth
	copy(out[:], mac.Sum(nil))
	return out
}

// Verify reports whether got is the authenticator of key, length and sum, in
// constant time.
func (a *Authenticator) Verify(key ObjectKey, length uint64, sum Checksum, got Auth) bool {
	want := a.Sign(key, length, sum)
	return hmac.Equal(want[:], got[:])
}
