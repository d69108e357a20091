//go:build race

package mesh

import "time"

// slack is how much later than its deadline a call may return.
const slack = 250 * time.Millisecond

const raceOn = true
