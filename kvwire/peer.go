package kvwire

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
)

// NonceSize is the size of a challenge's nonce, in bytes.
const NonceSize = 32

// Challenge opens a data connection: the asker's name and nonce. The answer is
// a [ChallengeAnswer]. Both sides prove that they hold the cluster key; the key
// never crosses the wire.
//
//	offset  size  field
//	0       32    nonce
//	32      2     length of the node name
//	34      n     node name
type Challenge struct {
	Nonce [NonceSize]byte
	Node  string
}

// AppendChallenge appends the message in wire form.
func AppendChallenge(b []byte, c Challenge) []byte {
	b = append(b, c.Nonce[:]...)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(c.Node)))
	return append(b, c.Node...)
}

// ParseChallenge decodes the message.
func ParseChallenge(body []byte) (Challenge, error) {
	d := decoder{b: body}
	var c Challenge
	copy(c.Nonce[:], d.bytes(NonceSize))
	n := int(d.u16())
	if n > MaxID {
		return c, Errorf(CodeTooLarge, "node", "%d bytes are more than %d", n, MaxID)
	}
	c.Node = string(d.bytes(n))
	return c, d.end("challenge")
}

// ChallengeAnswer is the answer to a challenge: the answerer's proof over both
// nonces, then its own nonce and name as in [Challenge]. The asker checks the
// proof and sends its own (a proof frame of [ProofSize] bytes, answered with an
// empty body).
type ChallengeAnswer struct {
	Proof [ProofSize]byte
	Challenge
}

// ProofSize is the size of a proof, in bytes.
const ProofSize = sha256.Size

// AppendChallengeAnswer appends the message in wire form.
func AppendChallengeAnswer(b []byte, c ChallengeAnswer) []byte {
	b = append(b, c.Proof[:]...)
	return AppendChallenge(b, c.Challenge)
}

// ParseChallengeAnswer decodes the message.
func ParseChallengeAnswer(body []byte) (ChallengeAnswer, error) {
	var c ChallengeAnswer
	if len(body) < ProofSize {
		return c, Errorf(CodeBadFrame, "challenge", "the message ends too early")
	}
	copy(c.Proof[:], body)
	var err error
	c.Challenge, err = ParseChallenge(body[ProofSize:])
	return c, err
}

// NewNonce returns a random nonce.
func NewNonce() [NonceSize]byte {
	var n [NonceSize]byte
	_, _ = rand.Read(n[:]) // never fails: crypto/rand ends the process instead
	return n
}

// Proof returns HMAC-SHA256 under the cluster key over a domain tag, the side
// that proves ("asker" or "answerer"), both challenges in wire form, asker's
// first.
func Proof(clusterKey []byte, side string, asker, answerer Challenge) [ProofSize]byte {
	mac := hmac.New(sha256.New, clusterKey)
	mac.Write([]byte("membrane-peer-v1\x00" + side + "\x00"))
	mac.Write(AppendChallenge(nil, asker))
	mac.Write(AppendChallenge(nil, answerer))
	var p [ProofSize]byte
	copy(p[:], mac.Sum(nil))
	return p
}

// The sides of a challenge.
const (
	SideAsker    = "asker"
	SideAnswerer = "answerer"
)

// CheckProof compares two proofs in constant time.
func CheckProof(got, want [ProofSize]byte) bool { return hmac.Equal(got[:], want[:]) }

// BatchRead asks a peer for pages of one tenant, namespace and form. The
// answer is one page frame for each page and shard, in order, then an answer
// frame for [ParseBatchReadAnswer]. A page that the peer does not hold is a page frame
// without bytes whose reason says why; it stands for all shards of that page.
//
//	offset  size  field
//	0       4     deadline: microseconds from arrival
//	4       8     form
//	12      32    namespace
//	44      2     length of the tenant
//	46      n     tenant
//	…       4     number of hashes
//	…       32×n  hashes
type BatchRead struct {
	DeadlineUS uint32
	Form       Form
	Namespace  Namespace
	Tenant     string
	Hashes     []Hash
}

// AppendBatchRead appends the message in wire form.
func AppendBatchRead(b []byte, r BatchRead) []byte {
	b = binary.LittleEndian.AppendUint32(b, r.DeadlineUS)
	b = append(b, r.Form[:]...)
	b = append(b, r.Namespace[:]...)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(r.Tenant)))
	b = append(b, r.Tenant...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(r.Hashes)))
	for i := range r.Hashes {
		b = append(b, r.Hashes[i][:]...)
	}
	return b
}

// ParseBatchRead decodes the message; hashes are appended to dst.
func ParseBatchRead(body []byte, dst []Hash) (BatchRead, error) {
	d := decoder{b: body}
	r := BatchRead{DeadlineUS: d.u32()}
	copy(r.Form[:], d.bytes(FormSize))
	copy(r.Namespace[:], d.bytes(NamespaceSize))
	nt := int(d.u16())
	if nt > MaxTenant {
		return r, Errorf(CodeTooLarge, "tenant", "%d bytes are more than %d", nt, MaxTenant)
	}
	r.Tenant = string(d.bytes(nt))
	n := d.u32()
	if n > MaxBatch {
		return r, Errorf(CodeTooLarge, "hashes", "%d pages are more than %d", n, MaxBatch)
	}
	if d.short || len(d.b) != int(n)*HashSize {
		return r, Errorf(CodeBadFrame, "hashes", "%d bytes do not hold %d hashes", len(d.b), n)
	}
	for range n {
		dst = append(dst, Hash(d.bytes(HashSize)))
	}
	r.Hashes = dst
	return r, d.end("batch_read")
}
