package disagg

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// Limits of sampling.
const (
	// MaxTemperature is the highest temperature.
	MaxTemperature = 2
	// MaxStopTokens is the most stop tokens of one request.
	MaxStopTokens = 64
)

// Sampling says how tokens are chosen. Its zero value is greedy.
type Sampling struct {
	// Temperature 0 takes the most likely token; more takes others too, up to
	// MaxTemperature.
	Temperature float64
	// TopP keeps the most likely tokens whose probabilities sum to it, above 0
	// and up to 1; 0 means 1.
	TopP float64
	// Seed makes the choice the same each time; nil takes a random one.
	Seed *int64
	// Stop are tokens at which the generation ends. They are not returned.
	Stop []uint32
}

// StopTokens returns the ids that a caller gave as [Sampling].Stop, or refuses
// one that is none.
func StopTokens(ids []int64) ([]uint32, error) {
	if len(ids) > MaxStopTokens {
		return nil, malformed("stop_token_ids", "%d stop tokens are more than %d", len(ids), MaxStopTokens)
	}
	var out []uint32
	for i, id := range ids {
		if id < 0 || id > math.MaxUint32 {
			return nil, malformed(fmt.Sprintf("stop_token_ids[%d]", i), "%d is not a token id (0 to 4294967295)", id)
		}
		out = append(out, uint32(id))
	}
	return out, nil
}

// ZeroTopP and ZeroMaxTokens refuse a 0 that a caller has sent; in a request it
// stands for what was left out.
func ZeroTopP() error { return malformed("top_p", "0 is not above 0 and at most 1") }

// ZeroMaxTokens is as ZeroTopP says.
func ZeroMaxTokens() error {
	return malformed("max_tokens", "0 is not between 1 and %d", MaxOutputTokens)
}

func (s Sampling) check() error {
	switch {
	case !(s.Temperature >= 0 && s.Temperature <= MaxTemperature):
		return malformed("temperature", "%v is not between 0 and %d", s.Temperature, MaxTemperature)
	case s.TopP != 0 && !(s.TopP > 0 && s.TopP <= 1):
		return malformed("top_p", "%v is not above 0 and at most 1", s.TopP)
	case len(s.Stop) > MaxStopTokens:
		return malformed("stop_token_ids", "%d stop tokens are more than %d", len(s.Stop), MaxStopTokens)
	}
	return nil
}

// sampler chooses tokens for one request.
type sampler struct {
	how    Sampling
	random *rand.Rand
	order  []int
	weight []float64
}

func newSampler(how Sampling) *sampler {
	s := &sampler{how: how}
	if how.Temperature > 0 {
		seed := rand.Uint64()
		if how.Seed != nil {
			seed = uint64(*how.Seed)
		}
		s.random = rand.New(rand.NewPCG(seed, 0x6d656d6272616e65))
	}
	return s
}

// pick returns a token by its logits.
func (s *sampler) pick(logits []float32) uint32 {
	best, top := 0, float32(math.Inf(-1))
	for i, v := range logits {
		if v > top {
			best, top = i, v
		}
	}
	if s.random == nil {
		return uint32(best)
	}
	s.order, s.weight = s.order[:0], s.weight[:0]
	sum := 0.0
	for i, v := range logits {
		w := math.Exp(float64(v-top) / s.how.Temperature)
		if math.IsNaN(w) {
			w = 0
		}
		s.order, s.weight = append(s.order, i), append(s.weight, w)
		sum += w
	}
	if s.how.TopP > 0 && s.how.TopP < 1 {
		// By weight, and by id among equals, so that a seed always means the same.
		slices.SortFunc(s.order, func(a, b int) int {
			return cmp.Or(cmp.Compare(s.weight[b], s.weight[a]), cmp.Compare(a, b))
		})
		kept, n := 0.0, 0
		for n < len(s.order) && (n == 0 || kept < s.how.TopP*sum) {
			kept += s.weight[s.order[n]]
			n++
		}
		s.order, sum = s.order[:n], kept
	}
	at := s.random.Float64() * sum
	for _, i := range s.order {
		if at -= s.weight[i]; at < 0 {
			return uint32(i)
		}
	}
	return uint32(best)
}

func (s *sampler) stops(token uint32) bool { return slices.Contains(s.how.Stop, token) }
