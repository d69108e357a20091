package sidecar

import (
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"
	"time"
)

// Size is a number of bytes that is written as 512MiB, 1GiB, 2GB or 1073741824.
type Size int64

var units = []struct {
	name  string
	bytes int64
}{
	{"TiB", 1 << 40},
	{"GiB", 1 << 30},
	{"MiB", 1 << 20},
	{"KiB", 1 << 10},
	{"TB", 1e12},
	{"GB", 1e9},
	{"MB", 1e6},
	{"kB", 1e3},
	{"B", 1},
}

// ParseSize reads a whole number of bytes, or a decimal number and a unit: B,
// kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (of 1024).
func ParseSize(s string) (Size, error) {
	number, unit := s, int64(1)
	for _, u := range units {
		if rest, ok := strings.CutSuffix(s, u.name); ok {
			number, unit = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	n, err := strconv.ParseFloat(number, 64)
	if err != nil || strings.ContainsAny(number, "xXpPiInN_+-") {
		return 0, fmt.Errorf("is not a size such as 512MiB, 1GiB or 1073741824")
	}
	if n *= float64(unit); n >= math.MaxInt64 {
		return 0, fmt.Errorf("is too large for a size")
	}
	return Size(n), nil
}

// String returns the size in the largest unit of 1024 that divides it.
func (s Size) String() string {
	for _, u := range units[:4] {
		if s != 0 && int64(s)%u.bytes == 0 {
			return strconv.FormatInt(int64(s)/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// Set reads a size (pflag.Value).
func (s *Size) Set(text string) (err error) {
	*s, err = ParseSize(text)
	return err
}

// Type names the kind of value in help texts (pflag.Value).
func (s *Size) Type() string { return "size" }

// Seconds is a duration that is written as 30s, 1m30s, or 30 (seconds).
type Seconds time.Duration

// String returns the duration as Go writes it.
func (d Seconds) String() string { return time.Duration(d).String() }

// Set reads a duration (pflag.Value).
func (d *Seconds) Set(text string) error {
	if v, err := time.ParseDuration(text); err == nil {
		*d = Seconds(v)
		return nil
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || !(math.Abs(v) < 1e9) {
		return fmt.Errorf("is not a duration such as 30s, 1m30s or 30")
	}
	*d = Seconds(v * float64(time.Second))
	return nil
}

// Type names the kind of value in help texts (pflag.Value).
func (d *Seconds) Type() string { return "duration" }

// Ratio is a part of a whole, 0 to 1, or RatioAuto.
type Ratio float64

// RatioAuto is written as "auto".
const RatioAuto Ratio = -1

// String returns the ratio as it is written.
func (r Ratio) String() string {
	if r == RatioAuto {
		return "auto"
	}
	return strconv.FormatFloat(float64(r), 'g', -1, 64)
}

// Set reads a ratio (pflag.Value).
func (r *Ratio) Set(text string) error {
	if text == "auto" {
		*r = RatioAuto
		return nil
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || v < 0 {
		return fmt.Errorf("is neither a number from 0 to 1 nor auto")
	}
	*r = Ratio(v)
	return nil
}

// Type names the kind of value in help texts (pflag.Value).
func (r *Ratio) Type() string { return "ratio" }

// List is values that are given several times or separated by commas.
type List []string

// String returns the values with commas between them.
func (l List) String() string { return strings.Join(l, ",") }

// Set adds values (pflag.Value).
func (l *List) Set(text string) error {
	for v := range strings.SplitSeq(text, ",") {
		if v = strings.TrimSpace(v); v != "" {
			*l = append(*l, v)
		}
	}
	return nil
}

// Type names the kind of value in help texts (pflag.Value).
func (l *List) Type() string { return "list" }

// isLoopback reports whether a host can be reached from this machine only.
func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
