package resp

import "membrane/sidecar/auth"

// command is what the listener knows of one command.
type command struct {
	name string
	// least and most are the number of arguments, the name included; most 0
	// means any number.
	least, most int
	need        auth.Scope // 0: none
	open        bool       // before AUTH, too
	// keys says which arguments are keys: none, the first, all, every other.
	keys keyArgs
	// value says which arguments are values; nil means none.
	value func(i int) bool
	run   func(*conn)
}

type keyArgs uint8

const (
	noKey keyArgs = iota
	firstKey
	allKeys
	oddKeys
)

// key reports whether argument i is a key.
func (c *command) key(i int) bool {
	switch c.keys {
	case firstKey:
		return i == 1
	case allKeys:
		return i > 0
	case oddKeys:
		return i%2 == 1
	}
	return false
}

func second(i int) bool { return i == 2 }
func even(i int) bool   { return i%2 == 0 }

var commands map[string]*command

func init() { // a command's code looks others up
	commands = make(map[string]*command)
	for _, c := range []command{
		{name: "auth", least: 2, most: 3, open: true, run: authenticate},
		{name: "hello", least: 1, most: 7, open: true, run: hello},
		{name: "quit", least: 1, open: true, run: quit},
		{name: "reset", least: 1, most: 1, open: true, run: reset},
		{name: "ping", least: 1, most: 2, run: ping},
		{name: "echo", least: 2, most: 2, run: echo},
		{name: "select", least: 2, most: 2, run: selectDB},
		{name: "client", least: 2, run: client},
		{name: "command", least: 1, run: commandList},
		{name: "info", least: 1, run: info},
		{name: "config", least: 2, run: config},
		{name: "dbsize", least: 1, most: 1, need: auth.ScopeRead, run: dbSize},
		{name: "exists", least: 2, need: auth.ScopeRead, keys: allKeys, run: exists},
		{name: "get", least: 2, most: 2, need: auth.ScopeRead, keys: firstKey, run: get},
		{name: "mget", least: 2, need: auth.ScopeRead, keys: allKeys, run: mget},
		{name: "strlen", least: 2, most: 2, need: auth.ScopeRead, keys: firstKey, run: strlen},
		{name: "getrange", least: 4, most: 4, need: auth.ScopeRead, keys: firstKey, run: getRange},
		{name: "type", least: 2, most: 2, need: auth.ScopeRead, keys: firstKey, run: typeOf},
		{name: "ttl", least: 2, most: 2, need: auth.ScopeRead, keys: firstKey, run: ttl},
		{name: "pttl", least: 2, most: 2, need: auth.ScopeRead, keys: firstKey, run: ttl},
		{name: "touch", least: 2, need: auth.ScopeRead, keys: allKeys, run: touch},
		{name: "scan", least: 2, need: auth.ScopeRead, run: scan},
		{name: "keys", least: 2, most: 2, need: auth.ScopeRead, run: keys},
		{name: "memory", least: 2, need: auth.ScopeRead, run: memoryUsage},
		{name: "set", least: 3, need: auth.ScopeWrite, keys: firstKey, value: second, run: set},
		{name: "mset", least: 3, need: auth.ScopeWrite, keys: oddKeys, value: even, run: mset},
		{name: "del", least: 2, need: auth.ScopeWrite, keys: allKeys, run: del},
		{name: "unlink", least: 2, need: auth.ScopeWrite, keys: allKeys, run: del},
		{name: "expire", least: 3, most: 3, need: auth.ScopeWrite, keys: firstKey, run: expire},
		{name: "pexpire", least: 3, most: 3, need: auth.ScopeWrite, keys: firstKey, run: expire},
		{name: "persist", least: 2, most: 2, need: auth.ScopeWrite, keys: firstKey, run: persist},
		{name: "flushdb", least: 1, most: 2, need: auth.ScopeAdmin, run: flushDB},
		{name: "flushall", least: 1, most: 2, need: auth.ScopeAdmin, run: flushDB},
	} {
		commands[c.name] = &c
	}
}
