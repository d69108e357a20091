package kvwire

import "encoding/binary"

// MaxAwait is the most pages that one await names.
const MaxAwait = 1024

// An await is a [BatchRead] by its layout, with at most MaxAwait hashes: it
// asks a peer to answer when it holds the first of the pages, or at the
// deadline. So the asker hears of a page as soon as it is there.

// ParseAwait decodes the message; hashes are appended to dst.
func ParseAwait(body []byte, dst []Hash) (BatchRead, error) {
	r, err := ParseBatchRead(body, dst)
	switch {
	case err != nil:
		return r, err
	case len(r.Hashes) < 1 || len(r.Hashes) > MaxAwait:
		return r, Errorf(CodeTooLarge, "hashes", "%d pages are not 1 to %d", len(r.Hashes), MaxAwait)
	}
	return r, nil
}

// AwaitAnswer says how many of the pages, from the first on, the peer holds.
//
//	offset  size  field
//	0       4     pages; 0 when the deadline came first
//	4       8     version of the answerer's directory
type AwaitAnswer struct {
	Pages   uint32
	Version uint64
}

// AppendAwaitAnswer appends the message in wire form.
func AppendAwaitAnswer(b []byte, a AwaitAnswer) []byte {
	b = binary.LittleEndian.AppendUint32(b, a.Pages)
	return binary.LittleEndian.AppendUint64(b, a.Version)
}

// ParseAwaitAnswer decodes the message.
func ParseAwaitAnswer(body []byte) (AwaitAnswer, error) {
	d := decoder{b: body}
	a := AwaitAnswer{Pages: d.u32(), Version: d.u64()}
	if a.Pages > MaxAwait {
		return a, Errorf(CodeTooLarge, "pages", "%d are more than %d", a.Pages, MaxAwait)
	}
	return a, d.end("await_answer")
}

// Queues is the answer to a request for the lengths of a node's queues, whose
// body is empty.
//
//	offset  size  field
//	0       4     prompts that wait for prefill
//	4       4     requests that wait for decode
type Queues struct{ Prefill, Decode uint32 }

// AppendQueues appends the message in wire form.
func AppendQueues(b []byte, q Queues) []byte {
	b = binary.LittleEndian.AppendUint32(b, q.Prefill)
	return binary.LittleEndian.AppendUint32(b, q.Decode)
}

// ParseQueues decodes the message.
func ParseQueues(body []byte) (Queues, error) {
	d := decoder{b: body}
	q := Queues{Prefill: d.u32(), Decode: d.u32()}
	return q, d.end("queues")
}
