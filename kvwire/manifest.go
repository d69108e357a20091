package kvwire

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
)

// Limits of manifests.
const (
	// MaxModel is the longest model id in a manifest, in bytes.
	MaxModel = 256
	// MaxState is the longest state in a manifest, in bytes.
	MaxState = 256 << 10
)

// ManifestOp says what a [ManifestRequest] is for.
type ManifestOp uint8

// The operations.
const (
	// ManifestGet asks for the manifest of a handle. The answer is
	// [AppendManifestAnswer]'s, with an empty body where it is not known.
	ManifestGet ManifestOp = 0
	// ManifestPulled tells that the asker holds every page of the handle now.
	// The answer is empty.
	ManifestPulled ManifestOp = 1
	// ManifestWait is ManifestGet, answered when the prefill of the handle has
	// ended, or after WaitUS.
	ManifestWait ManifestOp = 2
)

// ManifestRequest is about a handle of one tenant.
//
//	offset  size  field
//	0       1     operation
//	1       32    handle
//	33      2     length of the tenant
//	35      n     tenant
//	…       4     wait, microseconds from arrival; with ManifestWait alone
type ManifestRequest struct {
	Op     ManifestOp
	Handle Hash
	Tenant string
	WaitUS uint32
}

// AppendManifestRequest appends the message in wire form.
func AppendManifestRequest(b []byte, r ManifestRequest) []byte {
	b = append(b, byte(r.Op))
	b = append(b, r.Handle[:]...)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(r.Tenant)))
	b = append(b, r.Tenant...)
	if r.Op == ManifestWait {
		b = binary.LittleEndian.AppendUint32(b, r.WaitUS)
	}
	return b
}

// ParseManifestRequest decodes the message.
func ParseManifestRequest(body []byte) (ManifestRequest, error) {
	d := decoder{b: body}
	r := ManifestRequest{Op: ManifestOp(d.u8())}
	if r.Op > ManifestWait {
		return r, Errorf(CodeBadField, "operation", "%d is not defined", r.Op)
	}
	copy(r.Handle[:], d.bytes(HashSize))
	n := int(d.u16())
	if n > MaxTenant {
		return r, Errorf(CodeTooLarge, "tenant", "%d bytes are more than %d", n, MaxTenant)
	}
	r.Tenant = string(d.bytes(n))
	if r.Op == ManifestWait {
		r.WaitUS = d.u32()
	}
	return r, d.end("manifest")
}

// Manifest says what a handle stands for: a prompt whose pages are kept for a
// decode. The hashes of its pages follow from its tokens, so a reader computes
// them and believes nobody.
//
//	offset  size  field
//	0       32    namespace
//	32      8     form
//	40      8     created, Unix milliseconds
//	48      8     expires, Unix milliseconds
//	56      4     tokens in a page
//	60      2     length of the model id
//	62      2     length of the node's name
//	64      4     number of tokens
//	68      4     length of the state
//	72      …     model id, node's name, tokens (four bytes each), state
type Manifest struct {
	Namespace Namespace
	Form      Form
	// Created and Expires are Unix times in milliseconds. Created is 0 while the
	// prefill runs: there is no State yet, and not every page.
	Created, Expires int64
	PageTokens       int
	Model            string
	// Node is the mesh name of the node that prefilled and keeps the pages.
	Node string
	// Tokens are the prompt in wire form: four bytes each, little endian.
	Tokens []byte
	// State is what the backend needs beside the pages to go on behind the last
	// token, in a form of its own; empty where it needs nothing.
	State []byte
}

const manifestHeader = 72

// AppendManifest appends the manifest in wire form.
func AppendManifest(b []byte, m Manifest) []byte {
	b = append(b, m.Namespace[:]...)
	b = append(b, m.Form[:]...)
	b = binary.LittleEndian.AppendUint64(b, uint64(m.Created))
	b = binary.LittleEndian.AppendUint64(b, uint64(m.Expires))
	b = binary.LittleEndian.AppendUint32(b, uint32(m.PageTokens))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(m.Model)))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(m.Node)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Tokens)/tokenSize))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.State)))
	b = append(b, m.Model...)
	b = append(b, m.Node...)
	b = append(b, m.Tokens...)
	return append(b, m.State...)
}

// ParseManifest decodes a manifest. Its tokens and state lie in body.
func ParseManifest(body []byte) (Manifest, error) {
	d := decoder{b: body}
	var m Manifest
	copy(m.Namespace[:], d.bytes(NamespaceSize))
	copy(m.Form[:], d.bytes(FormSize))
	m.Created, m.Expires = int64(d.u64()), int64(d.u64())
	m.PageTokens = int(d.u32())
	model, node, tokens, state := int(d.u16()), int(d.u16()), d.u32(), d.u32()
	switch {
	case d.short:
		return m, d.end("manifest")
	case m.PageTokens < MinPageTokens || m.PageTokens > MaxPageTokens:
		return m, Errorf(CodeBadField, "page_tokens", "%d is not between %d and %d", m.PageTokens, MinPageTokens, MaxPageTokens)
	case model > MaxModel:
		return m, Errorf(CodeTooLarge, "model", "%d bytes are more than %d", model, MaxModel)
	case node > MaxID:
		return m, Errorf(CodeTooLarge, "node", "%d bytes are more than %d", node, MaxID)
	case tokens > MaxTokens:
		return m, Errorf(CodeTooLarge, "tokens", "%d tokens are more than %d", tokens, MaxTokens)
	case state > MaxState:
		return m, Errorf(CodeTooLarge, "state", "%d bytes are more than %d", state, MaxState)
	}
	m.Model, m.Node = string(d.bytes(model)), string(d.bytes(node))
	m.Tokens, m.State = d.bytes(int(tokens)*tokenSize), d.bytes(int(state))
	return m, d.end("manifest")
}

// Handle returns the name of a prompt of one model: SHA-256 over
// "membrane-handle-v1" and a zero byte, the namespace, the number of tokens in
// a page and in the prompt (four bytes each), the model id, a zero byte, and
// the hash of the prompt's last page, be it full or not, which covers all
// tokens before it. The tenant is not in it: who may use a handle is asked
// where it is used.
func Handle(ns Namespace, pageTokens int, model string, tokens int, last Hash) Hash {
	h := sha256.New()
	h.Write([]byte("membrane-handle-v1\x00"))
	h.Write(ns[:])
	var n [8]byte
	binary.LittleEndian.PutUint32(n[:], uint32(pageTokens))
	binary.LittleEndian.PutUint32(n[4:], uint32(tokens))
	h.Write(n[:])
	h.Write([]byte(model + "\x00"))
	h.Write(last[:])
	var out Hash
	h.Sum(out[:0])
	return out
}

// Check computes the hashes of the manifest's pages, the last one of which may
// be short, and the handle that they have. A manifest under another handle is
// not the one that was asked for.
func (m Manifest) Check() (pages []Hash, handle Hash, err error) {
	c, err := NewChain(m.PageTokens, Scope{})
	if err != nil {
		return nil, Hash{}, err
	}
	if err := c.AppendWire(m.Tokens); err != nil {
		return nil, Hash{}, err
	}
	pages = c.Hashes()
	if tail, n := c.Tail(); n > 0 {
		pages = append(pages, tail)
	}
	if len(pages) == 0 {
		return nil, Hash{}, Errorf(CodeBadField, "tokens", "a prompt has at least one")
	}
	return pages, Handle(m.Namespace, m.PageTokens, m.Model, c.Tokens(), pages[len(pages)-1]), nil
}

// ManifestAuthSize is the size of a manifest's authenticator, in bytes.
const ManifestAuthSize = sha256.Size

// AppendManifestAnswer appends the body of the answer that carries a manifest:
// its authenticator (HMAC-SHA256 under the cluster key over
// "membrane-manifest-v1", a zero byte, the tenant, a zero byte and the
// manifest), then the manifest, which is in wire form already.
func AppendManifestAnswer(b, clusterKey []byte, tenant string, manifest []byte) []byte {
	b = append(b, manifestAuth(clusterKey, tenant, manifest)...)
	return append(b, manifest...)
}

// ParseManifestAnswer checks the authenticator and returns the manifest in wire
// form, nil where the answerer knows none.
func ParseManifestAnswer(body, clusterKey []byte, tenant string) ([]byte, error) {
	if len(body) == 0 {
		return nil, nil
	}
	if len(body) < ManifestAuthSize+manifestHeader {
		return nil, Errorf(CodeBadFrame, "manifest", "the message ends too early")
	}
	manifest := body[ManifestAuthSize:]
	if !hmac.Equal(body[:ManifestAuthSize], manifestAuth(clusterKey, tenant, manifest)) {
		return nil, Errorf(CodeUnauthorized, "manifest", "it was not made under our cluster key for tenant %q", tenant)
	}
	return manifest, nil
}

func manifestAuth(clusterKey []byte, tenant string, manifest []byte) []byte {
	mac := hmac.New(sha256.New, clusterKey)
	mac.Write([]byte("membrane-manifest-v1\x00" + tenant + "\x00"))
	mac.Write(manifest)
	return mac.Sum(nil)
}
