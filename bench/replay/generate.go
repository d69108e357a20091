package replay

import (
	"cmp"
	"container/heap"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// Workload is a generated trace: streams of sessions that arrive at random.
type Workload struct {
	Name        string
	BlockTokens int
	Requests    int // how many Trace makes
	Parts       []Part
	// Note says what the parameters are calibrated to.
	Note string
}

// Part is one stream of sessions of a workload. Lengths are in tokens and
// log-normal, given by their mean and by sigma, the standard deviation of the
// logarithm (0: constant).
type Part struct {
	Kind string // "chat", "agent" or "retrieval"
	// Rate is how many sessions begin a second (Poisson).
	Rate float64
	// Prompts is how many system or tool prompts there are, used with Zipf
	// exponent Skew, each of its own length; 0 means none.
	Prompts int
	Skew    float64
	Prompt  Length
	// First is the first message of a session beyond the prompt, Next each
	// later one, or tool result; Output each answer.
	First, Next, Output Length
	// Turns is the mean number of requests of a session (geometric), MaxTurns
	// its bound; Think the mean time between an answer and the next request
	// (exponential).
	Turns    float64
	MaxTurns int
	Think    time.Duration
	// Branch is the chance that a request goes on from an earlier point of its
	// session instead of the last one (agents that retry or fan out).
	Branch float64
	// Documents are what retrieval draws from, with Zipf exponent DocumentSkew;
	// PerQuery of them, each Chunk long, stand in front of the question in an
	// order of their own.
	Documents    int
	DocumentSkew float64
	PerQuery     int
	Chunk        Length
	// Limit ends a session whose prompt would be longer, in tokens.
	Limit int
}

// Length is a log-normal length in tokens.
type Length struct {
	Mean  float64
	Sigma float64
}

func (l Length) String() string {
	if l.Sigma == 0 {
		return fmt.Sprintf("%g", l.Mean)
	}
	return fmt.Sprintf("%g (σ %g)", l.Mean, l.Sigma)
}

func (l Length) draw(r *rand.Rand) int {
	if l.Mean == 0 {
		return 0
	}
	return max(1, int(l.Mean*math.Exp(r.NormFloat64()*l.Sigma-l.Sigma*l.Sigma/2)))
}

func (p Part) String() string {
	s := fmt.Sprintf("%s: %g sessions/s, %d prompts (Zipf %g) of %v tokens, first message %v, next %v, output %v, %g turns (at most %d), think time %v, limit %d",
		p.Kind, p.Rate, p.Prompts, p.Skew, p.Prompt, p.First, p.Next, p.Output, p.Turns, p.MaxTurns, p.Think, p.Limit)
	if p.Branch > 0 {
		s += fmt.Sprintf(", %g of the requests branch", p.Branch)
	}
	if p.Documents > 0 {
		s += fmt.Sprintf(", %d of %d documents (Zipf %g) of %v tokens in front", p.PerQuery, p.Documents, p.DocumentSkew, p.Chunk)
	}
	return s
}

// About returns the parameters in words.
func (w Workload) About(seed uint64) string {
	s := fmt.Sprintf("generated, seed %d, blocks of %d tokens", seed, w.BlockTokens)
	for _, p := range w.Parts {
		s += "; " + p.String()
	}
	if w.Note != "" {
		s += "; " + w.Note
	}
	return s
}

// check returns what is wrong with the parameters.
func (w Workload) check() error {
	fail := func(field string, value any) error {
		return fmt.Errorf("cannot generate workload %q: %s %v is out of range", w.Name, field, value)
	}
	if w.BlockTokens < 1 || w.BlockTokens > MaxBlockTokens {
		return fail("BlockTokens", w.BlockTokens)
	}
	if len(w.Parts) == 0 {
		return fail("Parts", 0)
	}
	for _, p := range w.Parts {
		switch {
		case !(p.Rate > 0):
			return fail("Rate", p.Rate)
		case p.Turns < 1:
			return fail("Turns", p.Turns)
		case p.MaxTurns < 1:
			return fail("MaxTurns", p.MaxTurns)
		case p.Limit < 1 || p.Limit > MaxTokens:
			return fail("Limit", p.Limit)
		case p.Branch < 0 || p.Branch > 1:
			return fail("Branch", p.Branch)
		case p.PerQuery > p.Documents:
			return fail("PerQuery", p.PerQuery)
		case p.Prompts < 0 || p.Documents < 0 || p.PerQuery < 0:
			return fail("Prompts, Documents or PerQuery", "below 0")
		}
	}
	return nil
}

// Stream yields requests in the order of their arrival, without end; the same
// for the same seed. It fails for parameters out of range.
func (w Workload) Stream(seed uint64) (iter.Seq[Request], error) {
	if err := w.check(); err != nil {
		return nil, err
	}
	return func(yield func(Request) bool) {
		g := &generator{blockTokens: w.BlockTokens}
		for i, p := range w.Parts {
			g.parts = append(g.parts, newPart(p, i, seed))
			heap.Push(&g.due, g.parts[i].arrive(0))
		}
		for {
			s := heap.Pop(&g.due).(*session)
			if s.turn == 0 { // the next session of its part
				heap.Push(&g.due, s.part.arrive(s.at))
			}
			req, more := s.next(g.blockTokens)
			if more {
				heap.Push(&g.due, s)
			}
			if !yield(req) {
				return
			}
		}
	}, nil
}

// Trace makes a trace of n requests, or as many as the workload says.
func (w Workload) Trace(seed uint64, n int) (*Trace, error) {
	requests, err := w.Stream(seed)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		n = w.Requests
	}
	return Collect(w.Name, w.About(seed), w.BlockTokens, n, requests)
}

type generator struct {
	blockTokens int
	parts       []*part
	due         sessions
}

// part is a Part with what it draws from.
type part struct {
	Part
	r         *rand.Rand
	salt      uint64 // keeps the contents of parts apart
	prompts   []text
	prompt    func() uint64
	document  func() uint64
	documents []int // lengths
	born      uint64
}

// text is a run of tokens with a name.
type text struct {
	name   uint64
	tokens int
}

func newPart(spec Part, index int, seed uint64) *part {
	p := &part{Part: spec, r: rand.New(rand.NewPCG(seed, uint64(index))), salt: chain(seed, uint64(index)+1)}
	for i := range spec.Prompts {
		p.prompts = append(p.prompts, text{chain(p.salt, uint64(i)<<8|1), spec.Prompt.draw(p.r)})
	}
	for range spec.Documents {
		p.documents = append(p.documents, spec.Chunk.draw(p.r))
	}
	p.prompt = zipf(p.r, spec.Skew, spec.Prompts)
	p.document = zipf(p.r, spec.DocumentSkew, spec.Documents)
	return p
}

// zipf draws one of n with probability proportional to 1/(1+i)^skew.
func zipf(r *rand.Rand, skew float64, n int) func() uint64 {
	if n == 0 {
		return func() uint64 { return 0 }
	}
	sums := make([]float64, n)
	sum := 0.0
	for i := range sums {
		sum += math.Pow(float64(1+i), -skew)
		sums[i] = sum
	}
	return func() uint64 {
		i, _ := slices.BinarySearch(sums, r.Float64()*sum)
		return uint64(min(i, n-1))
	}
}

// arrive returns the next session of the part after a time.
func (p *part) arrive(after time.Duration) *session {
	p.born++
	s := &session{part: p, at: after + exponential(p.r, 1/p.Rate), name: chain(p.salt, p.born<<8|2)}
	if len(p.prompts) > 0 {
		s.history = append(s.history, p.prompts[p.prompt()])
	}
	var chosen []uint64
	for len(chosen) < p.PerQuery {
		if d := p.document(); !slices.Contains(chosen, d) {
			chosen = append(chosen, d)
			s.history = append(s.history, text{chain(p.salt, d<<8|3), p.documents[d]})
		}
	}
	// Geometric with the given mean.
	s.turns = 1
	for s.turns < p.MaxTurns && p.r.Float64() < 1-1/p.Turns {
		s.turns++
	}
	return s
}

func exponential(r *rand.Rand, seconds float64) time.Duration {
	return time.Duration(r.ExpFloat64() * seconds * float64(time.Second))
}

// session is one conversation, task or query.
type session struct {
	part    *part
	name    uint64
	at      time.Duration
	turn    int
	turns   int
	history []text // the prompt of the last request and its answer
	texts   uint64 // so far
}

// decodeRate is how fast answers are generated, in tokens a second: the next
// turn begins after the answer.
const decodeRate = 50

// next returns the session's request that is due and whether another follows,
// at s.at.
func (s *session) next(blockTokens int) (Request, bool) {
	p := s.part
	s.turn++
	message := p.Next
	if s.turn == 1 {
		message = p.First
	}
	if s.turn > 1 && p.r.Float64() < p.Branch {
		// Back to the end of an earlier answer; the shared beginning stays.
		s.history = s.history[:1+p.r.IntN(len(s.history))]
	}
	s.say(message.draw(p.r))
	at, input := s.at, s.tokens()
	if input > p.Limit { // a long first message, cut off
		s.history[len(s.history)-1].tokens -= min(input-p.Limit, s.history[len(s.history)-1].tokens-1)
		input = s.tokens()
	}
	out := p.Output.draw(p.r)
	req := Request{At: at, Session: s.name, Blocks: blocks(s.history, blockTokens), Input: input, Output: out}
	s.say(out)
	s.at += time.Duration(out)*time.Second/decodeRate + exponential(p.r, p.Think.Seconds())
	return req, s.turn < s.turns && s.tokens()+int(p.Next.Mean) < p.Limit
}

func (s *session) say(tokens int) {
	s.texts++
	s.history = append(s.history, text{chain(s.name, s.texts), tokens})
}

func (s *session) tokens() (n int) {
	for _, t := range s.history {
		n += t.tokens
	}
	return n
}

// blocks cuts texts into full blocks and names each by all that it ends.
func blocks(texts []text, size int) []uint64 {
	var out []uint64
	prev := uint64(0)
	state := uint64(0) // of the texts that end in the current block
	filled := 0
	for _, t := range texts {
		for at := 0; at < t.tokens; {
			n := min(size-filled, t.tokens-at)
			state = chain(state, t.name)
			state = chain(state, uint64(at)<<20|uint64(n))
			at += n
			if filled += n; filled == size {
				prev = chain(prev, state)
				out = append(out, prev)
				state, filled = 0, 0
			}
		}
	}
	return out
}

// sessions is a heap by the time of the next request.
type sessions []*session

func (h sessions) Len() int { return len(h) }
func (h sessions) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(h[i].at, h[j].at), cmp.Compare(h[i].name, h[j].name)) < 0
}
func (h sessions) Swap(i, j int) { h[i], h[j] = h[j], h[i] }

// Push implements [heap.Interface].
func (h *sessions) Push(x any) { *h = append(*h, x.(*session)) }

// Pop implements [heap.Interface].
func (h *sessions) Pop() any {
	old := *h
	s := old[len(old)-1]
	*h = old[:len(old)-1]
	return s
}
