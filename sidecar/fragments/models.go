package fragments

import (
	"runtime"
	"slices"
	"sync"

	"membrane/engines/llama"
)

// maxModels is how many generated models are kept, some 3 MiB each.
const maxModels = 8

// models keeps the models that were used last.
type models struct {
	mu   sync.Mutex
	list []*llama.Model // used last first
}

// get returns the model of an id. A model is made under the lock: it takes
// some milliseconds, and two requests for one id should make it once.
func (m *models) get(id string) (*llama.Model, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, have := range m.list {
		if have.ID() == id {
			m.list = slices.Insert(slices.Delete(m.list, i, i+1), 0, have)
			return have, nil
		}
	}
	made, err := llama.Generate(id)
	if err != nil {
		return nil, err
	}
	if made, err = made.WithThreads(min(runtime.GOMAXPROCS(0), llama.MaxThreads)); err != nil {
		return nil, err
	}
	m.list = slices.Insert(m.list, 0, made)
	if len(m.list) > maxModels {
		m.list = m.list[:maxModels]
	}
	return made, nil
}
