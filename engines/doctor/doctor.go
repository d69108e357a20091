package doctor

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
	"time"

	"membrane/engines/layout"
	"membrane/kvwire"
)

// Options say which sidecar is looked at.
type Options struct {
	// Addr is the path of the engine socket or HOST:PORT of the localhost
	// listener, Key the API key that the latter may want.
	Addr, Key string
	// Timeout bounds each step. Default 10 s.
	Timeout time.Duration
	// Engine is the id of the engine that must be attached; "": any.
	Engine string
}

// doctor is one examination.
type doctor struct {
	opts Options
	out  io.Writer
	ctx  context.Context
	name string

	model  kvwire.ModelFacts
	prompt []byte
}

// Run examines a sidecar, writes a line for each thing that it has looked at to
// out, and returns an error of one sentence that says what is wrong, nil if
// nothing is.
func Run(ctx context.Context, opts Options, out io.Writer) error {
	if opts.Timeout <= 0 {
		opts.Timeout = 10 * time.Second
	}
	d := &doctor{opts: opts, out: out, ctx: ctx, name: fmt.Sprintf("membrane-doctor-%d-%d", os.Getpid(), rand.Uint32())}
	// One of few namespaces: a sidecar remembers each that it ever saw.
	d.model = kvwire.ModelFacts{
		WeightsID: fmt.Sprintf("membrane-doctor-%d", rand.IntN(64)), DType: "float32", RoPE: "none", Layers: 2, KVHeads: 2, HeadSize: 32,
	}
	for range kvwire.MaxPageTokens { // one page of any size
		d.prompt = binary.LittleEndian.AppendUint32(d.prompt, rand.Uint32())
	}
	before, err := d.state()
	if err != nil {
		return err
	}
	if err := d.pages(); err != nil {
		return err
	}
	return d.judge(before)
}

func (d *doctor) note(format string, args ...any) {
	_, _ = fmt.Fprintf(d.out, "ok    "+format+"\n", args...)
}

// warn is for what may be wrong, or become so.
func (d *doctor) warn(format string, args ...any) {
	_, _ = fmt.Fprintf(d.out, "note  "+format+"\n", args...)
}

// step runs something with the time that a step may take.
func (d *doctor) step(fn func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(d.ctx, d.opts.Timeout)
	defer cancel()
	err := fn(ctx)
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("the sidecar at %q took a connection and did not answer within %v: it is stopped, or overloaded", d.opts.Addr, d.opts.Timeout)
	}
	return err
}

// attach connects and registers as an engine with the given layout.
func (d *doctor) attach(ctx context.Context, suffix, name string, inline bool) (*kvwire.Client, kvwire.Registered, error) {
	c, err := kvwire.Dial(ctx, d.opts.Addr, kvwire.ClientOptions{Key: d.opts.Key, Name: "membrane doctor", Inline: inline})
	if err != nil {
		return nil, kvwire.Registered{}, unreachable(d.opts.Addr, err)
	}
	w, err := layout.Sized(d.model, kvwire.Descriptor{
		Layout: name, DType: d.model.DType, BlockTokens: 1, TPSize: 1, PPSize: 1, Layers: [2]int{0, d.model.Layers}, Heads: [2]int{0, d.model.KVHeads},
	})
	var reg kvwire.Registered
	if err == nil {
		slots := 1
		if inline {
			slots = 0
		}
		reg, err = c.Register(ctx, kvwire.Register{Engine: d.name + suffix, Role: kvwire.RoleBoth, Model: d.model, Descriptor: w, InboxSlots: slots, Inline: inline})
	}
	if err != nil {
		_ = c.Close()
		return nil, reg, fmt.Errorf("the sidecar does not let a test engine register: %w", err)
	}
	return c, reg, nil
}

// unreachable says what to do about a sidecar that cannot be reached.
func unreachable(addr string, err error) error {
	switch {
	case kvwire.CodeOf(err) == kvwire.CodeUnauthorized:
		return fmt.Errorf("the sidecar at %q wants an API key with the scope engine: give --key or MEMBRANE_API_KEY", addr)
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("there is no engine socket at %q: is the sidecar running, with this --engine-socket, and is its directory mounted here", addr)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("user %d may not open the engine socket %q: add it to --engine-uids or to the socket's group", os.Getuid(), addr)
	// Which one it is depends on who is first, the sidecar's close or our greeting.
	case errors.Is(err, io.EOF), errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.ECONNRESET):
		return fmt.Errorf("the sidecar at %q hung up at once: is user %d in its --engine-uids", addr, os.Getuid())
	}
	return err
}

// pages stores one page and reads it back in every way.
func (d *doctor) pages() error {
	return d.step(func(ctx context.Context) error {
		c, reg, err := d.attach(ctx, "", "canonical", false)
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		d.prompt = d.prompt[:reg.PageTokens*4]
		object := make([]byte, reg.ObjectBytes)
		for i := range object {
			object[i] = byte(rand.Uint32())
		}
		way := "shared memory"
		socket := strings.Contains(d.opts.Addr, "/")
		switch {
		case c.Arena() != nil:
			d.note("shared memory: arena of %d MiB mapped, inbox of %d slots", reg.ArenaBytes>>20, reg.InboxSlots)
			if reg.InboxSlots == 0 {
				d.warn("no room was left in --inbox for a test engine: engines that come now store inline")
			}
		case socket:
			return fmt.Errorf("the sidecar gave no shared memory over the engine socket %q", d.opts.Addr)
		default:
			way = "the localhost listener"
			d.warn("no shared memory: the engine socket %q cannot be opened from here, so that pages are copied over %s", c.Server().Socket, d.opts.Addr)
		}
		began := time.Now()
		if err := d.store(ctx, c, object); err != nil {
			return err
		}
		if err := d.read(ctx, c, object); err != nil {
			return fmt.Errorf("a page that was stored through %s cannot be read back: %w", way, err)
		}
		d.note("stored and read one page of %d tokens (%d bytes) through %s in %v", reg.PageTokens, len(object), way, time.Since(began).Round(10*time.Microsecond))
		if err := d.others(ctx, reg.PageTokens, object); err != nil {
			return err
		}
		if _, err := c.Reset(ctx); err != nil { // of the doctor's namespace
			return fmt.Errorf("the test pages cannot be dropped: %w", err)
		}
		return nil
	})
}

// store stores the page through the inbox, or inline where there is none.
func (d *doctor) store(ctx context.Context, c *kvwire.Client, object []byte) error {
	l, err := c.Match(ctx, kvwire.Match{Tokens: d.prompt, Flags: kvwire.MatchLocal}, nil)
	if err != nil {
		return fmt.Errorf("the sidecar refuses a match: %w", err)
	}
	ref := kvwire.PageRef{Handle: l.Handle}
	var got kvwire.Committed
	if c.Slot(0) == nil {
		got, err = c.Write(ctx, ref, object)
	} else {
		var slots []kvwire.Reservation
		if slots, err = c.Reserve(ctx, []kvwire.PageRef{ref}, nil); err != nil {
			return fmt.Errorf("the sidecar refuses to reserve a slot: %w", err)
		}
		if s := slots[0]; s.Status != kvwire.StoreSlot {
			return fmt.Errorf("the sidecar takes no page: %s", s.Reason)
		}
		copy(c.Slot(slots[0].Slot), object)
		var all []kvwire.Committed
		if all, err = c.Commit(ctx, []kvwire.Commit{{PageRef: ref, Slot: slots[0].Slot}}, nil); err == nil {
			got = all[0]
		}
	}
	switch {
	case err != nil:
		return fmt.Errorf("the sidecar refuses a store: %w", err)
	case got.Status != kvwire.StoreStored:
		return fmt.Errorf("the sidecar takes no page: %s", got.Reason)
	case got.Sum != kvwire.Sum(object):
		return fmt.Errorf("the sidecar stored other bytes than were written: checksum %016x instead of %016x", uint64(got.Sum), uint64(kvwire.Sum(object)))
	}
	return nil
}

// read leases the page, copies it, releases it and compares.
func (d *doctor) read(ctx context.Context, c *kvwire.Client, want []byte) error {
	l, err := c.Match(ctx, kvwire.Match{Tokens: d.prompt, Flags: kvwire.MatchLocal, DeadlineUS: uint32(d.opts.Timeout.Microseconds() / 2)}, nil)
	if err != nil {
		return err
	}
	if l.Pages != 1 {
		return fmt.Errorf("it is missed for the reason %s", l.Reason)
	}
	got := make([]byte, 0, len(want))
	if arena := c.Arena(); arena != nil {
		at := l.Locations[0]
		if at.Offset+at.Length < at.Offset || at.Offset+at.Length > uint64(len(arena)) {
			return fmt.Errorf("it lies at %d, %d bytes long, beyond the arena", at.Offset, at.Length)
		}
		got = append(got, arena[at.Offset:][:at.Length]...)
	} else if err := c.Read(ctx, kvwire.Read{Lease: l.Lease, Pages: 1}, func(_ int, n int64) []byte { got = make([]byte, n); return got }); err != nil {
		return err
	}
	out, err := c.Release(ctx, kvwire.Release{Lease: l.Lease, Verify: true})
	switch {
	case err != nil:
		return err
	case out != kvwire.ReleaseLive:
		return fmt.Errorf("its lease did not hold (outcome %d)", out)
	case !bytes.Equal(got, want):
		return errors.New("it has other bytes")
	}
	return nil
}

// others reads the page inline, and as an engine with another layout.
func (d *doctor) others(ctx context.Context, pageTokens int, object []byte) error {
	inline, _, err := d.attach(ctx, "-inline", "canonical", true)
	if err != nil {
		return err
	}
	defer func() { _ = inline.Close() }()
	if err := d.read(ctx, inline, object); err != nil {
		return fmt.Errorf("a page cannot be read inline: %w", err)
	}
	d.note("read it inline")
	const other = "vllm-lbnhc"
	c, _, err := d.attach(ctx, "-other", other, false)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	want, err := d.translate(other, pageTokens, object)
	if err != nil {
		return err
	}
	if err := d.read(ctx, c, want); err != nil {
		return fmt.Errorf("a page cannot be read by an engine with the layout %s: %w", other, err)
	}
	d.note("read it as an engine with the layout %s", other)
	return nil
}

// translate returns what the page is in another layout.
func (d *doctor) translate(name string, pageTokens int, object []byte) ([]byte, error) {
	one := func(name string) (layout.Descriptor, error) {
		w, err := layout.Sized(d.model, kvwire.Descriptor{
			Layout: name, DType: d.model.DType, BlockTokens: 1, TPSize: 1, PPSize: 1, Layers: [2]int{0, d.model.Layers}, Heads: [2]int{0, d.model.KVHeads},
		})
		if err != nil {
			return layout.Descriptor{}, err
		}
		return layout.Describe(d.model, w, pageTokens)
	}
	from, err := one("canonical")
	if err != nil {
		return nil, err
	}
	to, err := one(name)
	if err != nil {
		return nil, err
	}
	plan, err := layout.NewPlan(to, from)
	if err != nil {
		return nil, err
	}
	out := make([]byte, plan.Bytes())
	return out, plan.Run(out, object)
}
