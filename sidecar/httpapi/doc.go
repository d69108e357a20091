// Package httpapi is the sidecar's HTTP listener: the fragment API, probes,
// metrics and status.
//
// It owns routes, the JSON of requests and answers, credentials and scopes,
// request ids and the limits of the listener. It does not own what the answers
// say (packages fragments, engineport, mesh), nor whether the sidecar is ready
// (package sidecar).
//
// An error is a JSON object with a code, the field at fault where there is one,
// and a sentence: {"error": …, "field": …, "detail": …}.
//
// [Server.Handler] may run any number of times at once; nothing that fasthttp
// lends a handler outlives it.
package httpapi
