package kvwire

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

type borrowed int

func (b *borrowed) Close() { *b++ }

func TestPageWriterSendsFramesInOrderAndLetsGo(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	var p PageWriter
	var closed borrowed
	shard := Shard{Count: 1}
	p.Begin(&out, 7)
	p.Page(PageHeader{Index: 0, Shard: shard}, []byte("first"), &closed)
	p.Page(PageHeader{Index: 1, Shard: shard, Reason: ReasonAbsent}, nil, nil)
	p.Page(PageHeader{Index: 2, Shard: shard, Reason: ReasonDeadline}, nil, nil)
	p.Page(PageHeader{Index: 3, Shard: shard}, []byte("fourth"), &closed)
	assert.Equal(t, 11, p.Queued())
	assert.Zero(t, closed)
	require.NoError(t, p.Flush())
	assert.EqualValues(t, 2, closed)
	assert.Zero(t, p.Queued())
	for i, want := range []string{"first", "", "", "fourth"} {
		h, err := ReadHeader(&out)
		require.NoError(t, err)
		body, err := ReadBody(&out, h, nil)
		require.NoError(t, err)
		page, err := ParsePageHeader(body[:PageHeaderSize], h)
		require.NoError(t, err)
		assert.EqualValues(t, i, page.Index)
		assert.Equal(t, want, string(body[PageHeaderSize:]))
	}
	require.NoError(t, p.Flush())
	assert.Zero(t, out.Len())
}

func TestPageWriterIsFullAtItsLimits(t *testing.T) {
	t.Parallel()
	var p PageWriter
	p.Begin(nil, 1)
	for range maxQueuedPages {
		assert.False(t, p.Full())
		p.Page(PageHeader{Shard: Shard{Count: 1}}, []byte{1}, nil)
	}
	assert.True(t, p.Full())
	p.Drop()
	assert.False(t, p.Full())
	p.Page(PageHeader{Shard: Shard{Count: 1}}, make([]byte, maxQueuedBytes-1), nil)
	assert.False(t, p.Full())
	p.Page(PageHeader{Shard: Shard{Count: 1}}, []byte{1}, nil)
	assert.True(t, p.Full())
}

type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, errors.New("broken") }

func TestPageWriterLetsGoWhenTheOtherSideIsGone(t *testing.T) {
	t.Parallel()
	var p PageWriter
	var closed borrowed
	p.Begin(broken{}, 1)
	p.Page(PageHeader{Shard: Shard{Count: 1}}, []byte("bytes"), &closed)
	require.Error(t, p.Flush())
	assert.EqualValues(t, 1, closed)
	p.Page(PageHeader{Shard: Shard{Count: 1}}, []byte("bytes"), &closed)
	p.Drop()
	assert.EqualValues(t, 2, closed)
}
