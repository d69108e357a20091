package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// state is what the sidecar says of itself and of its engines.
type state struct {
	Node    string   `json:"node"`
	Engines []engine `json:"engines"`
}

type engine struct {
	Engine       string   `json:"engine"`
	Tenant       string   `json:"tenant"`
	Namespace    string   `json:"namespace"`
	Form         string   `json:"form"`
	Layout       string   `json:"layout"`
	PageTokens   int      `json:"page_tokens"`
	TPSize       int      `json:"tp_size"`
	PPSize       int      `json:"pp_size"`
	Workers      int      `json:"workers"`
	Scheduler    bool     `json:"scheduler"`
	Problem      string   `json:"problem"`
	Untranslated []string `json:"untranslated"`

	HitPages      uint64            `json:"hit_pages"`
	StoredPages   uint64            `json:"stored_pages"`
	MissedPages   map[string]uint64 `json:"missed_pages"`
	RefusedStores map[string]uint64 `json:"refused_stores"`
}

// state asks for the state before the doctor's own pages change the counters.
func (d *doctor) state() (s state, err error) {
	err = d.step(func(ctx context.Context) error {
		c, reg, err := d.attach(ctx, "-state", "canonical", true)
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		body, err := c.Stats(ctx)
		if err != nil {
			return fmt.Errorf("the sidecar does not say how it is: %w", err)
		}
		if err := json.Unmarshal(body, &s); err != nil {
			return fmt.Errorf("what the sidecar says of itself cannot be read: %w", err)
		}
		d.note("reached %s: node %s, %s, tenant %s", d.opts.Addr, s.Node, c.Server().Server, reg.Tenant)
		return nil
	})
	s.Engines = slices.DeleteFunc(s.Engines, func(e engine) bool { return strings.HasPrefix(e.Engine, "membrane-doctor-") })
	return s, err
}

// judge says what is wrong about the engines.
func (d *doctor) judge(s state) error {
	if d.opts.Engine != "" {
		s.Engines = slices.DeleteFunc(s.Engines, func(e engine) bool { return e.Engine != d.opts.Engine })
		if len(s.Engines) == 0 {
			return fmt.Errorf("no engine %q is registered at %q", d.opts.Engine, d.opts.Addr)
		}
	}
	if len(s.Engines) == 0 {
		return fmt.Errorf("the sidecar works and no engine is registered: start the engine with its connector's settings, pointed at %q, and look for \"membrane\" in its log", d.opts.Addr)
	}
	for _, e := range s.Engines {
		d.note("engine %q: layout %s, tensor parallel %d, pipeline parallel %d, pages of %d tokens, namespace %.16s, form %s", e.Engine, e.Layout, e.TPSize, e.PPSize, e.PageTokens, e.Namespace, e.Form)
		if err := e.judge(); err != nil {
			return err
		}
		for _, u := range e.Untranslated {
			d.warn("engine %q cannot read some pages: %s", e.Engine, u)
		}
		if err := d.judgeCounts(&e); err != nil {
			return err
		}
	}
	return nil
}

// judge says what is wrong about one engine.
func (e *engine) judge() error {
	if e.Problem != "" {
		return fmt.Errorf("engine %q is attached and its pages are not shared with others: %s", e.Engine, e.Problem)
	}
	if want := e.TPSize * e.PPSize; e.Workers < want {
		return fmt.Errorf("engine %q has %d of its %d worker processes attached: look at the log of the others", e.Engine, e.Workers, want)
	}
	if !e.Scheduler {
		return fmt.Errorf("engine %q has its workers attached and no scheduler: nothing will be looked up", e.Engine)
	}
	return nil
}

// advice says what a reason means for somebody who expected hits.
var advice = map[string]string{
	"layout":      "the pages are here, laid out in a way that cannot be translated for this engine: the sidecar's log names the field",
	"namespace":   "the same tokens are here, computed by a model of other facts: compare weights, dtype, RoPE, quantisation and page size of both engines in /statusz",
	"incomplete":  "not every rank of the engine that wrote the pages has stored its part",
	"deadline":    "pages do not come in time: raise the connector's match deadline",
	"peer":        "peers that hold the pages fail to send them: look at their logs",
	"pinned":      "leases hold as much of the cache as they may: raise --memory",
	"over_budget": "no room is free for stores: raise --memory or --inbox",
	"too_large":   "a page is larger than the cache: raise --memory",
	"corrupt":     "pages fail their checksum: look at the machine's memory and at the sidecar's log",
}

// judgeCounts looks at what an engine got and did not get so far.
func (d *doctor) judgeCounts(e *engine) error {
	missed, most := worst(e.MissedPages)
	refused, why := worst(e.RefusedStores)
	d.note("engine %q: %d pages hit, %d missed%s, %d stored, %d stores refused%s", e.Engine,
		e.HitPages, missed, reasons(e.MissedPages), e.StoredPages, refused, reasons(e.RefusedStores))
	switch {
	case e.StoredPages == 0 && refused > 0 && advice[why] != "":
		return fmt.Errorf("engine %q has never stored a page, for the reason %s: %s", e.Engine, why, advice[why])
	case e.HitPages == 0 && advice[most] != "":
		return fmt.Errorf("engine %q has never hit a page, mostly for the reason %s: %s", e.Engine, most, advice[most])
	case e.HitPages == 0 && e.StoredPages == 0 && missed > 0:
		return fmt.Errorf("engine %q has asked for pages and never stored one: look for \"membrane\" in the log of its workers", e.Engine)
	case e.HitPages+missed+e.StoredPages == 0:
		d.warn("no request of it has come through yet: send one prompt of a few pages twice, then look again")
	}
	return nil
}

// worst returns the sum of all counts and the reason with the most.
func worst(m map[string]uint64) (all uint64, most string) {
	for why, n := range m {
		if all += n; n > m[most] {
			most = why
		}
	}
	return all, most
}

func reasons(m map[string]uint64) string {
	var all []string
	for why, n := range m {
		all = append(all, fmt.Sprintf("%s %d", why, n))
	}
	if len(all) == 0 {
		return ""
	}
	slices.Sort(all)
	return " (" + strings.Join(all, ", ") + ")"
}
