package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// PromptMix describes prompts as chats have them: conversations that begin with
// one of a few shared prefixes (a system prompt) and get longer turn by turn.
// What the assistant is taken to have said is part of the mix, so that what is
// sent does not depend on what is answered, and every system gets the same.
type PromptMix struct {
	// Prefixes is how many shared prefixes there are, PrefixTokens how long
	// each is.
	Prefixes     int `json:"prefixes"`
	PrefixTokens int `json:"prefix_tokens"`
	// Conversations is how many are under way at a time; one that has had its
	// Turns is followed by a new one.
	Conversations int `json:"conversations"`
	Turns         int `json:"turns"`
	// TurnTokens is what every turn adds to its prompt, AnswerTokens what is
	// generated, and what the next turn's prompt has for it.
	TurnTokens   int `json:"turn_tokens"`
	AnswerTokens int `json:"answer_tokens"`
	// Vocabulary is how many token ids occur, from 3 on.
	Vocabulary int `json:"vocabulary"`
}

const firstID = 3 // the ids below it are padding, begin and end in most models

// Longest returns the most tokens of a prompt with its answer.
func (m PromptMix) Longest() int {
	return m.PrefixTokens + m.Turns*(m.TurnTokens+m.AnswerTokens)
}

func (m PromptMix) check(n int, rate float64) error {
	for _, f := range []struct {
		name       string
		value, min int
	}{
		{"prefixes", m.Prefixes, 1},
		{"prefix tokens", m.PrefixTokens, 0},
		{"conversations", m.Conversations, 1},
		{"turns", m.Turns, 1},
		{"turn tokens", m.TurnTokens, 1},
		{"answer tokens", m.AnswerTokens, 1},
		{"vocabulary", m.Vocabulary, 2},
	} {
		if f.value < f.min || f.value > 1<<20 {
			return fmt.Errorf("%s: %d is not between %d and %d", f.name, f.value, f.min, 1<<20)
		}
	}
	switch {
	case n < 1 || n > maxArrivals:
		return fmt.Errorf("requests: %d is not between 1 and %d", n, maxArrivals)
	case !(rate > 0) || rate > 1e6:
		return errors.New("rate: not between 0 and a million requests a second")
	}
	return nil
}

// arrival is one request of a schedule, due at a time after its begin.
type arrival struct {
	at     time.Duration
	prompt []uint32
}

// maxArrivals bounds a schedule; its prompts are in memory.
const maxArrivals = 100_000

// schedule returns n requests whose distances are exponential with mean 1/rate
// seconds, a Poisson process, the same for the same seed.
func (m PromptMix) schedule(n int, rate float64, seed uint64) ([]arrival, error) {
	if err := m.check(n, rate); err != nil {
		return nil, err
	}
	r := rand.New(rand.NewPCG(seed, 1))
	text := rand.New(rand.NewPCG(seed, 2))
	ids := func(n int) []uint32 {
		out := make([]uint32, n)
		for i := range out {
			out[i] = firstID + text.Uint32N(uint32(m.Vocabulary))
		}
		return out
	}
	prefixes := make([][]uint32, m.Prefixes)
	for i := range prefixes {
		prefixes[i] = ids(m.PrefixTokens)
	}
	type conversation struct {
		tokens []uint32
		turns  int
	}
	active := make([]conversation, m.Conversations)
	out := make([]arrival, 0, n)
	var at float64
	for range n {
		at += r.ExpFloat64() / rate
		c := &active[r.IntN(len(active))]
		if c.turns == 0 {
			*c = conversation{tokens: prefixes[r.IntN(len(prefixes))], turns: m.Turns}
		}
		c.turns--
		prompt := append(append(make([]uint32, 0, len(c.tokens)+m.TurnTokens), c.tokens...), ids(m.TurnTokens)...)
		out = append(out, arrival{at: time.Duration(at * float64(time.Second)), prompt: prompt})
		c.tokens = append(append(make([]uint32, 0, len(prompt)+m.AnswerTokens), prompt...), ids(m.AnswerTokens)...)
	}
	return out, nil
}
