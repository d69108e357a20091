package hangup

import (
	"context"
	"crypto/tls"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// wrapped is what fasthttp puts around a connection.
type wrapped struct{ net.Conn }

func pair(t *testing.T) (client, server net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	client, err = net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	server, err = l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close(); _ = server.Close() })
	return client, &wrapped{server}
}

func noticed(ctx context.Context, t *testing.T) {
	t.Helper()
	select {
	case <-ctx.Done():
	case <-time.After(5 * time.Second):
		t.Fatal("the client is gone")
	}
}

func TestClosedConnectionIsNoticed(t *testing.T) {
	t.Parallel()
	client, server := pair(t)
	ctx, stop := Watch(context.Background(), server)
	defer stop()
	// Bytes of a next request are not an end.
	_, err := client.Write([]byte("GET"))
	require.NoError(t, err)
	select {
	case <-ctx.Done():
		t.Fatal("the client is there")
	case <-time.After(3 * Every):
	}
	b := make([]byte, 3)
	_, err = server.Read(b)
	require.NoError(t, err)
	assert.Equal(t, "GET", string(b), "looking takes nothing away")
	require.NoError(t, client.Close())
	noticed(ctx, t)
}

func TestClosedConnectionIsNoticedBehindBytesOfANextRequest(t *testing.T) {
	t.Parallel()
	client, server := pair(t)
	ctx, stop := Watch(context.Background(), server)
	defer stop()
	_, err := client.Write([]byte("GET"))
	require.NoError(t, err)
	require.NoError(t, client.Close())
	noticed(ctx, t)
}

func TestStopEndsTheContextAndMayBeCalledTwice(t *testing.T) {
	t.Parallel()
	_, server := pair(t)
	ctx, stop := Watch(context.Background(), server)
	stop()
	stop()
	require.Error(t, ctx.Err())
}

func TestConnectionWithoutDescriptorIsNotWatched(t *testing.T) {
	t.Parallel()
	client, server := net.Pipe()
	defer func() { _ = client.Close(); _ = server.Close() }()
	ctx, stop := Watch(context.Background(), server)
	require.NoError(t, ctx.Err())
	stop()
	require.Error(t, ctx.Err())
}

func TestQuietIsNeitherClosedNorUnread(t *testing.T) {
	t.Parallel()
	for name, stir := range map[string]func(c net.Conn) error{
		"bytes": func(c net.Conn) error { _, err := c.Write([]byte("x")); return err },
		"end":   func(c net.Conn) error { return c.Close() },
	} {
		client, server := pair(t)
		assert.True(t, Quiet(server), name)
		assert.True(t, Quiet(tls.Client(server, &tls.Config{MinVersion: tls.VersionTLS12})), name)
		require.NoError(t, stir(client))
		require.Eventually(t, func() bool { return !Quiet(server) }, time.Second, time.Millisecond, name)
	}
	a, b := net.Pipe()
	assert.False(t, Quiet(a), "nobody can tell")
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}
