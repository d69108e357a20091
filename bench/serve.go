package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"
)

// ServeOptions tune [Serve].
type ServeOptions struct {
	// URL is a running server, http://HOST:PORT; "" starts vLLM once an arm.
	URL string
	// Key is its API key, Model the model's name; "" takes the first that it
	// lists.
	Key, Model string

	// VLLM says which vLLM is started, LMCache is an interpreter that has vLLM
	// and LMCache.
	VLLM    VLLMOptions
	LMCache string
	// Arms are the names of the arms to run, in this order; none is all.
	Arms []string
	// Rounds is how often every arm runs the schedule, all arms in turn, each
	// from empty caches. 0 is 1.
	Rounds int
	// EngineMiB is the size of the engine's own KV pool, CacheMiB the memory of
	// the cache beside it.
	EngineMiB, CacheMiB int

	Mix      PromptMix
	Requests int
	Rate     float64 // a second, on the mean
	Seed     uint64
	InFlight int // the most under way at a time
	Timeout  time.Duration
	Targets  ServeTargets

	// Binary is the membrane binary that is started; "" is this one.
	Binary  string
	Version string
	// Progress is called with a line for a person now and then.
	Progress func(string)
}

// Check reports a setting that is not allowed.
func (o ServeOptions) Check() error {
	_, err := chooseArms(o.Arms)
	return errors.Join(o.Mix.check(o.Requests, o.Rate), err)
}

// ServeReport is what [Serve] saw. Its JSON form is kept stable.
type ServeReport struct {
	Machine  Machine       `json:"machine"`
	Workload ServeWorkload `json:"workload"`
	Arms     []ServeArm    `json:"arms"`
}

// ServeWorkload says what was sent.
type ServeWorkload struct {
	PromptMix
	URL          string  `json:"url,omitempty"`
	Requests     int     `json:"requests"`
	Rounds       int     `json:"rounds"`
	Rate         float64 `json:"rate_s"`
	Seed         uint64  `json:"seed"`
	InFlight     int     `json:"max_in_flight"`
	PromptTokens int     `json:"prompt_tokens"` // of all requests
	EngineMiB    int     `json:"engine_mib,omitempty"`
	CacheMiB     int     `json:"cache_mib,omitempty"`
	TTFTTargetMS float64 `json:"ttft_target_ms"`
	ITLTargetMS  float64 `json:"itl_target_ms"`
}

// Serve sends an open-loop load to an OpenAI-compatible server, or to real vLLM
// with each of several KV connectors in turn, all with the same schedule. An
// arm that cannot be run is in the report with the reason.
func Serve(ctx context.Context, opts ServeOptions) (ServeReport, error) {
	if opts.Progress == nil {
		opts.Progress = func(string) {}
	}
	opts.Rounds, opts.InFlight = max(opts.Rounds, 1), max(opts.InFlight, 1)
	schedule, err := opts.Mix.schedule(opts.Requests, opts.Rate, opts.Seed)
	if err != nil {
		return ServeReport{}, err
	}
	r := ServeReport{Machine: thisMachine(opts.Version), Workload: opts.workload(schedule)}
	if opts.URL != "" {
		r.Arms, err = opts.serveURL(ctx, schedule)
		return r, err
	}
	if opts.Binary == "" {
		if opts.Binary, err = executable(); err != nil {
			return r, err
		}
	}
	r.Workload.EngineMiB, r.Workload.CacheMiB = opts.EngineMiB, opts.CacheMiB
	r.Arms, err = opts.serveArms(ctx, schedule)
	return r, err
}

func (o ServeOptions) workload(schedule []arrival) ServeWorkload {
	w := ServeWorkload{
		PromptMix: o.Mix, URL: o.URL, Requests: o.Requests, Rounds: o.Rounds, Rate: o.Rate, Seed: o.Seed, InFlight: o.InFlight,
		TTFTTargetMS: millis(o.Targets.TTFT), ITLTargetMS: millis(o.Targets.ITL),
	}
	for _, a := range schedule {
		w.PromptTokens += len(a.prompt)
	}
	return w
}

func (o ServeOptions) load(client *http.Client, base, model string) load {
	return load{client: client, base: strings.TrimRight(base, "/"), key: o.Key, model: model, answer: o.Mix.AnswerTokens, inFlight: o.InFlight, timeout: o.Timeout}
}

// loadClient returns a client that uses connections again, but none that the
// server may be about to close (after 5 s in vLLM's).
func (o ServeOptions) loadClient() *http.Client {
	return &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: o.InFlight, DisableCompression: true, IdleConnTimeout: 2 * time.Second}}
}

func (o ServeOptions) serveURL(ctx context.Context, schedule []arrival) ([]ServeArm, error) {
	client := o.loadClient()
	defer client.CloseIdleConnections()
	base := strings.TrimSuffix(strings.TrimRight(o.URL, "/"), "/v1")
	model := o.Model
	if model == "" {
		var err error
		if model, err = firstModel(ctx, client, base, o.Key); err != nil {
			return nil, err
		}
	}
	var rounds [][]outcome
	for i := range o.Rounds {
		o.Progress(fmt.Sprintf("round %d of %d: %d requests to %s", i+1, o.Rounds, len(schedule), base))
		round, err := o.load(client, base, model).run(ctx, schedule)
		if err != nil {
			return nil, err
		}
		rounds = append(rounds, round)
	}
	return []ServeArm{o.summarize(base, rounds, rounds[0])}, nil
}

func (o ServeOptions) summarize(name string, rounds [][]outcome, reference []outcome) ServeArm {
	arm := summarize(name, rounds, o.Targets)
	for _, round := range rounds {
		switch n := differ(round, reference); {
		case n < 0:
			arm.Differ = -1
		case arm.Differ >= 0:
			arm.Differ += n
		}
	}
	return arm
}

// firstModel asks a server for the name of its first model.
func firstModel(ctx context.Context, client *http.Client, base, key string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	fail := func(err error) (string, error) {
		return "", fmt.Errorf("cannot list the models of %q: %w", base, err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/v1/models", http.NoBody)
	if err != nil {
		return fail(err)
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := client.Do(req)
	if err != nil {
		return fail(err)
	}
	defer func() { _ = resp.Body.Close() }()
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if resp.StatusCode != http.StatusOK {
		return fail(fmt.Errorf("status %d", resp.StatusCode))
	}
	if err := json.NewDecoder(http.MaxBytesReader(nil, resp.Body, 1<<20)).Decode(&list); err != nil {
		return fail(err)
	}
	if len(list.Data) == 0 {
		return fail(errors.New("it has none"))
	}
	return list.Data[0].ID, nil
}

// serveArms boots every arm in turn, round by round; each round begins with
// another arm.
func (o ServeOptions) serveArms(ctx context.Context, schedule []arrival) ([]ServeArm, error) {
	arms, err := chooseArms(o.Arms)
	if err != nil {
		return nil, err
	}
	rounds := make([][][]outcome, len(arms))
	why := make([]string, len(arms))
	dir, err := os.MkdirTemp("", "membrane-serve-")
	if err != nil {
		return nil, fmt.Errorf("cannot make a folder: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	var host *vllmHost
	if o.VLLM.Python != "" {
		if host, err = newVLLMHost(ctx, o.VLLM, o.Binary, dir); err != nil {
			return nil, err
		}
		host.client = o.loadClient()
		defer host.client.CloseIdleConnections()
	}
	for round := range o.Rounds {
		for i := range arms {
			n := (i + round) % len(arms)
			if why[n] != "" {
				continue
			}
			o.Progress(fmt.Sprintf("round %d of %d, %s", round+1, o.Rounds, arms[n].name))
			got, err := o.serveArm(ctx, host, arms[n], schedule)
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if err != nil {
				o.Progress(fmt.Sprintf("%s cannot be run: %v", arms[n].name, err))
				why[n], rounds[n] = firstLine(err.Error()), nil
				continue
			}
			rounds[n] = append(rounds[n], got)
		}
	}
	return o.summarizeArms(arms, rounds, why), nil
}

func (o ServeOptions) summarizeArms(arms []serveArm, rounds [][][]outcome, why []string) []ServeArm {
	var out []ServeArm
	first := slices.IndexFunc(rounds, func(r [][]outcome) bool { return len(r) > 0 })
	for i, a := range arms {
		if why[i] != "" {
			out = append(out, ServeArm{Name: a.name, Why: why[i]})
			continue
		}
		out = append(out, o.summarize(a.name, rounds[i], rounds[first][0]))
	}
	return out
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// serveArm starts one arm, runs the schedule against it and ends it.
func (o ServeOptions) serveArm(ctx context.Context, host *vllmHost, a serveArm, schedule []arrival) ([]outcome, error) {
	run := &armRun{opts: o, host: host}
	defer run.close()
	server, err := a.start(ctx, run)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(server.wait(ctx), server.forget(ctx)); err != nil {
		return nil, err
	}
	got, err := o.load(host.client, server.base, vllmModel).run(ctx, schedule)
	if err == nil && !server.running() {
		err = fmt.Errorf("%s ended under load\n%s", server.name, server.tail())
	}
	return got, err
}
