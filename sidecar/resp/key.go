package resp

import (
	"bytes"
	"crypto/sha256"

	"membrane/kvwire"
)

// kind says how a key behaves.
type kind uint8

const (
	// plain keys are as Redis has them.
	plain kind = iota
	// chunk is a key of LMCache's multiprocess adapter: the first value wins.
	chunk
	// pairBytes and pairMetadata are the two halves of a chunk of LMCache's
	// redis:// connector: the first values win, and neither is there before
	// both are.
	pairBytes
	pairMetadata
)

const (
	bytesSuffix    = "kv_bytes"
	metadataSuffix = "metadata"
)

// namespace is that of all keys; form that of all values.
var (
	namespace = kvwire.Namespace(sha256.Sum256([]byte("membrane-resp-v1")))
	form      = kvwire.Form{'r', 'e', 's', 'p', 0, 0, 0, 1}
)

// key is where a value lies.
type key struct {
	text  []byte // of both halves of a pair: without the suffix
	kind  kind
	shard kvwire.Shard
	hash  kvwire.Hash
}

func (k *key) immutable() bool { return k.kind != plain }

// suffix is what follows text in the name that clients use.
func (k kind) suffix() string {
	switch k {
	case pairBytes:
		return bytesSuffix
	case pairMetadata:
		return metadataSuffix
	}
	return ""
}

// parseKey says what a key is. It keeps text.
func parseKey(text []byte) key {
	k := key{text: text, shard: kvwire.Shard{Count: 1}}
	base, half := bytes.CutSuffix(text, []byte(bytesSuffix))
	k.kind = pairBytes
	if !half {
		base, half = bytes.CutSuffix(text, []byte(metadataSuffix))
		k.kind = pairMetadata
	}
	switch {
	case half && isPair(base) && guard.pairHidden():
		// The bytes are shard 0, which is the one that counts as looked up.
		k.text, k.shard = base, kvwire.Shard{Index: uint16(k.kind - pairBytes), Count: 2}
	case isChunk(text):
		k.kind = chunk
	default:
		k.kind = plain
	}
	k.hash = hashKey(k.text, k.kind)
	return k
}

// hashKey names the page. A pair and a value under its base name differ.
func hashKey(text []byte, k kind) kvwire.Hash {
	var b [256]byte
	in := append(b[:0], 'v')
	if k >= pairBytes {
		in[0] = 'p'
	}
	return sha256.Sum256(append(in, text...))
}

// isChunk reports whether a key is one of LMCache's multiprocess adapter:
//
//	model @ kv rank, 8 hex digits @ object group, hex @ chunk hash, hex [@ cache salt]
//
// A model's name and a salt may have an @ in them.
func isChunk(text []byte) bool {
	for rest := text; ; {
		i := bytes.IndexByte(rest, '@')
		if i < 0 {
			return false
		}
		named := len(text)-len(rest)+i > 0
		rest = rest[i+1:]
		rank, tail, ok := bytes.Cut(rest, at)
		if !named || !ok || len(rank) != 8 || !isHex(rank) {
			continue
		}
		group, tail, ok := bytes.Cut(tail, at)
		if !ok || !isHex(group) {
			continue
		}
		if hash, _, _ := bytes.Cut(tail, at); isHex(hash) {
			return true
		}
	}
}

// isPair reports whether a key without its suffix is one of LMCache's redis://
// connector:
//
//	model @ world size @ worker id @ chunk hash, hex @ dtype [@ tag%value or layer]…
func isPair(text []byte) bool {
	for rest := text; ; {
		i := bytes.IndexByte(rest, '@')
		if i < 0 {
			return false
		}
		named := len(text)-len(rest)+i > 0
		rest = rest[i+1:]
		world, tail, ok := bytes.Cut(rest, at)
		if !named || !ok || !isNumber(world) {
			continue
		}
		worker, tail, ok := bytes.Cut(tail, at)
		if !ok || !isNumber(worker) {
			continue
		}
		hash, tail, ok := bytes.Cut(tail, at)
		if !ok || !isHex(hash) {
			continue
		}
		if dtype, more, _ := bytes.Cut(tail, at); isWord(dtype) && areTags(more) {
			return true
		}
	}
}

var at = []byte("@")

// areTags reports whether what follows the dtype is tags and a layer.
func areTags(text []byte) bool {
	for len(text) > 0 {
		var tag []byte
		tag, text, _ = bytes.Cut(text, at)
		if !isNumber(tag) && bytes.IndexByte(tag, '%') < 1 {
			return false
		}
	}
	return true
}

func isHex(b []byte) bool {
	for _, c := range b {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') && (c < 'A' || c > 'F') {
			return false
		}
	}
	return len(b) > 0 && len(b) <= 128
}

func isNumber(b []byte) bool {
	for _, c := range b {
		if c < '0' || c > '9' {
			return false
		}
	}
	return len(b) > 0 && len(b) <= 10
}

func isWord(b []byte) bool {
	for _, c := range b {
		if (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && c != '_' && c != '.' {
			return false
		}
	}
	return len(b) > 0
}
