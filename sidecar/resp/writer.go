package resp

import (
	"errors"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"membrane/cache"
	"membrane/kvwire"
	"membrane/sidecar/listener"
)

// writer gathers replies and writes them in one go, values from where they
// lie. Its first error stays and makes all that follows void.
type writer struct {
	s     *Server
	sock  *listener.Sock
	proto int // 2 or 3

	text    []byte // never grows: the vector points into it
	mark    int    // up to here text is in the vector
	vector  []unix.Iovec
	views   [maxViews]cache.View
	held    int // of views
	pending int // bytes of values in the vector
	sums    cache.PartSums
	err     error
}

// flush writes everything and lets go of the values.
func (w *writer) flush() error {
	w.cut()
	w.send()
	for i := range w.held {
		w.views[i].Close()
	}
	w.s.count.sent.Add(w.pending)
	w.text, w.mark, w.held, w.pending = w.text[:0], 0, 0, 0
	return w.err
}

// cut puts text that is not there yet into the vector.
func (w *writer) cut() {
	if w.mark < len(w.text) {
		w.put(w.text[w.mark:])
		w.mark = len(w.text)
	}
}

func (w *writer) put(b []byte) {
	v := unix.Iovec{Base: unsafe.SliceData(b)}
	v.SetLen(len(b))
	w.vector = append(w.vector, v)
}

// room makes room for n bytes of text, n at most the buffer's size.
func (w *writer) room(n int) {
	if len(w.text)+n > cap(w.text) {
		_ = w.flush() // the error stays
	}
}

const shortText = 64

func (w *writer) raw(b string) {
	for len(b) > 0 {
		if len(w.text) == cap(w.text) {
			_ = w.flush()
		}
		n := min(len(b), cap(w.text)-len(w.text))
		w.text = append(w.text, b[:n]...)
		b = b[n:]
	}
}

func (w *writer) number(first byte, n int64) {
	w.room(shortText)
	w.text = append(w.text, first)
	w.text = strconv.AppendInt(w.text, n, 10)
	w.text = append(w.text, '\r', '\n')
}

func (w *writer) integer(n int64) { w.number(':', n) }
func (w *writer) array(n int)     { w.number('*', int64(n)) }
func (w *writer) ok()             { w.raw("+OK\r\n") }

// table begins a map of n pairs: in RESP2 an array.
func (w *writer) table(n int) {
	if w.proto == 3 {
		w.number('%', int64(n))
		return
	}
	w.array(2 * n)
}

func (w *writer) simple(text string) {
	w.raw("+")
	w.raw(text)
	w.raw("\r\n")
}

// fail writes an error: code and sentence, on one line.
func (w *writer) fail(text string) {
	w.s.count.errors.Inc()
	w.raw("-")
	for i := range len(text) { // what came from a client must not end the line
		if text[i] < ' ' || text[i] == 0x7f {
			b := []byte(text)
			for j, c := range b {
				if c < ' ' || c == 0x7f {
					b[j] = '?'
				}
			}
			text = string(b)
			break
		}
	}
	w.raw(text)
	w.raw("\r\n")
}

func (w *writer) null() {
	if w.proto == 3 {
		w.raw("_\r\n")
		return
	}
	w.raw("$-1\r\n")
}

func (w *writer) bulk(text string) {
	w.number('$', int64(len(text)))
	w.raw(text)
	w.raw("\r\n")
}

// next returns the place for a view of what value or part then writes, with
// nothing else in between, after it made room for it.
func (w *writer) next() *cache.View {
	if w.held == maxViews || w.pending >= w.s.maxPending {
		_ = w.flush()
	}
	w.room(2 * shortText)
	return &w.views[w.held]
}

// value writes b, which ends the view of next, and takes the view over. A value
// of several parts is sent at once, each part as soon as its checksum is
// taken, while it is in the processor's cache; the last only if the checksum
// of all is right. If not, the connection ends without it, so that nobody ever
// has the whole of a value that is wrong.
func (w *writer) value(b []byte) {
	v := &w.views[w.held]
	all := v.Bytes()
	if len(all) <= cache.PartSize {
		w.part(b)
		return
	}
	w.number('$', int64(len(b)))
	w.cut()
	w.held++
	w.pending += len(b)
	w.sums.Reset()
	w.sock.Enter()
	defer w.sock.Leave()
	at := len(all) - len(b)
	for i := 0; w.err == nil; i++ {
		end := min((i+1)*cache.PartSize, len(all))
		w.sums.Set(i, all[i*cache.PartSize:end])
		w.put(all[at:end])
		at = end
		if at == len(all) {
			break
		}
		w.send()
	}
	if w.err == nil && guard.getSum() && !v.Check(w.sums.Sum()) {
		w.s.count.miss(kvwire.ReasonCorrupt)
		w.err = errCorrupt
	}
	w.text = append(w.text, '\r', '\n')
	_ = w.flush() // the error stays
}

var errCorrupt = errors.New("cannot send the end of a value: its checksum is wrong")

// part writes b, which lies in the view of next and was checked, and takes the
// view over.
func (w *writer) part(b []byte) {
	v := &w.views[w.held]
	w.number('$', int64(len(b)))
	if len(b) <= copyBelow {
		w.raw(unsafe.String(unsafe.SliceData(b), len(b)))
		w.raw("\r\n")
		w.s.count.sent.Add(len(b))
		v.Close()
		return
	}
	w.cut()
	w.put(b)
	w.pending += len(b)
	w.held++
	w.text = append(w.text, '\r', '\n')
}

// send writes what is in the vector, and keeps text and views.
func (w *writer) send() {
	if w.err == nil && len(w.vector) > 0 {
		if w.err = w.sock.Writev(w.vector, w.s.cfg.writeTimeout); w.err != nil && listener.IsTimeout(w.err) {
			w.s.count.slow.Inc()
		}
	}
	clear(w.vector)
	w.vector = w.vector[:0]
}
