package resp

import (
	"context"
	"os/exec"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestGoRedis(t *testing.T) {
	t.Parallel()
	keys, with := withKeys(t, "writer:write")
	n := start(t, 64<<20, with)
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	for _, proto := range []int{2, 3} {
		c := redis.NewClient(&redis.Options{Addr: n.addr, Protocol: proto, Username: "default", Password: keys["writer"]})
		require.NoError(t, c.Ping(ctx).Err())
		value := content(1, 3<<20)
		require.NoError(t, c.Set(ctx, "a", value, 0).Err())
		got, err := c.Get(ctx, "a").Result()
		require.NoError(t, err)
		require.True(t, value == got)
		_, err = c.Get(ctx, "none").Result()
		require.ErrorIs(t, err, redis.Nil)
		require.NoError(t, c.Set(ctx, "b", "x", time.Hour).Err())
		left, err := c.TTL(ctx, "b").Result()
		require.NoError(t, err)
		assert.Equal(t, time.Hour, left)
		ok, err := c.SetNX(ctx, "b", "y", 0).Result()
		require.NoError(t, err)
		assert.False(t, ok)
		list, err := c.MGet(ctx, "b", "none").Result()
		require.NoError(t, err)
		assert.Equal(t, []any{"x", nil}, list)
		pipe := c.Pipeline()
		for range 1000 {
			pipe.Get(ctx, "b")
		}
		all, err := pipe.Exec(ctx)
		require.NoError(t, err)
		assert.Len(t, all, 1000)
		found, _, err := c.Scan(ctx, 0, "*", 10).Result()
		require.NoError(t, err)
		assert.ElementsMatch(t, []string{"a", "b"}, found)
		size, err := c.DBSize(ctx).Result()
		require.NoError(t, err)
		assert.EqualValues(t, 2, size)
		n, err := c.Del(ctx, "a", "b").Result()
		require.NoError(t, err)
		assert.EqualValues(t, 2, n)
		require.ErrorContains(t, c.FlushDB(ctx).Err(), "NOPERM")
		require.NoError(t, c.Close())
	}
}

func TestRueidis(t *testing.T) {
	t.Parallel()
	n := start(t, 64<<20)
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	for _, two := range []bool{false, true} {
		// There is no tracking of keys for a cache of the client's.
		c, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{n.addr}, DisableCache: true, AlwaysRESP2: two, ForceSingleClient: true})
		require.NoError(t, err)
		value := content(1, 3<<20)
		require.NoError(t, c.Do(ctx, c.B().Set().Key("a").Value(value).Build()).Error())
		got, err := c.Do(ctx, c.B().Get().Key("a").Build()).ToString()
		require.NoError(t, err)
		require.True(t, value == got)
		require.True(t, rueidis.IsRedisNil(c.Do(ctx, c.B().Get().Key("none").Build()).Error()))
		var cmds rueidis.Commands
		for range 1000 {
			cmds = append(cmds, c.B().Exists().Key("a").Build())
		}
		for _, r := range c.DoMulti(ctx, cmds...) {
			have, err := r.AsInt64()
			require.NoError(t, err)
			assert.EqualValues(t, 1, have)
		}
		c.Close()
	}
}

// Redis' own tools, where they are installed.
func TestRedisTools(t *testing.T) {
	t.Parallel()
	n := start(t, 64<<20)
	port := n.addr[len("127.0.0.1:"):]
	f := func(tool string, args ...string) string {
		t.Helper()
		path, err := exec.LookPath(tool)
		if err != nil {
			t.Skipf("%s is not installed", tool)
		}
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		out, err := exec.CommandContext(ctx, path, append([]string{"-p", port}, args...)...).CombinedOutput()
		require.NoError(t, err, "%s", out)
		return string(out)
	}
	assert.Equal(t, "OK\n", f("redis-cli", "SET", "a", "b"))
	assert.Equal(t, "b\n", f("redis-cli", "-3", "GET", "a"))
	assert.Equal(t, "a\n", f("redis-cli", "--scan"))
	assert.Contains(t, f("redis-cli", "INFO", "server"), "redis_version")
	out := f("redis-benchmark", "-t", "ping,set,get,mset", "-n", "2000", "-c", "20", "-P", "8", "-q", "--csv")
	assert.Contains(t, out, `"GET"`)
	assert.NotContains(t, out, "Error")
}
