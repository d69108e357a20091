package resp

import (
	"fmt"
	"strings"
	"time"

	"membrane/sidecar/auth"
)

// redisVersion is the version whose answers clients can expect.
const redisVersion = "7.0.15"

const wrongPass = "WRONGPASS invalid API key"

// login tries a credential and says what is wrong with it.
func (c *conn) login(key []byte) (bad string) {
	if c.s.cfg.Keys == nil {
		return "ERR AUTH <password> called without any password configured: this listener is open"
	}
	id, ok := c.s.cfg.Keys.Lookup(string(key))
	if !ok {
		c.s.count.wrongKeys.Inc()
		if c.wrong++; c.wrong >= maxWrongKeys {
			c.quit = true
		}
		return wrongPass
	}
	stranger := !c.known
	if err := c.become(id); err != nil {
		return "ERR " + err.Error()
	}
	if stranger {
		c.s.clients.Met(c)
		c.pace.Free()
	}
	return ""
}

// authenticate takes an API key. A user's name before it says nothing: who it
// is, the key says.
func authenticate(c *conn) {
	if bad := c.login(c.q.arg(c.q.len() - 1)); bad != "" {
		c.out.fail(bad)
		return
	}
	c.out.ok()
}

func hello(c *conn) {
	proto := c.out.proto
	if c.q.len() > 1 {
		n, ok := parseInt(c.q.arg(1))
		if !ok || n < 2 || n > 3 {
			c.out.fail("NOPROTO unsupported protocol version")
			return
		}
		proto = int(n)
	}
	name := c.name
	for i := 2; i < c.q.len(); i++ {
		switch {
		case c.q.is(i, "AUTH") && i+2 < c.q.len():
			if bad := c.login(c.q.arg(i + 2)); bad != "" {
				c.out.fail(bad)
				return
			}
			i += 2
		case c.q.is(i, "SETNAME") && i+1 < c.q.len():
			var ok bool
			if name, ok = clientName(c.q.arg(i + 1)); !ok {
				c.out.fail(errName)
				return
			}
			i++
		default:
			c.out.fail("ERR syntax error in HELLO")
			return
		}
	}
	if !c.known {
		c.out.fail("NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the same time")
		return
	}
	c.out.proto, c.name = proto, name
	c.out.table(7)
	c.out.bulk("server")
	c.out.bulk("redis")
	c.out.bulk("version")
	c.out.bulk(redisVersion)
	c.out.bulk("proto")
	c.out.integer(int64(proto))
	c.out.bulk("id")
	c.out.integer(c.id)
	c.out.bulk("mode")
	c.out.bulk("standalone")
	c.out.bulk("role")
	c.out.bulk("master")
	c.out.bulk("modules")
	c.out.array(0)
}

func quit(c *conn) {
	c.quit = true
	c.out.ok()
}

// reset makes the connection what it was at its beginning.
func reset(c *conn) {
	c.out.proto, c.name = 2, ""
	if c.s.cfg.Keys != nil {
		c.known, c.identity, c.space = false, auth.Identity{}, nil
		if c.pace.Bind(c.s.cfg.greetTimeout) != nil {
			c.quit = true
		}
	}
	c.out.simple("RESET")
}

func ping(c *conn) {
	if c.q.len() == 2 {
		c.out.bulk(string(c.q.arg(1)))
		return
	}
	c.out.simple("PONG")
}

func echo(c *conn) { c.out.bulk(string(c.q.arg(1))) }

func selectDB(c *conn) {
	if n, ok := parseInt(c.q.arg(1)); !ok || n != 0 {
		c.out.fail("ERR DB index is out of range: there is only 0")
		return
	}
	c.out.ok()
}

const (
	maxName = 128
	errName = "ERR Client names cannot contain spaces, newlines or special characters, nor more than 128 bytes"
)

func clientName(b []byte) (string, bool) {
	for _, c := range b {
		if c < '!' || c > '~' {
			return "", false
		}
	}
	return string(b), len(b) <= maxName
}

func client(c *conn) {
	switch {
	case c.q.is(1, "ID") && c.q.len() == 2:
		c.out.integer(c.id)
	case c.q.is(1, "GETNAME") && c.q.len() == 2:
		if c.name == "" {
			c.out.null()
			return
		}
		c.out.bulk(c.name)
	case c.q.is(1, "SETNAME") && c.q.len() == 3:
		name, ok := clientName(c.q.arg(2))
		if !ok {
			c.out.fail(errName)
			return
		}
		c.name = name
		c.out.ok()
	case c.q.is(1, "SETINFO") && c.q.len() == 4:
		c.out.ok()
	default:
		c.out.fail(fmt.Sprintf("ERR unknown subcommand or wrong number of arguments for 'client|%.32s'", c.q.arg(1)))
	}
}

// commandList answers COMMAND, which tools ask to describe commands that this
// listener need not have.
func commandList(c *conn) {
	switch {
	case c.q.len() == 2 && c.q.is(1, "COUNT"):
		c.out.integer(int64(len(commands)))
	case c.q.len() > 1 && c.q.is(1, "DOCS"):
		c.out.table(0)
	default:
		c.out.array(0)
	}
}

func info(c *conn) {
	var b strings.Builder
	st := c.s.cfg.Cache.Stats()
	fmt.Fprintf(&b, "# Server\r\nredis_version:%s\r\nredis_mode:standalone\r\nmembrane_version:%s\r\nuptime_in_seconds:%d\r\n\r\n",
		redisVersion, c.s.cfg.Version, int(time.Since(c.s.started).Seconds()))
	fmt.Fprintf(&b, "# Clients\r\nconnected_clients:%d\r\nmaxclients:%d\r\n\r\n", c.s.Connections(), MaxConnections)
	fmt.Fprintf(&b, "# Memory\r\nused_memory:%d\r\nmaxmemory:%d\r\nmaxmemory_policy:%s\r\n\r\n", st.ResidentBytes, c.s.cfg.Cache.Arena().Size(), evictionPolicy)
	fmt.Fprintf(&b, "# Replication\r\nrole:master\r\nconnected_slaves:0\r\n\r\n# Cluster\r\ncluster_enabled:0\r\n")
	if c.space != nil && c.identity.Scopes.Allows(auth.ScopeRead) {
		fmt.Fprintf(&b, "\r\n# Keyspace\r\ndb0:keys=%d,expires=0,avg_ttl=0\r\n", c.space.Len())
	}
	c.out.bulk(b.String())
}

// evictionPolicy is the nearest of Redis' names.
const evictionPolicy = "allkeys-lfu"

func config(c *conn) {
	if !c.q.is(1, "GET") || c.q.len() < 3 {
		c.out.fail("ERR only CONFIG GET is supported: the sidecar is configured by its flags")
		return
	}
	all := [][2]string{
		{"appendonly", "no"},
		{"databases", "1"},
		{"maxclients", fmt.Sprint(MaxConnections)},
		{"maxmemory", fmt.Sprint(c.s.cfg.Cache.Arena().Size())},
		{"maxmemory-policy", evictionPolicy},
		{"proto-max-bulk-len", fmt.Sprint(c.s.maxValue)},
		{"save", ""},
		{"timeout", "0"},
	}
	var found [][2]string
	for _, p := range all {
		for i := 2; i < c.q.len(); i++ {
			if match([]byte(strings.ToLower(string(c.q.arg(i)))), []byte(p[0])) {
				found = append(found, p)
				break
			}
		}
	}
	c.out.table(len(found))
	for _, p := range found {
		c.out.bulk(p[0])
		c.out.bulk(p[1])
	}
}

func dbSize(c *conn) { c.out.integer(int64(c.space.Len())) }

func flushDB(c *conn) {
	if c.q.len() == 2 && !c.q.is(1, "SYNC") && !c.q.is(1, "ASYNC") {
		c.out.fail("ERR syntax error")
		return
	}
	c.space.Reset()
	c.out.ok()
}
