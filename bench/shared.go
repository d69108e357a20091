package bench

// ThisMachine describes this machine for a report; version is what is said of
// the measured binary.
func ThisMachine(version string) Machine { return thisMachine(version) }

// Memcpy measures memcpy over n bytes in pieces, as the core benchmark does,
// and returns GB/s.
func Memcpy(n, piece int) (float64, error) {
	c, err := newCopier(n)
	if err != nil {
		return 0, err
	}
	return c.run(n, piece), c.close()
}

// Judge completes a row with a target, ">= 0.9" or "<= 2", that value meets or
// misses. "" is no target.
func (r Row) Judge(value float64, target string) (Row, error) { return r.judge(value, target) }
