// Package sidecar is the process: it puts cache, mesh and listeners together
// and says when they start and stop.
//
// It owns the settings and what is refused at the start, the order of starting
// and stopping, draining, and the names of metrics that belong to no listener.
// It does not own what happens on a listener (packages engineport, httpapi,
// resp), to bytes (cache) or between nodes (mesh).
//
// A [Sidecar] is made by [New], which opens everything and serves nothing, and
// run once by [Sidecar.Run].
package sidecar
