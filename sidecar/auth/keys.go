package auth

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strings"
)

const (
	// KeyPrefix begins every generated key, so that scanners can find a
	// leaked one.
	KeyPrefix = "mbr_"
	// PublicTenant owns what is stored without a credential.
	PublicTenant = "public"

	keyBytes      = 32
	maxKeyfile    = 1 << 20
	maxKeys       = 4096
	maxSubject    = 128
	maxPresented  = 512
	digestPrefix  = "sha256:"
	subjectExcept = " :/\\\"\t\r\n"
)

// Identity is who a request comes from.
type Identity struct {
	// Subject is the name in the keyfile, "" where no credential is needed.
	Subject string
	// Tenant owns what the request stores and sees.
	Tenant string
	Scopes Scope
}

// Anonymous is the identity of every request to a listener that needs no
// credential: all rights, tenant public.
func Anonymous() Identity {
	return Identity{Tenant: PublicTenant, Scopes: ScopeRead | ScopeWrite | ScopeAdmin | ScopeEngine}
}

type entry struct {
	digest   [sha256.Size]byte
	identity Identity
}

// Keys are the entries of a keyfile. Only digests are kept.
type Keys struct{ entries []entry }

// Len returns the number of entries.
func (k *Keys) Len() int { return len(k.entries) }

// Lookup returns the identity of a presented key. It compares with every
// entry, in constant time each, so that its duration says nothing about how
// near a guess was.
func (k *Keys) Lookup(key string) (Identity, bool) {
	if len(key) > maxPresented {
		return Identity{}, false
	}
	digest := sha256.Sum256([]byte(key))
	found := -1
	for i := range k.entries {
		if subtle.ConstantTimeCompare(digest[:], k.entries[i].digest[:]) == 1 {
			found = i
		}
	}
	if found < 0 {
		return Identity{}, false
	}
	return k.entries[found].identity, true
}

// ReadKeyfile reads the keyfile at path after [CheckSecretFile].
func ReadKeyfile(path string) (*Keys, error) {
	data, err := ReadSecretFile(path, maxKeyfile)
	if err != nil {
		return nil, fmt.Errorf("cannot read API keys at %q: %w", path, err)
	}
	keys, err := ParseKeyfile(data)
	if err != nil {
		return nil, fmt.Errorf("cannot read API keys at %q: %w", path, err)
	}
	return keys, nil
}

// ParseKeyfile reads entries of the form
//
//	sha256:<64 hexadecimal digits>:<subject>:<scope>[,<scope>…]
//
// one a line. Blank lines and lines that begin with # are comments. Any other
// line is an error with its number: a key that silently does not work, or one
// that silently still does, is worse than a sidecar that does not start.
func ParseKeyfile(data []byte) (*Keys, error) {
	keys := &Keys{}
	seen := make(map[[sha256.Size]byte]int)
	lines := bufio.NewScanner(bytes.NewReader(data))
	lines.Buffer(nil, 64<<10)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		e, err := parseEntry(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		if first := seen[e.digest]; first != 0 {
			return nil, fmt.Errorf("line %d: the same key is on line %d", n, first)
		}
		seen[e.digest] = n
		keys.entries = append(keys.entries, e)
		if len(keys.entries) > maxKeys {
			return nil, fmt.Errorf("line %d: more than %d keys", n, maxKeys)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(keys.entries) == 0 {
		return nil, fmt.Errorf("no key in it: `membrane keys generate` prints an entry")
	}
	return keys, nil
}

// parseEntry never puts the line into an error: a plaintext key may be on it.
func parseEntry(line string) (entry, error) {
	rest, ok := strings.CutPrefix(line, digestPrefix)
	if !ok {
		return entry{}, fmt.Errorf("does not begin with %q", digestPrefix)
	}
	fields := strings.Split(rest, ":")
	if len(fields) != 3 {
		return entry{}, fmt.Errorf("has %d fields instead of 4 (sha256:digest:subject:scopes)", len(fields)+1)
	}
	var e entry
	digest, err := hex.DecodeString(fields[0])
	if err != nil || len(digest) != sha256.Size {
		return entry{}, fmt.Errorf("digest is not %d hexadecimal digits", 2*sha256.Size)
	}
	copy(e.digest[:], digest)
	if err := CheckSubject(fields[1]); err != nil {
		return entry{}, err
	}
	scopes, err := ParseScopes(fields[2])
	if err != nil {
		return entry{}, err
	}
	e.identity = Identity{Subject: fields[1], Tenant: fields[1], Scopes: scopes}
	return e, nil
}

// CheckSubject reports whether a name can be a subject, and so a tenant: 1 to
// 128 bytes without control characters, space, colon, slash, backslash and
// double quote.
func CheckSubject(s string) error {
	if s == "" {
		return fmt.Errorf("subject is empty")
	}
	if len(s) > maxSubject {
		return fmt.Errorf("subject has %d bytes, at most %d are allowed", len(s), maxSubject)
	}
	for _, r := range s {
		if r < 0x20 || r == 0x7f || r == '\uFFFD' || strings.ContainsRune(subjectExcept, r) {
			return fmt.Errorf("subject %q contains %q", s, r)
		}
	}
	return nil
}

// Generate makes a new key of 32 random bytes and its keyfile entry.
func Generate(subject string, scopes Scope) (key, line string, err error) {
	if err := CheckSubject(subject); err != nil {
		return "", "", err
	}
	if scopes == 0 {
		return "", "", fmt.Errorf("no scope given")
	}
	var b [keyBytes]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the process instead
	key = KeyPrefix + base64.RawURLEncoding.EncodeToString(b[:])
	digest := sha256.Sum256([]byte(key))
	return key, digestPrefix + hex.EncodeToString(digest[:]) + ":" + subject + ":" + scopes.String(), nil
}
