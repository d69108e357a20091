// Package capacity measures how what the cache serves grows with what it is
// given: lookups in this process on one and on two processors, and reads from
// clusters of three and five sidecars that have a fifth of a core each.
//
// It owns these two measurements. Throughput per path is package bench's.
package capacity
