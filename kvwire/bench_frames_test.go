package kvwire

import (
	"bytes"
	"fmt"
	"testing"
)

// BenchmarkSum is the checksum that every object pays for: on ingest, when it
// is leased and where it arrives.
func BenchmarkSum(b *testing.B) {
	for _, size := range []int{4 << 10, 64 << 10, 2 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			object := make([]byte, size)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				Sum(object)
			}
		})
	}
}

// BenchmarkSign is what else an ingest pays for.
func BenchmarkSign(b *testing.B) {
	a := NewAuthenticator([]byte("key"))
	key := ObjectKey{PageKey: PageKey{Tenant: "public"}, Shard: Shard{Count: 1}}
	b.ReportAllocs()
	for b.Loop() {
		a.Sign(key, 1, 2)
	}
}

// BenchmarkPageFrame writes and reads the head of a page frame.
func BenchmarkPageFrame(b *testing.B) {
	p := PageHeader{Index: 7, Shard: Shard{Count: 1}, Length: 2 << 20, Sum: 9}
	out := make([]byte, 0, HeaderSize+PageHeaderSize)
	b.Run("append", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			head := AppendHeader(out, Header{Type: TypePage, ID: 1, Length: uint32(PageHeaderSize + p.Length)})
			AppendPageHeader(head, p)
		}
	})
	b.Run("parse", func(b *testing.B) {
		frame := AppendPageHeader(AppendHeader(out, Header{Type: TypePage, ID: 1, Length: uint32(PageHeaderSize + p.Length)}), p)
		b.ReportAllocs()
		for b.Loop() {
			h, err := ParseHeader(frame)
			if err != nil {
				b.Fatal(err)
			}
			if _, err := ParsePageHeader(frame[HeaderSize:], h); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkReadFrame reads control frames from a stream.
func BenchmarkReadFrame(b *testing.B) {
	frame := EndFrame(AppendLeaseRequest(AppendHeader(nil, Header{Type: TypeLease, ID: 1}), LeaseRequest{Handle: 1, Pages: 32}), 0)
	r, buf := bytes.NewReader(nil), make([]byte, 4<<10)
	b.ReportAllocs()
	for b.Loop() {
		r.Reset(frame)
		if _, _, err := ReadFrame(r, buf); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkBatchRead writes and parses a request for 32 pages.
func BenchmarkBatchRead(b *testing.B) {
	req := BatchRead{Tenant: "public", Hashes: make([]Hash, 32)}
	b.Run("append", func(b *testing.B) {
		out := make([]byte, 0, 4<<10)
		b.ReportAllocs()
		for b.Loop() {
			AppendBatchRead(out, req)
		}
	})
	b.Run("parse", func(b *testing.B) {
		body, dst := AppendBatchRead(nil, req), make([]Hash, 0, 32)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := ParseBatchRead(body, dst); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkAppendLeased writes the answer to a match of 100,000 tokens.
func BenchmarkAppendLeased(b *testing.B) {
	l := benchLeased()
	out := make([]byte, 0, len(AppendLeased(nil, l)))
	b.ReportAllocs()
	for b.Loop() {
		AppendLeased(out, l)
	}
}
