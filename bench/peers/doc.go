// Package peers measures membrane beside the systems that people use today,
// all of them on this machine and in one run.
//
// It owns the systems (how each is started, stopped and held still while
// another is measured), the clients that speak their protocols, the one loop
// that drives them all, the grid of cells, the targets and the tables and plots
// that a run prints. Whatever the system, the keys are drawn alike, the
// payloads are the same and every payload is checked against the same sum; only
// what is on the wire differs. Systems that have no other client than a Python
// one are driven by helper.py, which does the same.
//
// It does not install anything: tools/bench-peers-setup.sh fills the folder in
// which it looks, and what is not there is a row that says so.
package peers
