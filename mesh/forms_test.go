package mesh

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"membrane/kvwire"
)

func formOf(layout string) kvwire.Descriptor {
	return kvwire.Descriptor{Layout: layout, DType: "float16", BlockTokens: 16, BlockBytes: 64, TPSize: 1, PPSize: 1, Layers: [2]int{0, 1}, Heads: [2]int{0, 1}}
}

func TestFormsOfPeersAreAskedForNowAndThen(t *testing.T) {
	t.Parallel()
	var have atomic.Pointer[[]kvwire.Descriptor]
	have.Store(&[]kvwire.Descriptor{formOf("a")})
	var asked atomic.Int32
	holder, reader := pair(t, func(c *Config) {
		c.Forms = func(ns kvwire.Namespace) []kvwire.Descriptor {
			asked.Add(1)
			if ns != testNS {
				return nil
			}
			return *have.Load()
		}
	})
	ctx := within(t, 10*time.Second)
	var got []kvwire.Descriptor
	// A loaded machine may need longer than Forms waits.
	eventually(t, func() bool { got = reader.Forms(ctx, testNS); return len(got) > 0 }, "the form is heard of")
	assert.Equal(t, []kvwire.Descriptor{formOf("a")}, got)
	assert.Empty(t, reader.Forms(ctx, kvwire.Namespace{9}))
	eventually(t, func() bool { return reader.Stats().FormsAsked == 2 }, "both namespaces are asked about")
	for range 100 { // nothing has changed there: no message, and nothing is new
		assert.Empty(t, reader.Forms(ctx, testNS))
	}
	assert.EqualValues(t, 2, asked.Load())

	have.Store(&[]kvwire.Descriptor{formOf("a"), formOf("b")})
	put(t, holder, testHashes("x", 1), 1, 100)
	eventually(t, func() bool { got = reader.Forms(ctx, testNS); return len(got) > 0 }, "the new form is heard of")
	assert.Equal(t, []kvwire.Descriptor{formOf("a"), formOf("b")}, got)
	assert.EqualValues(t, 3, reader.Stats().FormsAsked)
}

// A peer that does not answer holds a caller up once and no longer than a tenth
// of a second; closing the mesh does not wait for it.
func TestFormsDoNotWaitForAStoppedPeer(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = silent.Close() })
	holder, reader := pair(t, nil)
	reader.detour(t, holder.Name(), silent.Addr().String())
	began := time.Now()
	assert.Empty(t, reader.Forms(context.Background(), testNS))
	assert.Less(t, time.Since(began), formsPatience)
	began = time.Now()
	for range 10 {
		assert.Empty(t, reader.Forms(context.Background(), testNS))
	}
	assert.Less(t, time.Since(began), formsWait, "it is being asked already")
	began = time.Now()
	reader.stop()
	assert.Less(t, time.Since(began), formsPatience)
}

// A forms frame of a wrong length ends the connection with an error, as any
// request that is none.
func TestBadFormsRequestIsRefused(t *testing.T) {
	t.Parallel()
	holder, reader := pair(t, nil)
	c, err := reader.peerOf(t, holder.Name()).take(within(t, 5*time.Second), true)
	require.NoError(t, err)
	defer c.close()
	_, err = c.call(kvwire.TypeForms, make([]byte, kvwire.NamespaceSize+1))
	assert.Equal(t, kvwire.CodeBadFrame, kvwire.CodeOf(err))
	c2, err := reader.peerOf(t, holder.Name()).take(within(t, 5*time.Second), true)
	require.NoError(t, err)
	defer c2.close()
	body, err := c2.call(kvwire.TypeForms, kvwire.AppendFormsRequest(nil, testNS))
	require.NoError(t, err)
	ds, err := kvwire.ParseForms(body)
	require.NoError(t, err)
	assert.Empty(t, ds, "a node without engines knows none")
}
