// Package auth knows who may do what: API keys, their scopes, and the identity
// that a credential stands for.
//
// It owns the keyfile's format, generating keys, the permission check of secret
// files and the order of scopes. It does not own where credentials arrive
// (packages httpapi and engineport), nor what peers prove to each other
// (package kvwire).
//
// A [Keys] does not change after it was read and may be used by any number of
// goroutines.
package auth
