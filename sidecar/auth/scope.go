package auth

import (
	"fmt"
	"strings"
)

// Scope is a set of rights. Read, write and admin are a ladder: each implies
// those below it. Engine stands beside it: an engine may match, load and store
// pages over the engine port and nothing else.
type Scope uint8

// The scopes.
const (
	ScopeRead   Scope = 1 << 0
	ScopeWrite  Scope = 1 << 1
	ScopeAdmin  Scope = 1 << 2
	ScopeEngine Scope = 1 << 3
)

var scopeNames = []struct {
	scope Scope
	name  string
}{{ScopeRead, "read"}, {ScopeWrite, "write"}, {ScopeAdmin, "admin"}, {ScopeEngine, "engine"}}

// String returns the names of the scopes in the set, joined by commas.
func (s Scope) String() string {
	var names []string
	for _, n := range scopeNames {
		if s&n.scope != 0 {
			names = append(names, n.name)
		}
	}
	return strings.Join(names, ",")
}

// Allows reports whether a holder of s may do what needs the given scope.
func (s Scope) Allows(need Scope) bool {
	if s&ScopeAdmin != 0 {
		s |= ScopeWrite
	}
	if s&ScopeWrite != 0 {
		s |= ScopeRead
	}
	return s&need == need
}

// ParseScope returns the scope with the given name.
func ParseScope(name string) (Scope, error) {
	for _, n := range scopeNames {
		if n.name == name {
			return n.scope, nil
		}
	}
	return 0, fmt.Errorf("scope %q is not one of read, write, admin, engine", name)
}

// ParseScopes returns the union of a comma-separated list of names.
func ParseScopes(list string) (Scope, error) {
	var all Scope
	for name := range strings.SplitSeq(list, ",") {
		s, err := ParseScope(strings.TrimSpace(name))
		if err != nil {
			return 0, err
		}
		all |= s
	}
	return all, nil
}
