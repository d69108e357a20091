package kvwire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// parsers has every parser of a message body, wrapped so that a body which it
// accepts is encoded again: what it understood must be all that there was.
var parsers = map[string]func([]byte) ([]byte, error){
	"error": func(b []byte) ([]byte, error) {
		e, err := ParseError(b)
		if err != nil {
			return nil, err
		}
		return AppendError(nil, e), nil
	},
	"match": func(b []byte) ([]byte, error) { m, err := ParseMatch(b); return AppendMatch(nil, m), err },
	"match_hashes": func(b []byte) ([]byte, error) {
		m, err := ParseMatchHashes(b)
		return AppendMatchHashes(nil, m), err
	},
	"leased": func(b []byte) ([]byte, error) {
		l, err := ParseLeased(b, nil)
		out := AppendLeased(nil, l)
		if err == nil {
			out[39] = b[39] // reserved
		}
		return out, err
	},
	"extend":  func(b []byte) ([]byte, error) { e, err := ParseExtend(b); return AppendExtend(nil, e), err },
	"lease":   func(b []byte) ([]byte, error) { l, err := ParseLeaseRequest(b); return AppendLeaseRequest(nil, l), err },
	"release": func(b []byte) ([]byte, error) { r, err := ParseRelease(b); return AppendRelease(nil, r), err },
	"reserve": func(b []byte) ([]byte, error) { p, err := ParseReserve(b, nil); return AppendReserve(nil, p), err },
	"reservations": func(b []byte) ([]byte, error) {
		r, err := ParseReservations(b, nil)
		out := AppendReservations(nil, r)
		for i := 0; err == nil && i < len(b); i += 8 {
			copy(out[i+2:], b[i+2:i+4]) // reserved
		}
		return out, err
	},
	"commit": func(b []byte) ([]byte, error) { c, err := ParseCommits(b, nil); return AppendCommits(nil, c), err },
	"committed": func(b []byte) ([]byte, error) {
		c, err := ParseCommitted(b, nil)
		out := AppendCommitted(nil, c)
		for i := 0; err == nil && i < len(b); i += 16 {
			copy(out[i+2:], b[i+2:i+8]) // reserved
		}
		return out, err
	},
	"read": func(b []byte) ([]byte, error) { r, err := ParseRead(b); return AppendRead(nil, r), err },
	"write": func(b []byte) ([]byte, error) {
		p, err := ParseWriteHeader(b)
		out := AppendWriteHeader(nil, p)
		if err == nil {
			copy(out[12:], b[12:])
		}
		return out, err
	},
	"handle":    func(b []byte) ([]byte, error) { h, err := ParseHandle(b); return AppendHandle(nil, h), err },
	"challenge": func(b []byte) ([]byte, error) { c, err := ParseChallenge(b); return AppendChallenge(nil, c), err },
	"challenge_answer": func(b []byte) ([]byte, error) {
		c, err := ParseChallengeAnswer(b)
		return AppendChallengeAnswer(nil, c), err
	},
	"batch_read": func(b []byte) ([]byte, error) { r, err := ParseBatchRead(b, nil); return AppendBatchRead(nil, r), err },
	"manifest_request": func(b []byte) ([]byte, error) {
		r, err := ParseManifestRequest(b)
		return AppendManifestRequest(nil, r), err
	},
	"await": func(b []byte) ([]byte, error) { r, err := ParseAwait(b, nil); return AppendBatchRead(nil, r), err },
	"await_answer": func(b []byte) ([]byte, error) {
		a, err := ParseAwaitAnswer(b)
		return AppendAwaitAnswer(nil, a), err
	},
	"queues": func(b []byte) ([]byte, error) { q, err := ParseQueues(b); return AppendQueues(nil, q), err },
	"manifest": func(b []byte) ([]byte, error) {
		m, err := ParseManifest(b)
		_, _, _ = m.Check()
		return AppendManifest(nil, m), err
	},
	"manifest_answer": func(b []byte) ([]byte, error) {
		m, err := ParseManifestAnswer(b, vectorKey, "acme")
		if err == nil && m != nil {
			m = AppendManifestAnswer(nil, vectorKey, "acme", m)
		}
		return m, err
	},
	"forms": func(b []byte) ([]byte, error) {
		ns, err := ParseFormsRequest(b)
		return AppendFormsRequest(nil, ns), err
	},
	"page": func(b []byte) ([]byte, error) {
		n := min(len(b), PageHeaderSize)
		p, err := ParsePageHeader(b[:n], Header{Type: TypePage, Length: uint32(len(b))})
		return append(AppendPageHeader(nil, p), b[n:]...), err
	},
}

var vectorParser = map[string]string{
	"match": "match", "match_hashes": "match_hashes", "leased": "leased", "error": "error", "extend": "extend", "lease": "lease", "release": "release",
	"reserve": "reserve", "reserve_answer": "reservations", "commit": "commit", "commit_answer": "committed",
	"drop": "handle", "read": "read", "page": "page", "challenge": "challenge", "challenge_answer": "challenge_answer",
	"batch_read": "batch_read", "manifest_request": "manifest_request", "manifest_answer": "manifest_answer",
	"forms":         "forms",
	"manifest_wait": "manifest_request", "await": "await", "await_answer": "await_answer", "queues_answer": "queues",
}

// vectorKey is the cluster key of the vectors.
var vectorKey = []byte("0123456789abcdef0123456789abcdef")

func TestParsersTakeTheVectorsBackAndNothingShorter(t *testing.T) {
	v := loadVectors(t)
	for frame, parser := range vectorParser {
		b := unhex(t, v.Frames[frame])
		h, err := ParseHeader(b)
		require.NoError(t, err, frame)
		body := b[HeaderSize:]
		require.EqualValues(t, len(body), h.Length, frame)
		again, err := parsers[parser](body)
		require.NoError(t, err, frame)
		assert.Equal(t, body, again, frame)
		for n := range body {
			if parser == "manifest_answer" && n == 0 {
				continue // knows none
			}
			if parser == "reservations" || parser == "committed" {
				continue // a shorter list of whole entries is a list
			}
			_, err := parsers[parser](body[:n])
			assert.Error(t, err, "%s cut to %d bytes", frame, n)
		}
		if parser != "reservations" && parser != "committed" {
			_, err = parsers[parser](append(bytes.Clone(body), 0))
			assert.Error(t, err, "%s with a byte more", frame)
		}
	}
}

func FuzzBodies(f *testing.F) {
	var names []string
	for name := range parsers {
		names = append(names, name)
	}
	for i := range names {
		f.Add(uint8(i), []byte{})
		f.Add(uint8(i), bytes.Repeat([]byte{0xFF}, 80))
		f.Add(uint8(i), make([]byte, 64))
	}
	f.Add(uint8(0), AppendMatchHashes(nil, MatchHashes{DeadlineUS: 50000, LeaseMS: 10000, Flags: MatchLocal, Hashes: make([]Hash, 2)}))
	f.Fuzz(func(t *testing.T, which uint8, body []byte) {
		for _, name := range names {
			again, err := parsers[name](body)
			if err == nil && !bytes.Equal(again, body) {
				t.Fatalf("%s: understood %x as %x", name, body, again)
			}
		}
		_ = which
	})
}

func FuzzHeader(f *testing.F) {
	f.Add(AppendHeader(nil, Header{Type: TypeMatch, ID: 1, Length: 2}))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, body, err := ReadFrame(bytes.NewReader(b), nil)
		if err == nil && (len(body) != int(h.Length) || h.Length > MaxControl) {
			t.Fatalf("a body of %d bytes for a length of %d", len(body), h.Length)
		}
	})
}

func TestHeaderRefusesWhatIsNotAFrame(t *testing.T) {
	good := AppendHeader(nil, Header{Type: TypePing, ID: 1})
	refused := func(code Code, at int, value byte) {
		t.Helper()
		b := bytes.Clone(good)
		b[at] = value
		_, err := ParseHeader(b)
		assert.Equal(t, code, CodeOf(err), "%v", err)
	}
	refused(CodeBadFrame, 0, 'X')
	refused(CodeVersion, 4, 2)
	refused(CodeVersion, 4, 0)
	refused(CodeBadFrame, 6, 1)
	refused(CodeTooLarge, 12, 1) // a ping has no body
}

func TestFrameLimitsHoldExactly(t *testing.T) {
	for _, typ := range []Type{TypeHello, TypeRegister, TypeMatch, TypeMatchHashes, TypeReserve, TypePage, TypeWrite, TypeStats, TypeBatchRead, TypeManifest, TypeAwait, TypeQueues, TypeForms, TypeForms | AnswerBit, TypeManifest | AnswerBit, TypeError | AnswerBit} {
		limit := typ.limit()
		_, err := ParseHeader(AppendHeader(nil, Header{Type: typ, Length: limit}))
		assert.NoError(t, err, typ)
		_, err = ParseHeader(AppendHeader(nil, Header{Type: typ, Length: limit + 1}))
		assert.Equal(t, CodeTooLarge, CodeOf(err), typ)
	}
}

func TestBodyLimitsHoldExactly(t *testing.T) {
	long := strings.Repeat("s", MaxSalt)
	longer := long + "s"
	check := func(name string, ok bool, err error) {
		t.Helper()
		if ok {
			assert.NoError(t, err, name)
		} else {
			assert.Equal(t, CodeTooLarge, CodeOf(err), name)
		}
	}
	parseMatch := func(m Match) error { _, err := ParseMatch(AppendMatch(nil, m)); return err }
	check("salt", true, parseMatch(Match{Scope: Scope{CacheSalt: &long}}))
	check("salt", false, parseMatch(Match{Scope: Scope{CacheSalt: &longer}}))
	check("extra key", true, parseMatch(Match{Scope: Scope{ExtraKey: &long}}))
	check("extra key", false, parseMatch(Match{Scope: Scope{ExtraKey: &longer}}))
	check("tokens", true, parseMatch(Match{Tokens: make([]byte, MaxTokens*tokenSize)}))
	check("tokens", false, parseMatch(Match{Tokens: make([]byte, (MaxTokens+1)*tokenSize)}))
	parseBatch := func(r BatchRead) error { _, err := ParseBatchRead(AppendBatchRead(nil, r), nil); return err }
	check("tenant", true, parseBatch(BatchRead{Tenant: strings.Repeat("t", MaxTenant)}))
	check("tenant", false, parseBatch(BatchRead{Tenant: strings.Repeat("t", MaxTenant+1)}))
	check("hashes", true, parseBatch(BatchRead{Hashes: make([]Hash, MaxBatch)}))
	check("hashes", false, parseBatch(BatchRead{Hashes: make([]Hash, MaxBatch+1)}))
	parseHashes := func(n int) error {
		_, err := ParseMatchHashes(AppendMatchHashes(nil, MatchHashes{Hashes: make([]Hash, n)}))
		return err
	}
	check("match_hashes", true, parseHashes(MaxBatch))
	check("match_hashes", false, parseHashes(MaxBatch+1))
	parseAwait := func(r BatchRead) error { _, err := ParseAwait(AppendBatchRead(nil, r), nil); return err }
	check("awaited", true, parseAwait(BatchRead{Hashes: make([]Hash, MaxAwait)}))
	check("awaited", false, parseAwait(BatchRead{Hashes: make([]Hash, MaxAwait+1)}))
	check("awaited", false, parseAwait(BatchRead{}))
	parseAwaited := func(n uint32) error {
		_, err := ParseAwaitAnswer(AppendAwaitAnswer(nil, AwaitAnswer{Pages: n}))
		return err
	}
	check("awaited pages", true, parseAwaited(MaxAwait))
	check("awaited pages", false, parseAwaited(MaxAwait+1))
	parseReserve := func(n int) error { _, err := ParseReserve(AppendReserve(nil, make([]PageRef, n)), nil); return err }
	check("reserve", true, parseReserve(MaxBatch))
	check("reserve", false, parseReserve(MaxBatch+1))
	parseChallenge := func(n int) error {
		_, err := ParseChallenge(AppendChallenge(nil, Challenge{Node: strings.Repeat("n", n)}))
		return err
	}
	check("node", true, parseChallenge(MaxID))
	check("node", false, parseChallenge(MaxID+1))

	parseManifest := func(m Manifest) error {
		m.PageTokens = max(m.PageTokens, 1)
		_, err := ParseManifest(AppendManifest(nil, m))
		return err
	}
	check("model", true, parseManifest(Manifest{Model: strings.Repeat("m", MaxModel)}))
	check("model", false, parseManifest(Manifest{Model: strings.Repeat("m", MaxModel+1)}))
	check("node", true, parseManifest(Manifest{Node: strings.Repeat("n", MaxID)}))
	check("node", false, parseManifest(Manifest{Node: strings.Repeat("n", MaxID+1)}))
	check("prompt", true, parseManifest(Manifest{Tokens: make([]byte, MaxTokens*tokenSize)}))
	check("prompt", false, parseManifest(Manifest{Tokens: make([]byte, (MaxTokens+1)*tokenSize)}))
	check("state", true, parseManifest(Manifest{State: make([]byte, MaxState)}))
	check("state", false, parseManifest(Manifest{State: make([]byte, MaxState+1)}))
	parseRequest := func(n int) error {
		_, err := ParseManifestRequest(AppendManifestRequest(nil, ManifestRequest{Tenant: strings.Repeat("t", n)}))
		return err
	}
	check("manifest's tenant", true, parseRequest(MaxTenant))
	check("manifest's tenant", false, parseRequest(MaxTenant+1))

	chain, err := NewChain(64, Scope{})
	require.NoError(t, err)
	check("chain", true, chain.AppendWire(make([]byte, MaxTokens*tokenSize)))
	check("chain", false, chain.Append(1))
	assert.Equal(t, MaxTokens, chain.Tokens(), "a refused append changes nothing")
}

func TestCheckTokensNamesIndexAndValue(t *testing.T) {
	_, err := CheckTokens("prompt_tokens", []int64{1, -1})
	assert.EqualError(t, err, "bad_field: prompt_tokens[1]: -1 is not a token id (0 to 4294967295)")
	_, err = CheckTokens("prompt_tokens", []int64{1 << 32})
	assert.ErrorContains(t, err, "prompt_tokens[0]: 4294967296")
	b, err := CheckTokens("prompt_tokens", []int64{1<<32 - 1})
	require.NoError(t, err)
	assert.EqualValues(t, 1<<32-1, binary.LittleEndian.Uint32(b))
}

func TestChainDoesNotDependOnHowTokensArrive(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		page := rapid.IntRange(1, 40).Draw(t, "page")
		tokens := rapid.SliceOfN(rapid.Uint32(), 0, 200).Draw(t, "tokens")
		whole, err := NewChain(page, Scope{})
		require.NoError(t, err)
		require.NoError(t, whole.Append(tokens...))
		parts, err := NewChain(page, Scope{})
		require.NoError(t, err)
		for rest := tokens; len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "part")
			require.NoError(t, parts.Append(rest[:n]...))
			rest = rest[n:]
		}
		require.Equal(t, whole.Hashes(), parts.Hashes())
		require.Len(t, whole.Hashes(), len(tokens)/page)
		_, n := whole.Tail()
		require.Equal(t, len(tokens)%page, n)
		if len(tokens) > 0 {
			changed := append([]uint32(nil), tokens...)
			i := rapid.IntRange(0, len(tokens)-1).Draw(t, "changed")
			changed[i]++
			other, err := NewChain(page, Scope{})
			require.NoError(t, err)
			require.NoError(t, other.Append(changed...))
			for k := range whole.Hashes() {
				require.Equal(t, k < i/page, whole.Hashes()[k] == other.Hashes()[k], "page %d after token %d changed", k, i)
			}
		}
	})
}

// TestNamespaceKeepsEveryFactApart: two engines share pages only if every fact
// is equal, checkpoints of equal shape among them.
func TestNamespaceKeepsEveryFactApart(t *testing.T) {
	base := ModelFacts{WeightsID: "a", DType: "float32", RoPE: "base=1", Layers: 2, KVHeads: 2, HeadSize: 8}
	seen := map[Namespace]string{base.Namespace(64): "base", base.Namespace(128): "page size"}
	for name, change := range map[string]func(*ModelFacts){
		"weights": func(m *ModelFacts) { m.WeightsID = "b" }, "dtype": func(m *ModelFacts) { m.DType = "bfloat16" },
		"quantization": func(m *ModelFacts) { m.Quantization = "fp8" }, "scales": func(m *ModelFacts) { m.Scales = "s" },
		"rope": func(m *ModelFacts) { m.RoPE = "base=2" }, "layers": func(m *ModelFacts) { m.Layers = 3 },
		"heads": func(m *ModelFacts) { m.KVHeads = 1 }, "head size": func(m *ModelFacts) { m.HeadSize = 16 },
		"mla": func(m *ModelFacts) { m.MLA = true }, "epoch": func(m *ModelFacts) { m.KVEpoch = "2" },
		"field boundary": func(m *ModelFacts) { m.WeightsID, m.DType = "afloat", "32" },
	} {
		m := base
		change(&m)
		ns := m.Namespace(64)
		assert.NotContains(t, seen, ns, "%s shares a namespace with %s", name, seen[ns])
		seen[ns] = name
	}
}

func TestValidateNamesTheField(t *testing.T) {
	model := ModelFacts{WeightsID: "a", DType: "float32", Layers: 2, KVHeads: 2, HeadSize: 8}
	require.NoError(t, model.Validate())
	good := Descriptor{Layout: "x", DType: "float32", BlockTokens: 16, BlockBytes: 64, TPSize: 1, PPSize: 1, Layers: [2]int{0, 2}, Heads: [2]int{0, 2}}
	require.NoError(t, good.Validate(model))
	for field, change := range map[string]func(*Descriptor){
		"descriptor.layout":       func(d *Descriptor) { d.Layout = "" },
		"descriptor.dtype":        func(d *Descriptor) { d.DType = "" },
		"descriptor.block_tokens": func(d *Descriptor) { d.BlockTokens = MaxPageTokens + 1 },
		"descriptor.block_bytes":  func(d *Descriptor) { d.BlockBytes = MaxObject + 1 },
		"descriptor.strides":      func(d *Descriptor) { d.Axes = []string{"layer"} },
		"descriptor.axes":         func(d *Descriptor) { d.Axes, d.Strides = []string{""}, []int64{1} },
		"descriptor.tp_size":      func(d *Descriptor) { d.TPSize = 0 },
		"descriptor.tp_rank":      func(d *Descriptor) { d.TPRank = 1 },
		"descriptor.pp_size":      func(d *Descriptor) { d.TPSize, d.PPSize = 32, 32 },
		"descriptor.layers":       func(d *Descriptor) { d.Layers = [2]int{0, 3} },
		"descriptor.heads":        func(d *Descriptor) { d.Heads = [2]int{2, 2} },
		"descriptor.scales":       func(d *Descriptor) { d.Scales = make([]ScaleArray, maxScales+1) },
		"descriptor.scales.per":   func(d *Descriptor) { d.Scales = []ScaleArray{{Per: "layer", DType: "float32"}} },
		"descriptor.scales.dtype": func(d *Descriptor) { d.Scales = []ScaleArray{{Per: PerHead}} },
		"descriptor.scales.offset": func(d *Descriptor) {
			d.Scales = []ScaleArray{{Per: PerHead, DType: "float32", Offset: d.BlockBytes + 1}}
		},
		"descriptor.scales.strides": func(d *Descriptor) {
			d.Scales = []ScaleArray{{Per: PerHead, DType: "float32", Axes: []string{"layer"}}}
		},
		"descriptor.group": func(d *Descriptor) { d.Group = strings.Repeat("g", maxFact+1) },
	} {
		d := good
		change(&d)
		assert.ErrorContains(t, d.Validate(model), field)
	}
	for field, change := range map[string]func(*ModelFacts){
		"model.weights_id": func(m *ModelFacts) { m.WeightsID = "" },
		"model.dtype":      func(m *ModelFacts) { m.DType = "" },
		"model.layers":     func(m *ModelFacts) { m.Layers = 0 },
		"model.rope":       func(m *ModelFacts) { m.RoPE = strings.Repeat("r", maxFact+1) },
	} {
		m := model
		change(&m)
		assert.ErrorContains(t, m.Validate(), field)
	}
}

func TestPageTokens(t *testing.T) {
	for _, c := range []struct{ asked, block, want int }{{64, 16, 64}, {64, 64, 64}, {64, 128, 128}, {64, 48, 0}, {64, 0, 0}} {
		got, err := PageTokens(c.asked, c.block)
		assert.Equal(t, c.want, got)
		assert.Equal(t, c.want == 0, err != nil)
	}
}

func TestReasonsAreNamed(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range Reasons() {
		assert.NotContains(t, r.String(), "reason(")
		assert.False(t, seen[r.String()], "%s twice", r)
		seen[r.String()] = true
	}
	assert.Len(t, seen, len(reasonNames)-1)
}

func BenchmarkChain(b *testing.B) {
	for _, page := range []int{16, 64, 128} {
		b.Run(fmt.Sprintf("page=%d", page), func(b *testing.B) {
			tokens := make([]byte, 100_000*tokenSize)
			b.SetBytes(int64(len(tokens)))
			b.ReportAllocs()
			for b.Loop() {
				c, _ := NewChain(page, Scope{})
				_ = c.AppendWire(tokens)
			}
		})
	}
}
