package disagg

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"time"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/mesh"
)

const (
	// MaxBundle is the largest bundle, in bytes.
	MaxBundle = 100 << 20
	// BundleTTL is how long a bundle can be read.
	BundleTTL = time.Hour

	// A bundle's page begins with when it expires (Unix milliseconds, little
	// endian) and the SHA-256 of its bytes, so that both travel with it.
	bundleHeader = 8 + sha256.Size
)

// bundleSpace names the pages that are bundles and no KV of ours.
var bundleSpace = kvwire.Namespace(sha256.Sum256([]byte("membrane-bundle-v1")))

var bundleForm = kvwire.Form(bundleSpace[:kvwire.FormSize])

func bundleHash(model, name string) kvwire.Hash {
	return sha256.Sum256([]byte("membrane-bundle-v1\x00" + model + "\x00" + name))
}

func checkBundle(model, name string) error {
	if err := CheckName("handle", name); err != nil {
		return err
	}
	if model == "" || len(model) > MaxModelID {
		return malformed("model_id", "%d bytes are not 1 to %d", len(model), MaxModelID)
	}
	return nil
}

// PutBundle stores bytes under a name of a tenant and model, in place of what
// was there, and returns their SHA-256 in hexadecimal. size is how many bytes
// body has.
func (s *Service) PutBundle(tenant, model, name string, size int64, body io.Reader) (hash string, err error) {
	if err := checkBundle(model, name); err != nil {
		return "", err
	}
	switch {
	case size < 1:
		return "", malformed("body", "is empty: a bundle has at least one byte")
	case size > MaxBundle:
		return "", &Error{Kind: TooLarge, Field: "body", Message: fmt.Sprintf("%d bytes are more than %d", size, MaxBundle)}
	}
	if !s.uploads.TryAcquire(size) {
		if size > s.cfg.Cache.Arena().Size()/2 {
			return "", bundleRefused(kvwire.ReasonTooLarge)
		}
		return "", busy(time.Second, "other bundles that are on their way take half of the cache")
	}
	defer s.uploads.Release(size)
	space, err := s.cfg.Cache.Space(tenant, bundleSpace)
	if err != nil {
		return "", busy(time.Minute, "%v", err)
	}
	slot, res, err := space.ReserveAnew(bundleForm, bundleHash(model, name), size+bundleHeader)
	if err != nil {
		return "", err
	}
	if slot == nil {
		return "", bundleRefused(res.Reason)
	}
	defer slot.Abort() // does nothing after Commit
	room := slot.Bytes()
	if _, err := io.ReadFull(body, room[bundleHeader:]); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
			return "", malformed("body", "is shorter than its Content-Length")
		}
		return "", err
	}
	sum := sha256.Sum256(room[bundleHeader:])
	binary.LittleEndian.PutUint64(room, uint64(time.Now().Add(BundleTTL).UnixMilli()))
	copy(room[8:], sum[:])
	if res := slot.CommitWhole(cache.Always); !res.Stored {
		return "", bundleRefused(res.Reason)
	}
	return hex.EncodeToString(sum[:]), nil
}

func bundleRefused(why kvwire.Reason) error {
	switch why {
	case kvwire.ReasonTooLarge:
		return &Error{Kind: TooLarge, Field: "body", Message: "the bundle is larger than the cache: give the sidecar more memory (--memory)"}
	case kvwire.ReasonDraining:
		return &Error{Kind: Busy, Name: "draining", Message: "the sidecar is stopping", RetryAfter: time.Second}
	}
	e := busy(time.Second, "the cache has no room for the bundle: %s", why)
	e.Name = why.String()
	return e
}

// Bundle is a stored bundle that is being read. The reader closes it.
type Bundle struct {
	view cache.View
	// Hash is the SHA-256 of the bytes, in hexadecimal.
	Hash    string
	Expires time.Time
}

// Bytes returns the bundle's bytes, in place and not to be changed.
func (b *Bundle) Bytes() []byte { return b.view.Bytes()[bundleHeader:] }

// Close lets go of the bundle.
func (b *Bundle) Close() { b.view.Close() }

// GetBundle returns the bundle under a name, from here or a peer. While it is
// read it counts for the cap of leases and pins.
func (s *Service) GetBundle(ctx context.Context, tenant, model, name string) (*Bundle, error) {
	if err := checkBundle(model, name); err != nil {
		return nil, err
	}
	space, err := s.bundles(ctx, tenant, model, name)
	if err != nil {
		return nil, err
	}
	b := &Bundle{}
	switch why := space.Borrow(&b.view, whole, bundleForm, bundleHash(model, name), true); why {
	case kvwire.ReasonNone:
	case kvwire.ReasonPinned:
		e := busy(time.Second, "leases, pins and reads hold as much of the cache as they may")
		e.Name = "pinned"
		return nil, e
	default:
		return nil, noBundle()
	}
	raw := b.view.Bytes()
	if len(raw) <= bundleHeader {
		b.Close()
		return nil, noBundle()
	}
	b.Expires = time.UnixMilli(int64(binary.LittleEndian.Uint64(raw)))
	b.Hash = hex.EncodeToString(raw[8:bundleHeader])
	if !time.Now().Before(b.Expires) {
		b.view.Remove()
		b.Close()
		return nil, noBundle()
	}
	return b, nil
}

// StatBundle returns the length, the hash and the expiry of a bundle without
// reading it.
func (s *Service) StatBundle(ctx context.Context, tenant, model, name string) (size int64, hash string, expires time.Time, err error) {
	if err = checkBundle(model, name); err != nil {
		return 0, "", expires, err
	}
	space, err := s.bundles(ctx, tenant, model, name)
	if err != nil {
		return 0, "", expires, err
	}
	var head [bundleHeader]byte
	n, size, why := space.Head(head[:], whole, bundleForm, bundleHash(model, name))
	expires = time.UnixMilli(int64(binary.LittleEndian.Uint64(head[:])))
	if why != kvwire.ReasonNone || n < bundleHeader || !time.Now().Before(expires) {
		return 0, "", expires, noBundle()
	}
	return size - bundleHeader, hex.EncodeToString(head[8:]), expires, nil
}

// bundles returns the tenant's bundles, after asking peers for one that is not
// among them.
func (s *Service) bundles(ctx context.Context, tenant, model, name string) (*cache.Space, error) {
	space, err := s.cfg.Cache.Space(tenant, bundleSpace)
	if err != nil {
		return nil, busy(time.Minute, "%v", err)
	}
	if h := bundleHash(model, name); s.cfg.Peers != nil && !space.Has(bundleForm, h) {
		ctx, cancel := context.WithTimeout(ctx, maxPull)
		defer cancel()
		_, _ = s.cfg.Peers.Fill(ctx, mesh.FillRequest{Space: space, Form: bundleForm, Shards: 1, Hashes: []kvwire.Hash{h}})
	}
	return space, nil
}

func noBundle() error {
	return &Error{Kind: NotFound, Field: "handle", Message: "no node that this one knows of has a bundle of this name for this tenant and model_id, or it has expired"}
}
