package disagg

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	"membrane/cache"
	"membrane/engines/llama"
	"membrane/kvwire"
	"membrane/sidecar/fragments"
)

// Embedded returns the backend that runs the embedded engine. Its pages are the
// windows of the fragment API, so that a prompt is computed once for both.
func Embedded(s *fragments.Service) Backend { return embedded{s} }

type embedded struct{ fragments *fragments.Service }

func (e embedded) Model(id string) (Model, error) {
	m, err := e.fragments.Model(id)
	if err != nil {
		return nil, err
	}
	return embeddedModel{e.fragments, m}, nil
}

func (e embedded) Waiting() int { return e.fragments.Waiting() }

type embeddedModel struct {
	fragments *fragments.Service
	model     *llama.Model
}

func (m embeddedModel) Layout() (kvwire.Namespace, kvwire.Form, int) {
	ns, form := fragments.Layout(m.model)
	return ns, form, fragments.WindowTokens
}

func (m embeddedModel) PageBytes(tokens int) int { return m.model.PageBytes(tokens) }

func (m embeddedModel) MaxTokens() int { return m.model.Config().MaxPositions }

func (m embeddedModel) Vocabulary() int {
	if c := m.model.Config(); !c.AnyInputID {
		return c.VocabSize
	}
	return 0
}

func (m embeddedModel) Space(tenant string) (*cache.Space, error) {
	ns, _ := fragments.Layout(m.model)
	return m.fragments.Space(tenant, ns)
}

func (m embeddedModel) Acquire(ctx context.Context) (func(), error) { return m.fragments.Acquire(ctx) }

func (m embeddedModel) Stored(tenant string, hash kvwire.Hash, start, tokens int, page []byte) {
	m.fragments.Enter(tenant, m.model, hash, start, tokens, page)
}

func (m embeddedModel) Start() Sequence {
	return &embeddedSequence{model: m.model, kv: m.model.NewKV(fragments.WindowTokens)}
}

// embeddedSequence runs the embedded model. Its state is the logits behind the
// last token, float32, little endian.
type embeddedSequence struct {
	model *llama.Model
	kv    *llama.KV
}

func (s *embeddedSequence) Load(tokens int, page []byte) error {
	return s.kv.LoadWindow(s.kv.Len(), tokens, page)
}

func (s *embeddedSequence) Compute(ctx context.Context, tokens []uint32) ([]byte, error) {
	logits, err := s.model.Prefill(ctx, s.kv, tokens)
	if err != nil {
		return nil, err
	}
	state := make([]byte, 0, 4*len(logits))
	for _, v := range logits {
		state = binary.LittleEndian.AppendUint32(state, math.Float32bits(v))
	}
	return state, nil
}

func (s *embeddedSequence) Rewind(ctx context.Context, last uint32) ([]byte, error) {
	if err := s.kv.Truncate(s.kv.Len() - 1); err != nil {
		return nil, err
	}
	return s.Compute(ctx, []uint32{last})
}

func (s *embeddedSequence) Page(start, tokens int) []byte { return s.kv.Window(start, tokens) }

func (s *embeddedSequence) Generate(ctx context.Context, state []byte, n int, how Sampling, yield func(uint32) bool) (Finish, error) {
	if len(state) != 4*s.model.Config().VocabSize {
		return "", fmt.Errorf("cannot decode behind a state of %d bytes: %d are needed", len(state), 4*s.model.Config().VocabSize)
	}
	logits := make([]float32, len(state)/4)
	for i := range logits {
		logits[i] = math.Float32frombits(binary.LittleEndian.Uint32(state[4*i:]))
	}
	choose := newSampler(how)
	for i := range n {
		token := choose.pick(logits)
		if choose.stops(token) {
			return FinishStop, nil
		}
		if !yield(token) || i == n-1 {
			break
		}
		var err error
		if logits, err = s.model.Prefill(ctx, s.kv, []uint32{token}); err != nil {
			return "", err
		}
	}
	return FinishLength, nil
}
