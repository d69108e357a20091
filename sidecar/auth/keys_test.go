package auth

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestGeneratedKeyIsFound(t *testing.T) {
	t.Parallel()
	key, line, err := Generate("ops", ScopeRead|ScopeAdmin)
	require.NoError(t, err)
	assert.Regexp(t, `^mbr_[A-Za-z0-9_-]{43}$`, key)
	assert.Regexp(t, `^sha256:[0-9a-f]{64}:ops:read,admin$`, line)

	keys, err := ParseKeyfile([]byte("# comment\n\n  " + line + "  \r\n"))
	require.NoError(t, err)
	id, ok := keys.Lookup(key)
	require.True(t, ok)
	assert.Equal(t, Identity{Subject: "ops", Tenant: "ops", Scopes: ScopeRead | ScopeAdmin}, id)

	for _, wrong := range []string{"", key[:len(key)-1], key + "x", "mbr_", strings.Repeat("x", 1<<20), line} {
		_, ok := keys.Lookup(wrong)
		assert.False(t, ok)
	}
}

func TestScopesAreALadderAndEngineStandsBeside(t *testing.T) {
	t.Parallel()
	all := []Scope{ScopeRead, ScopeWrite, ScopeAdmin, ScopeEngine}
	f := func(have Scope, want ...bool) {
		t.Helper()
		for i, need := range all {
			assert.Equal(t, want[i], have.Allows(need), "%s allows %s", have, need)
		}
	}
	f(ScopeRead, true, false, false, false)
	f(ScopeWrite, true, true, false, false)
	f(ScopeAdmin, true, true, true, false)
	f(ScopeEngine, false, false, false, true)
	f(ScopeEngine|ScopeRead, true, false, false, true)
	f(0, false, false, false, false)
	assert.True(t, Anonymous().Scopes.Allows(ScopeEngine|ScopeAdmin))
}

func TestBadKeyfiles(t *testing.T) {
	t.Parallel()
	digest := strings.Repeat("a", 64)
	good := "sha256:" + digest + ":ops:read\n"
	f := func(text, message string) {
		t.Helper()
		_, err := ParseKeyfile([]byte(text))
		require.ErrorContains(t, err, message)
		assert.NotContains(t, err.Error(), "mbr_secret")
	}
	f("", "no key in it")
	f("# only a comment\n", "no key in it")
	f(good+"mbr_secret:ops:read", "line 2: does not begin with")
	f("# c\n\nsha256:"+digest+":ops", "line 3: has 3 fields")
	f("sha256:"+digest+":a:b:read", "line 1: has 5 fields")
	f("sha256:"+digest[1:]+":ops:read", "digest is not 64")
	f("sha256:"+digest[1:]+"g:ops:read", "digest is not 64")
	f("sha256:"+digest+"::read", "subject is empty")
	f("sha256:"+digest+":a b:read", "contains ' '")
	f("sha256:"+digest+":"+strings.Repeat("x", 129)+":read", "129 bytes")
	f("sha256:"+digest+":ops:", `scope "" is not`)
	f("sha256:"+digest+":ops:root", `scope "root" is not`)
	f(good+good, "line 2: the same key is on line 1")
	f(strings.Repeat("x", 70<<10), "token too long")
}

func TestSecretFilePermissions(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "keys")
	_, line, err := Generate("ops", ScopeRead)
	require.NoError(t, err)
	f := func(mode os.FileMode, ok bool) {
		t.Helper()
		require.NoError(t, os.WriteFile(path, []byte(line), 0o600))
		require.NoError(t, os.Chmod(path, mode))
		_, err := ReadKeyfile(path)
		if ok {
			require.NoError(t, err, "%04o", mode)
			return
		}
		require.ErrorContains(t, err, "chmod 600", "%04o", mode)
		require.ErrorContains(t, err, path)
	}
	f(0o600, true)
	f(0o440, true)
	f(0o640, true)
	f(0o660, false)
	f(0o604, false)
	f(0o601, false)
	f(0o644, false)

	_, err = ReadKeyfile(t.TempDir())
	require.ErrorContains(t, err, "not a regular file")
	require.NoError(t, os.WriteFile(path, make([]byte, 100), 0o600))
	require.NoError(t, os.Chmod(path, 0o600))
	_, err = ReadSecretFile(path, 100)
	require.NoError(t, err)
	_, err = ReadSecretFile(path, 99)
	require.ErrorContains(t, err, "more than 99 bytes")
}

func TestGenerateRefuses(t *testing.T) {
	t.Parallel()
	_, _, err := Generate("a:b", ScopeRead)
	require.ErrorContains(t, err, "subject")
	_, _, err = Generate("ops", 0)
	require.ErrorContains(t, err, "scope")
}

func FuzzParseKeyfile(f *testing.F) {
	_, line, _ := Generate("ops", ScopeRead|ScopeEngine)
	f.Add([]byte(line))
	f.Add([]byte("#\n\nsha256::::\n"))
	f.Add([]byte("sha256:" + strings.Repeat("0", 64) + ":é:read,write"))
	f.Fuzz(func(t *testing.T, data []byte) {
		keys, err := ParseKeyfile(data)
		if err != nil {
			return
		}
		require.Positive(t, keys.Len())
		for _, e := range keys.entries {
			require.NoError(t, CheckSubject(e.identity.Subject))
			require.NotZero(t, e.identity.Scopes)
			require.LessOrEqual(t, len(e.identity.Tenant), maxSubject)
		}
	})
}
