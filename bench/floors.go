package bench

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Floors are the least that rows of a report must reach, by the row's name: a
// bound like a target's, looser, so that a noisy machine passes and a lost path
// does not.
type Floors map[string]string

// ReadFloors reads one floor a line: the bound, a tab or spaces and a bar, and
// the row's name. Lines that begin with # are comments.
func ReadFloors(r io.Reader) (Floors, error) {
	floors := Floors{}
	scan := bufio.NewScanner(r)
	for n := 1; scan.Scan(); n++ {
		line := strings.TrimSpace(scan.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		bound, name, ok := strings.Cut(line, "|")
		bound, name = strings.TrimSpace(bound), strings.TrimSpace(name)
		if _, err := (Row{Name: name}).judge(0, bound); !ok || name == "" || bound == "" || err != nil {
			return nil, fmt.Errorf("cannot read floors: line %d, %q, is not a bound, a bar and a row's name", n, line)
		}
		if _, twice := floors[name]; twice {
			return nil, fmt.Errorf("cannot read floors: line %d is the second of %q", n, name)
		}
		floors[name] = bound
	}
	return floors, scan.Err()
}

// Check reports every row that is below its floor or has none, and every floor
// whose row is not there or was not run.
func (f Floors) Check(r Report) error {
	var errs []error
	seen := map[string]bool{}
	for _, row := range r.Rows {
		seen[row.Name] = true
		floor, ok := f[row.Name]
		if row.OK == nil && row.Why != "" {
			if ok {
				errs = append(errs, fmt.Errorf("%q was not run: %s", row.Name, row.Why))
			}
			continue
		}
		if !ok {
			errs = append(errs, fmt.Errorf("%q has no floor", row.Name))
			continue
		}
		value := row.Value
		if row.Ratio != nil {
			value = *row.Ratio
		}
		if judged, err := row.judge(value, floor); err != nil || !*judged.OK {
			errs = append(errs, fmt.Errorf("%q is at %.2f, its floor is %s", row.Name, value, floor))
		}
	}
	for name := range f {
		if !seen[name] {
			errs = append(errs, fmt.Errorf("the floor of %q has no row", name))
		}
	}
	return errors.Join(errs...)
}
