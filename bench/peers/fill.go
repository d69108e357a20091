package peers

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"membrane/bench"
)

// touched is how much memory is written before anything is timed: what the
// host has not backed yet costs many times more at its first touch.
const touched = 4 * gib

func (r *run) touch() error {
	n := touched
	if r.opts.Quick {
		n = 64 * mib
	}
	r.opts.Progress("touching memory")
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return fmt.Errorf("cannot touch %d bytes: %w", n, err)
	}
	return unix.Munmap(b)
}

// changeSize drops what the systems hold of one size of values and makes the
// values of the next.
func (r *run) changeSize(ctx context.Context, from int, to cell) error {
	if from > 0 {
		for _, s := range r.systems {
			if r.filled[s.store] {
				err := r.unfill(ctx, s)
				if err != nil && (s.ours || ctx.Err() != nil) {
					return err
				}
				if err != nil { // its next cell says so, if it is still so then
					r.opts.Progress(fmt.Sprintf("%s: %v", s.name, err))
				}
			}
		}
	}
	r.filled = map[string]bool{}
	if r.payloads != nil && r.payloads.Size != to.Size {
		err := r.payloads.Close()
		r.payloads = nil
		if err != nil {
			return err
		}
	}
	if to.Size > 0 && r.payloads == nil {
		var err error
		r.payloads, err = NewPayloads(r.sizing.set[to.Size]/to.Size, to.Size)
		return err
	}
	return nil
}

// loadBatch is how many values are stored at a time while loading.
const loadBatch = 8

// fill stores the values that read cells ask for, unless they are there.
func (r *run) fill(ctx context.Context, s *system, on *running) error {
	if s.ceiling || r.filled[s.store] {
		return nil
	}
	conn, err := r.openFill(ctx, s, on)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := storeAll(conn, r.payloads, r.payloads.Len()); err != nil {
		return fmt.Errorf("cannot load: %w", err)
	}
	r.filled[s.store] = true
	return nil
}

// storeAll stores the values of the first n keys.
func storeAll(conn Conn, p *Payloads, n int) error {
	values := make([][]byte, 0, loadBatch)
	for first := 0; first < n; first += loadBatch {
		values = values[:0]
		for i := first; i < min(first+loadBatch, n); i++ {
			values = append(values, p.Value(i))
		}
		if err := conn.Set(first, values); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) openFill(ctx context.Context, s *system, on *running) (Conn, error) {
	open := s.open
	if s.fill != nil {
		open = s.fill
	}
	ctx, cancel := context.WithTimeout(ctx, ioTime)
	defer cancel()
	return open(ctx, on, r.opening("loader", r.payloads.Size, true))
}

// unfill drops the values that read cells ask for.
func (r *run) unfill(ctx context.Context, s *system) error {
	on := r.running[s.product]
	if on == nil || on.helper != nil || r.payloads == nil { // metadata has no values
		return nil
	}
	return on.while(ctx, func() error {
		conn, err := r.openFill(ctx, s, on)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		return r.empty(s, conn)
	})
}

// empty drops what fill stored, by a connection that is open. A store that may
// have lost some of it is emptied, too: what stayed would push out what the
// next cell writes.
func (r *run) empty(s *system, conn Conn) error {
	if !r.filled[s.store] {
		return nil
	}
	delete(r.filled, s.store)
	return drop(conn, 0, r.payloads.Len())
}

// drop drops n keys, if the protocol can.
func drop(conn Conn, first, n int) error {
	if err := conn.Drop(first, n); !errors.Is(err, errNoDrop) {
		return err
	}
	return nil
}

// passes measures a write cell: passes of the same number of new keys, dropped
// after each, so that nothing is overwritten or evicted. Only the passes are
// timed.
func (r *run) passes(ctx context.Context, c cell, s *system, on *running, streams []*stream) (total measurement, err error) {
	if err := r.empty(s, streams[0].conn); err != nil {
		return total, err
	}
	defer func() {
		if err != nil {
			_ = dropWritten(streams) // as far as its connections still work
		}
	}()
	per := max(1, r.sizing.written/c.Size/c.Streams/c.Batch) * c.Batch
	var cpu time.Duration
	const most = 50
	for pass := 0; pass <= most && (pass == 0 || total.elapsed < r.opts.Duration); pass++ {
		before, err := on.cpu()
		if err != nil {
			return total, err
		}
		m, err := together(streams, func(s *stream, m *measurement) error { return s.write(ctx, m, per) })
		if err != nil {
			return total, err
		}
		if err := on.took(&m, before); err != nil {
			return total, err
		}
		if pass > 0 { // the first makes memory and handles present
			total.add(m)
			total.elapsed += m.elapsed
			cpu += m.cpu
			total.resident = m.resident
		}
		if err := readBack(streams, per); err != nil {
			return total, err
		}
		if err := dropWritten(streams); err != nil {
			return total, err
		}
	}
	total.cpu = cpu
	return total, nil
}

// write stores n new keys.
func (s *stream) write(ctx context.Context, m *measurement, n int) error {
	for range n / s.cell.Batch {
		if err := ctx.Err(); err != nil {
			return err
		}
		first := s.newKey()
		s.next += s.cell.Batch - 1
		begin := time.Now()
		if err := s.set(m, first); err != nil {
			return err
		}
		m.latencies = append(m.latencies, time.Since(begin))
		m.ops++
	}
	return nil
}

// readBack checks one key in sixteen of what each stream has written.
func readBack(streams []*stream, n int) error {
	for _, s := range streams {
		for i := 0; i < n; i += 16 * s.cell.Batch {
			var m measurement
			missed, err := s.get(&m, newKeyOf(s.id, i))
			if err == nil && missed {
				err = fmt.Errorf("key %d was stored and is gone", newKeyOf(s.id, i))
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// dropWritten forgets the new keys of all streams.
func dropWritten(streams []*stream) error {
	for _, s := range streams {
		for at := 0; at < s.next; at += chainPages {
			if err := drop(s.conn, newKeyOf(s.id, at), min(chainPages, s.next-at)); err != nil {
				return err
			}
		}
		s.next = 0
	}
	return nil
}

// copyLeased times what bench core calls a read: copying leased pages, beside
// memcpy of as much.
func (r *run) copyLeased(ctx context.Context, s *stream) error {
	conn, ok := s.conn.(*shmConn)
	if !ok || s.cell.Size != big {
		return nil
	}
	n := min(chainPages, r.payloads.Len(), int(r.sizing.budget/4)/big) &^ 7
	dst, err := unix.Mmap(-1, 0, n*big, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return fmt.Errorf("cannot map %d bytes: %w", n*big, err)
	}
	defer func() { _ = unix.Munmap(dst) }()
	l, err := conn.lease(ctx, 0, n)
	if err != nil {
		return err
	}
	if int(l.Pages) != n {
		return fmt.Errorf("%d of %d pages are leased (%s)", l.Pages, n, l.Reason)
	}
	begin := time.Now()
	arena := conn.client.Arena()
	for i, at := range l.Locations {
		copy(dst[i*big:(i+1)*big], arena[at.Offset:at.Offset+at.Length])
	}
	r.copied = append(r.copied, float64(n*big)/time.Since(begin).Seconds()/1e9)
	if err := conn.release(ctx, l.Lease, 0); err != nil {
		return err
	}
	bare, err := bench.Memcpy(n*big, big)
	r.memcpy = append(r.memcpy, bare)
	return err
}

// fullCaches fills each system, one at a time and freshly started, and takes
// what its memory is beside what it holds.
func (r *run) fullCaches(ctx context.Context, c cell) error {
	if err := r.changeSize(ctx, 0, c); err != nil {
		return err
	}
	for _, s := range r.systems {
		if !s.takes(c) {
			continue
		}
		r.opts.Progress(fmt.Sprintf("%s: %s", c, s.name))
		res := r.result(c, s)
		if why := r.absent[s.product]; why != "" {
			res.why = why
			continue
		}
		if err := r.fullCache(ctx, c, s, res); err != nil {
			if s.ours || ctx.Err() != nil {
				return fmt.Errorf("cannot measure %q of %s: %w", c, s.name, err)
			}
			res.why = reason(err)
		}
	}
	return nil
}

func (r *run) fullCache(ctx context.Context, c cell, s *system, res *result) error {
	on, err := r.start(ctx, s.product, r.sizing.full)
	if err != nil {
		return err
	}
	defer on.close()
	conn, err := r.openFill(ctx, s, on)
	if err != nil {
		return err
	}
	// As much as fits, and no more where nothing would be evicted.
	n := int(r.sizing.full) * 96 / 100 / c.Size
	if err := storeAll(conn, r.payloads, n); err != nil {
		return errors.Join(err, conn.Close())
	}
	dst, got := [][]byte{make([]byte, c.Size)}, make([]bool, 1)
	for key := range n {
		if err := ctx.Err(); err != nil {
			return errors.Join(err, conn.Close())
		}
		err := conn.Get(key, dst, got)
		if err == nil && got[0] {
			err = verify(dst[0], key, r.payloads)
			res.held += int64(c.Size)
		}
		if err != nil {
			return errors.Join(err, conn.Close())
		}
	}
	// Without this process's mapping all of an arena is the sidecar's.
	if err := conn.Close(); err != nil {
		return err
	}
	res.pss, err = on.memory()
	return err
}
