package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/valyala/fasthttp"

	"membrane/kvwire"
)

// rig is a sidecar with one engine attached to it that stores and reads bytes
// without computing them.
type rig struct {
	sidecar   *sidecar
	client    *kvwire.Client
	reg       kvwire.Registered
	page      []byte
	held      []byte // tokens of a prompt that is stored for good
	locations []kvwire.Location
}

const rigTimeout = 30 * time.Second

// rig starts a sidecar and attaches to it with pages of pageBytes bytes and
// pageTokens tokens.
func (c *core) rig(ctx context.Context, name string, pageBytes, pageTokens, slots int, args ...string) (*rig, error) {
	ctx, cancel := context.WithTimeout(ctx, rigTimeout)
	defer cancel()
	s, err := startSidecar(ctx, c.opts.Binary, c.dir, name, args...)
	if err != nil {
		return nil, err
	}
	r := &rig{sidecar: s, page: make([]byte, pageBytes)}
	fill(r.page, 7)
	if r.client, err = kvwire.Dial(ctx, s.socket, kvwire.ClientOptions{Name: "bench", Populate: true}); err == nil {
		r.reg, err = r.client.Register(ctx, registration(name, pageBytes, pageTokens, slots))
	}
	if err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

func registration(name string, pageBytes, pageTokens, slots int) kvwire.Register {
	return kvwire.Register{
		Engine: name, Role: kvwire.RoleBoth, InboxSlots: slots,
		Model: kvwire.ModelFacts{WeightsID: fmt.Sprintf("bench-%d", pageBytes), DType: "uint8", RoPE: "none", Layers: 1, KVHeads: 1, HeadSize: 1},
		Descriptor: kvwire.Descriptor{
			Layout: "bytes", DType: "uint8", BlockTokens: pageTokens, BlockBytes: int64(pageBytes),
			TPSize: 1, PPSize: 1, Layers: [2]int{0, 1}, Heads: [2]int{0, 1},
		},
	}
}

func (r *rig) close() {
	if r.client != nil {
		_ = r.client.Close()
	}
	r.sidecar.kill()
}

func (r *rig) match(ctx context.Context, tokens []byte, flags uint16) (kvwire.Leased, error) {
	ctx, cancel := context.WithTimeout(ctx, rigTimeout)
	defer cancel()
	l, err := r.client.Match(ctx, kvwire.Match{DeadlineUS: 10e6, LeaseMS: 10_000, Flags: flags, Tokens: tokens}, r.locations[:0])
	r.locations = l.Locations
	return l, err
}

// timeMatch times a match of the prompt that is held, whose pages it then
// releases. It fails when not all of them are leased.
func (r *rig) timeMatch(ctx context.Context, pages int) (time.Duration, error) {
	begin := time.Now()
	l, err := r.match(ctx, r.held, 0)
	took := time.Since(begin)
	if err != nil {
		return 0, err
	}
	if int(l.Pages) != pages {
		return 0, fmt.Errorf("%d of %d pages are leased (%s)", l.Pages, pages, l.Reason)
	}
	return took, r.end(ctx, l)
}

// end releases a match's lease, which must have held, and drops its chain.
func (r *rig) end(ctx context.Context, l kvwire.Leased) error {
	outcome, err := r.client.Release(ctx, kvwire.Release{Lease: l.Lease})
	if err != nil {
		return err
	}
	if outcome != kvwire.ReleaseLive {
		return fmt.Errorf("the lease did not hold: outcome %d", outcome)
	}
	return r.client.Drop(ctx, l.Handle)
}

// commitBatch is how many pages are committed at once.
const commitBatch = 8

// store stores every page of a prompt. Slots are asked for a batch ahead of
// where they are written. With begin, it is set to the moment before the first
// reserve.
func (r *rig) store(ctx context.Context, tokens []byte, pageTokens int, begin *time.Time) error {
	return r.storeAs(ctx, tokens, pageTokens, begin, true)
}

// storeSome is store that does not mind when the sidecar refuses a page.
func (r *rig) storeSome(ctx context.Context, tokens []byte, pageTokens int) error {
	return r.storeAs(ctx, tokens, pageTokens, nil, false)
}

func (r *rig) storeAs(ctx context.Context, tokens []byte, pageTokens int, begin *time.Time, strict bool) error {
	l, err := r.match(ctx, tokens, kvwire.MatchLocal|kvwire.MatchPresence)
	if err != nil {
		return err
	}
	pages := len(tokens) / 4 / pageTokens
	batch := min(commitBatch, max(r.reg.InboxSlots, 1))
	if pages > 1000 { // small pages: the batch is the inbox
		batch = r.reg.InboxSlots
	}
	var refs []kvwire.PageRef
	var commits []kvwire.Commit
	if begin != nil {
		*begin = time.Now()
	}
	for first := 0; first < pages; first += batch {
		refs, commits = refs[:0], commits[:0]
		for i := first; i < min(first+batch, pages); i++ {
			refs = append(refs, kvwire.PageRef{Handle: l.Handle, Page: uint32(i)})
		}
		slots, err := r.client.Reserve(ctx, refs, nil)
		if err != nil {
			return err
		}
		for i, s := range slots {
			if s.Status != kvwire.StoreSlot {
				if strict {
					return fmt.Errorf("page %d gets no slot (status %d, %s)", first+i, s.Status, s.Reason)
				}
				continue
			}
			copy(r.client.Slot(s.Slot), r.page)
			commits = append(commits, kvwire.Commit{PageRef: refs[i], Slot: s.Slot})
		}
		done, err := r.client.Commit(ctx, commits, nil)
		if err != nil {
			return err
		}
		for i, d := range done {
			if d.Status != kvwire.StoreStored && strict {
				return fmt.Errorf("page %d is not stored (status %d, %s)", first+i, d.Status, d.Reason)
			}
		}
	}
	return r.client.Drop(ctx, l.Handle)
}

// poll asks again until f is true or ctx ends.
func poll(ctx context.Context, what string, f func() (bool, error)) error {
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	var last error
	for {
		ok, err := f()
		if ok {
			return nil
		}
		last = err
		select {
		case <-ctx.Done():
			return fmt.Errorf("cannot wait for %s: %w", what, errors.Join(ctx.Err(), last))
		case <-ticker.C:
		}
	}
}

// get fetches a document from a sidecar.
func get(url string) ([]byte, error) {
	status, body, err := fasthttp.GetTimeout(nil, url, 2*time.Second)
	if err != nil {
		return nil, fmt.Errorf("cannot get %s: %w", url, err)
	}
	if status != fasthttp.StatusOK {
		return nil, fmt.Errorf("cannot get %s: status %d: %s", url, status, body)
	}
	return body, nil
}

// getJSON fetches a JSON document from a sidecar.
func getJSON(url string, into any) error {
	body, err := get(url)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("cannot decode %s: %w", url, err)
	}
	return nil
}

type peerList struct {
	Peers []peerEntry `json:"peers"`
}

type peerEntry struct {
	NodeID  string `json:"node_id"`
	Healthy bool   `json:"healthy"`
}

// healthyPeers returns the names of the peers that a sidecar sees alive.
func healthyPeers(http string) ([]string, error) {
	var list peerList
	if err := getJSON("http://"+http+"/peers", &list); err != nil {
		return nil, err
	}
	var names []string
	for _, p := range list.Peers {
		if p.Healthy {
			names = append(names, p.NodeID)
		}
	}
	slices.Sort(names)
	return names, nil
}

func waitForPeer(ctx context.Context, http, name string) error {
	ctx, cancel := context.WithTimeout(ctx, rigTimeout)
	defer cancel()
	return poll(ctx, "peer "+name, func() (bool, error) {
		names, err := healthyPeers(http)
		return len(names) > 0, err
	})
}
