package bench

import (
	"context"
	"net/http"
	"time"
)

// answer is what an embedded engine streamed back for one prompt.
type answer struct {
	tokens []uint32
	// firstToken is the time from sending the request to the first token's
	// arrival here.
	firstToken time.Duration
	// reused is what the engine says of its prompt.
	reused    int
	peerPages int // of what was reused, from other sidecars for this request
	reason    string
	// load is how long the engine waited for its sidecar before it computed.
	load time.Duration
}

// complete sends a prompt to an embedded engine's completion API and reads the
// stream to its end.
func complete(ctx context.Context, client *http.Client, addr string, prompt []uint32, maxTokens int) (answer, error) {
	begin := time.Now()
	s, err := streamCompletion(ctx, client, "http://"+addr, "", newCompletion("", prompt, maxTokens))
	return answerOf(s, begin), err
}

func answerOf(s streamed, begin time.Time) answer {
	a := answer{
		tokens: s.tokens, reused: s.reuse.Tokens, peerPages: s.reuse.PeerPages, reason: s.reuse.Reason,
		load: time.Duration(s.reuse.LoadMS * float64(time.Millisecond)),
	}
	if len(s.arrivals) > 0 {
		a.firstToken = s.arrivals[0].Sub(begin)
	}
	return a
}
