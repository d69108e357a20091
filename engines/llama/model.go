package llama

import (
	"fmt"
	"math"
)

// MaxThreads bounds WithThreads.
const MaxThreads = 64

// Model is a set of weights and how to run them. It does not change after it
// was made, so any number of goroutines may use it, each with its own KV.
type Model struct {
	config    Config
	id        string
	weightsID string
	threads   int

	embed  func(dst []float32, token uint32) // writes HiddenSize values
	layers []layer
	norm   []float32
	head   []float32 // [VocabSize][HiddenSize]

	invFreq []float32 // [HeadDim/2]
}

// layer holds one decoder layer's weights, matrices as [outputs][inputs].
type layer struct {
	attnNorm, mlpNorm []float32
	q, k, v, o        []float32
	gate, up, down    []float32
}

// Config returns the model's shape.
func (m *Model) Config() Config { return m.config }

// ID returns the model id given to Generate, or the name of the folder given
// to Load.
func (m *Model) ID() string { return m.id }

// WeightsID returns a stable name of the weights: FolderWeightsID of a loaded
// folder, or "generated:" and the hexadecimal SHA-256 of model id and shape.
func (m *Model) WeightsID() string { return m.weightsID }

// WithThreads returns the same model that computes with n goroutines, 1 to
// MaxThreads; weights are shared and results are bit-equal for every n. Models
// are made with one thread.
func (m *Model) WithThreads(n int) (*Model, error) {
	if n < 1 || n > MaxThreads {
		return nil, fmt.Errorf("cannot set threads to %d: must be from 1 to %d", n, MaxThreads)
	}
	c := *m
	c.threads = n
	return &c, nil
}

// setRope computes the rotation frequencies in the precision of transformers:
// the exponent and the result are float32, the power is not.
func (m *Model) setRope() {
	d := m.config.HeadDim
	m.invFreq = make([]float32, d/2)
	for i := range m.invFreq {
		e := float32(2*i) / float32(d)
		m.invFreq[i] = 1 / float32(math.Pow(m.config.RopeTheta, float64(e)))
	}
}
