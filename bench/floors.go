package bench

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"slices"
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

// figure is the ratio, or the value of a row that has none.
func (r Row) figure() float64 {
	if r.Ratio != nil {
		return *r.Ratio
	}
	return r.Value
}

func (r Row) meets(floor string) bool {
	judged, err := r.judge(r.figure(), floor)
	return err == nil && *judged.OK && (r.OK != nil || r.Why == "")
}

// Check reports every row of the last report that is below its floor or has none,
// and every floor whose row is not there or was not run. A row that met its floor
// in an earlier report of the same thing has met it: what else a machine does makes
// figures worse and hardly ever better, so that a lost path is below its floor each
// time and a floor need not leave room for the worst moment.
func (f Floors) Check(reports ...Report) error {
	var errs []error
	seen := map[string]bool{}
	for _, row := range reports[len(reports)-1].Rows {
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
		met := slices.ContainsFunc(reports, func(r Report) bool {
			return slices.ContainsFunc(r.Rows, func(other Row) bool { return other.Name == row.Name && other.meets(floor) })
		})
		if !met {
			errs = append(errs, fmt.Errorf("%q is at %.2f, its floor is %s", row.Name, row.figure(), floor))
		}
	}
	for name := range f {
		if !seen[name] {
			errs = append(errs, fmt.Errorf("the floor of %q has no row", name))
		}
	}
	return errors.Join(errs...)
}
