package proxy

import "sync"

// buffers are the memory for one request's body as it came and as it goes on.
// Long ones are left to the garbage collector.
type buffers struct{ read, write *[]byte }

var bufferPool = sync.Pool{New: func() any { return &buffers{new([]byte), new([]byte)} }}

func takeBuffers() *buffers {
	b, ok := bufferPool.Get().(*buffers)
	if !ok {
		return &buffers{new([]byte), new([]byte)}
	}
	return b
}

// keep remembers the memory of b for another request, and returns b.
func (*buffers) keep(in *[]byte, b []byte) []byte {
	if cap(b) <= smallBody+1 {
		*in = b[:0]
	}
	return b
}

func (b *buffers) give() { bufferPool.Put(b) }
