package kvwire

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// vectors were made by testdata/make_vectors.py, which shares no code with
// this package; the content hashes are those that SGLang prints.
type vectors struct {
	Chains []struct {
		Name       string   `json:"name"`
		Tokens     []int64  `json:"tokens"`
		PageTokens int      `json:"page_tokens"`
		ExtraKey   *string  `json:"extra_key"`
		CacheSalt  *string  `json:"cache_salt"`
		Seed       *string  `json:"seed"`
		Hashes     []string `json:"hashes"`
	} `json:"chains"`
	Namespaces []struct {
		Model      ModelFacts `json:"model"`
		PageTokens int        `json:"page_tokens"`
		Namespace  string     `json:"namespace"`
	} `json:"namespaces"`
	Forms []struct {
		Descriptor Descriptor `json:"descriptor"`
		Form       string     `json:"form"`
	} `json:"forms"`
	Checksums []struct {
		Object   string `json:"object_hex"`
		Checksum string `json:"checksum"`
	} `json:"checksums"`
	Authenticators []struct {
		ClusterKey    string `json:"cluster_key_hex"`
		Tenant        string `json:"tenant"`
		Namespace     string `json:"namespace"`
		Hash          string `json:"hash"`
		ShardIndex    uint16 `json:"shard_index"`
		ShardCount    uint16 `json:"shard_count"`
		Form          string `json:"form"`
		Length        uint64 `json:"length"`
		Checksum      string `json:"checksum"`
		Authenticator string `json:"authenticator"`
	} `json:"authenticators"`
	Handles []string          `json:"handles"`
	Frames  map[string]string `json:"frames"`
}

func loadVectors(t *testing.T) vectors {
	t.Helper()
	b, err := os.ReadFile("testdata/vectors.json")
	require.NoError(t, err)
	var v vectors
	require.NoError(t, json.Unmarshal(b, &v))
	return v
}

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	require.NoError(t, err)
	return b
}

func TestChainVectors(t *testing.T) {
	for _, v := range loadVectors(t).Chains {
		t.Run(v.Name, func(t *testing.T) {
			scope := Scope{ExtraKey: v.ExtraKey, CacheSalt: v.CacheSalt}
			seed, seeded := scope.Seed()
			require.Equal(t, v.Seed != nil, seeded)
			if seeded {
				assert.Equal(t, *v.Seed, seed.String())
			}
			c, err := NewChain(v.PageTokens, scope)
			require.NoError(t, err)
			tokens, err := CheckTokens("tokens", v.Tokens)
			require.NoError(t, err)
			require.NoError(t, c.AppendWire(tokens))
			var got []string
			for _, h := range c.Hashes() {
				got = append(got, h.String())
			}
			if h, n := c.Tail(); n > 0 {
				got = append(got, h.String())
			}
			assert.Equal(t, v.Hashes, got)
		})
	}
}

func TestNameVectors(t *testing.T) {
	v := loadVectors(t)
	for _, n := range v.Namespaces {
		assert.Equal(t, n.Namespace, n.Model.Namespace(n.PageTokens).String())
	}
	for _, f := range v.Forms {
		assert.Equal(t, f.Form, f.Descriptor.Form().String())
	}
	for _, c := range v.Checksums {
		assert.Equal(t, c.Checksum, fmt.Sprintf("%016x", uint64(Sum(unhex(t, c.Object)))))
	}
	for _, a := range v.Authenticators {
		key := ObjectKey{
			PageKey: PageKey{Tenant: a.Tenant, Namespace: Namespace(unhex(t, a.Namespace)), Hash: Hash(unhex(t, a.Hash))},
			Shard:   Shard{Index: a.ShardIndex, Count: a.ShardCount},
			Form:    Form(unhex(t, a.Form)),
		}
		var sum uint64
		_, err := fmt.Sscanf(a.Checksum, "%x", &sum)
		require.NoError(t, err)
		auth := NewAuthenticator(unhex(t, a.ClusterKey))
		got := auth.Sign(key, a.Length, Checksum(sum))
		assert.Equal(t, a.Authenticator, hex.EncodeToString(got[:]))
		assert.True(t, auth.Verify(key, a.Length, Checksum(sum), got))
		key.Shard.Index = 0
		assert.False(t, auth.Verify(key, a.Length, Checksum(sum), got), "another shard must not verify")
		assert.False(t, NewAuthenticator(nil).Verify(key, a.Length, Checksum(sum), got), "another cluster key must not verify")
	}
}

func upTo(first, last int64) (out []int64) {
	for i := first; i <= last; i++ {
		out = append(out, i)
	}
	return out
}

func TestFrameVectors(t *testing.T) {
	v := loadVectors(t)
	salt := "salt"
	key := unhex(t, v.Authenticators[0].ClusterKey)
	form, ns := Form(unhex(t, v.Forms[0].Form)), Namespace(unhex(t, v.Namespaces[0].Namespace))
	hash := Hash(unhex(t, v.Chains[0].Hashes[0]))
	object := unhex(t, v.Checksums[1].Object)
	sum := Sum(object)
	tokens := func(ids ...int64) []byte {
		b, err := CheckTokens("tokens", ids)
		require.NoError(t, err)
		return b
	}
	frame := func(typ Type, id uint32, body []byte) []byte {
		b, begin := BeginFrame(nil, typ, id)
		return EndFrame(append(b, body...), begin)
	}
	asker, answerer := Challenge{Node: "a"}, Challenge{Node: "b"}
	copy(asker.Nonce[:], bytes.Repeat([]byte{1}, NonceSize))
	copy(answerer.Nonce[:], bytes.Repeat([]byte{2}, NonceSize))
	proof := Proof(key, SideAsker, asker, answerer)
	page := PageHeader{Index: 3, Shard: Shard{1, 2}, Form: form, Length: uint64(len(object)), Sum: sum, Auth: Auth(unhex(t, v.Authenticators[0].Authenticator))}

	manifest := Manifest{
		Namespace: ns, Form: form, Created: 1000, Expires: 2000, PageTokens: 16, Model: "m", Node: "n-1",
		Tokens: tokens(upTo(1, 32)...), State: []byte("state"),
	}
	pages, handle, err := manifest.Check()
	require.NoError(t, err)
	assert.Len(t, pages, 2)
	assert.Equal(t, v.Handles[0], hex.EncodeToString(handle[:]))
	manifest.Tokens = tokens(upTo(1, 20)...) // of which four are a short page
	_, handle, err = manifest.Check()
	require.NoError(t, err)
	assert.Equal(t, v.Handles[1], hex.EncodeToString(handle[:]))

	for name, got := range map[string][]byte{
		"ping": frame(TypePing, 1, nil),
		"match": frame(TypeMatch, 2, AppendMatch(nil, Match{
			Held: 32, DeadlineUS: 50000, LeaseMS: 10000, Scope: Scope{CacheSalt: &salt}, Tokens: tokens(1, 2, 4294967295),
		})),
		"match_hashes": frame(TypeMatchHashes, 11, AppendMatchHashes(nil, MatchHashes{
			DeadlineUS: 50000, LeaseMS: 10000, Flags: MatchLocal, Hashes: []Hash{hash, {}},
		})),
		"leased": frame(TypeMatch|AnswerBit, 2, AppendLeased(nil, Leased{
			Handle: 7, Lease: 9, LeaseMS: 10000, First: 1, Pages: 1, ChainPages: 3, FromPeers: 1, Shards: 2, Reason: ReasonAbsent,
			Locations: []Location{{4096, 100, 5}, {8192, 100, 6}},
		})),
		"error":  frame(TypeError|AnswerBit, 2, AppendError(nil, Errorf(CodeBadField, "tokens", "oops"))),
		"extend": frame(TypeExtend, 3, AppendExtend(nil, Extend{Handle: 7, Tokens: tokens(8, 9)})),
		"lease": frame(TypeLease, 4, AppendLeaseRequest(nil, LeaseRequest{
			Handle: 7, First: 1, Pages: 2, DeadlineUS: 50000, LeaseMS: 10000, Flags: MatchLocal,
		})),
		"release": frame(TypeRelease, 5, AppendRelease(nil, Release{Lease: 9, Verify: true})),
		"reserve": frame(TypeReserve, 6, AppendReserve(nil, []PageRef{{7, 0}, {7, 1}})),
		"reserve_answer": frame(TypeReserve|AnswerBit, 6, AppendReservations(nil, []Reservation{
			{Status: StoreSlot, Slot: 5}, {Status: StoreRefused, Reason: ReasonOverBudget},
		})),
		"commit":           frame(TypeCommit, 7, AppendCommits(nil, []Commit{{PageRef{7, 0}, 5}})),
		"commit_answer":    frame(TypeCommit|AnswerBit, 7, AppendCommitted(nil, []Committed{{Status: StoreStored, Sum: sum}})),
		"drop":             frame(TypeDrop, 8, AppendHandle(nil, 7)),
		"read":             frame(TypeRead, 9, AppendRead(nil, Read{Lease: 9, Pages: 1})),
		"write":            frame(TypeWrite, 10, append(AppendWriteHeader(nil, PageRef{7, 2}), "object"...)),
		"page":             frame(TypePage, 9, append(AppendPageHeader(nil, page), object...)),
		"challenge":        frame(TypeChallenge, 1, AppendChallenge(nil, asker)),
		"challenge_answer": frame(TypeChallenge|AnswerBit, 1, AppendChallengeAnswer(nil, ChallengeAnswer{Proof(key, SideAnswerer, asker, answerer), answerer})),
		"proof":            frame(TypeProof, 2, proof[:]),
		"manifest_request": frame(TypeManifest, 4, AppendManifestRequest(nil, ManifestRequest{Op: ManifestPulled, Handle: hash, Tenant: "acme"})),
		"manifest_answer":  frame(TypeManifest|AnswerBit, 4, AppendManifestAnswer(nil, key, "acme", AppendManifest(nil, manifest))),
		"forms":            frame(TypeForms, 5, AppendFormsRequest(nil, ns)),
		"check":            frame(TypeCheck, 3, AppendBatchRead(nil, BatchRead{DeadlineUS: 50000, Form: form, Namespace: ns, Tenant: "acme", Hashes: []Hash{hash}})),
		"batch_read":       frame(TypeBatchRead, 3, AppendBatchRead(nil, BatchRead{DeadlineUS: 50000, Form: form, Namespace: ns, Tenant: "acme", Hashes: []Hash{hash}})),
		"manifest_wait":    frame(TypeManifest, 5, AppendManifestRequest(nil, ManifestRequest{Op: ManifestWait, Handle: hash, Tenant: "acme", WaitUS: 50000})),
		"await":            frame(TypeAwait, 6, AppendBatchRead(nil, BatchRead{DeadlineUS: 50000, Form: form, Namespace: ns, Tenant: "acme", Hashes: []Hash{hash}})),
		"await_answer":     frame(TypeAwait|AnswerBit, 6, AppendAwaitAnswer(nil, AwaitAnswer{Pages: 1, Version: 9})),
		"queues_answer":    frame(TypeQueues|AnswerBit, 7, AppendQueues(nil, Queues{Prefill: 3, Decode: 4})),
	} {
		want, ok := v.Frames[name]
		require.True(t, ok, name)
		assert.Equal(t, want, hex.EncodeToString(got), name)
	}
}
