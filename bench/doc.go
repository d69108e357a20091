// Package bench measures membrane and shows it at work.
//
// It owns the demo workload, the load generators, the ceilings that they are
// compared with (memcpy, a bare TCP copy, a bare hash chain, a connector for vLLM
// without a sidecar) and the report in which every figure is a ratio to something
// measured in the same run. It starts the real binary, and real vLLM, as
// processes of their own and speaks to them as any client would; it does not
// reach into a sidecar.
package bench
