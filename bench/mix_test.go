package bench

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var testMix = PromptMix{Prefixes: 3, PrefixTokens: 100, Conversations: 5, Turns: 4, TurnTokens: 20, AnswerTokens: 6, Vocabulary: 50}

func TestSchedulesFollowFromTheirSeed(t *testing.T) {
	a, err := testMix.schedule(200, 10, 7)
	require.NoError(t, err)
	b, err := testMix.schedule(200, 10, 7)
	require.NoError(t, err)
	assert.Equal(t, a, b)
	c, err := testMix.schedule(200, 10, 8)
	require.NoError(t, err)
	assert.NotEqual(t, a, c)
}

func TestArrivalsArePoisson(t *testing.T) {
	s, err := testMix.schedule(20_000, 50, 1)
	require.NoError(t, err)
	var gaps samples
	last := 0.0
	for _, a := range s {
		gaps = append(gaps, a.at.Seconds()-last)
		last = a.at.Seconds()
	}
	mean := last / float64(len(s))
	assert.InDelta(t, 1.0/50, mean, 0.001)
	// Of exponential times a share 1-1/e is below the mean.
	assert.InDelta(t, 1-1/2.71828, gaps.below(mean), 0.02)
}

func (s samples) below(v float64) float64 {
	sorted := s.sorted()
	i, _ := slices.BinarySearch(sorted, v)
	return float64(i) / float64(len(s))
}

func TestConversationsShareAPrefixAndGrow(t *testing.T) {
	s, err := testMix.schedule(400, 10, 3)
	require.NoError(t, err)
	prefixes, extended, longest := map[string]bool{}, 0, 0
	for i, a := range s {
		for _, id := range a.prompt {
			require.True(t, id >= firstID && id < firstID+50)
		}
		prefixes[string(wireTokens(a.prompt[:100]))] = true
		longest = max(longest, len(a.prompt))
		for _, earlier := range s[:i] {
			if n := len(earlier.prompt); len(a.prompt) == n+26 && slices.Equal(a.prompt[:n], earlier.prompt) {
				extended++
				break
			}
		}
	}
	assert.Len(t, prefixes, 3)
	assert.Equal(t, testMix.Longest()-testMix.AnswerTokens, longest)
	assert.InDelta(t, 300, extended, 15, "three of four turns go on with a conversation")
}

func TestMixesNameTheFieldThatIsWrong(t *testing.T) {
	for want, change := range map[string]func(*PromptMix){
		"prefixes":      func(m *PromptMix) { m.Prefixes = 0 },
		"prefix tokens": func(m *PromptMix) { m.PrefixTokens = -1 },
		"conversations": func(m *PromptMix) { m.Conversations = 0 },
		"turns":         func(m *PromptMix) { m.Turns = 1<<20 + 1 },
		"turn tokens":   func(m *PromptMix) { m.TurnTokens = 0 },
		"answer tokens": func(m *PromptMix) { m.AnswerTokens = 0 },
		"vocabulary":    func(m *PromptMix) { m.Vocabulary = 1 },
	} {
		m := testMix
		change(&m)
		_, err := m.schedule(1, 1, 1)
		assert.ErrorContains(t, err, want)
	}
	_, err := testMix.schedule(maxArrivals+1, 1, 1)
	assert.ErrorContains(t, err, "requests: 100001")
	for _, rate := range []float64{0, -1, 1e7} {
		_, err = testMix.schedule(1, rate, 1)
		assert.ErrorContains(t, err, "rate")
	}
}
