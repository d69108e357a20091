// Package replay plays traces of requests, each a prompt as a list of block
// hashes, against caches of equal memory and counts what they save: the cache
// of this project (the real package cache over a real arena), plain LRU, the
// ristretto library alone, and the offline optimum; or against sidecars that
// run as processes.
//
// It owns the readers of published traces, generators of made ones, the
// policies that membrane is measured beside, and the report. It does not own
// the cache or its policy (package cache), nor the load of real engines.
//
// # What a hit is
//
// A prompt is cut into blocks of a fixed number of tokens; a block's hash names
// the whole prompt up to its end. Only full blocks are kept, as engines do, so
// the tokens after the last full block are always computed. A request hits the
// longest run of leading blocks that are held; all its other blocks are
// computed and stored. What a request generates is stored only when a later
// prompt has it, as traces name no blocks of outputs.
package replay
