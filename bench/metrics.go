package bench

import (
	"bufio"
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// Names of a sidecar's metrics that the demo and the benchmarks read.
const (
	leasedBytes    = "membrane_engine_leased_bytes_total"
	servedBytes    = "membrane_peer_served_bytes_total"
	fetchedBytes   = "membrane_peer_fetched_bytes_total"
	residentPages  = "membrane_cache_pages"
	directoryPages = "membrane_directory_pages"
)

// metric returns the value of one of a sidecar's metrics: the sum of the lines
// of that name which have the given text among their labels. A metric that is
// not there is an error.
func metric(http, name, label string) (float64, error) {
	url := "http://" + http + "/metrics"
	body, err := get(url)
	if err != nil {
		return 0, err
	}
	sum, found := 0.0, false
	scan := bufio.NewScanner(bytes.NewReader(body))
	for scan.Scan() {
		series, value, ok := strings.Cut(scan.Text(), " ")
		base, labels, _ := strings.Cut(series, "{")
		if !ok || base != name || !strings.Contains(labels, label) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, fmt.Errorf("cannot read %s of %s: %w", series, url, err)
		}
		sum, found = sum+v, true
	}
	if !found {
		return 0, fmt.Errorf("%s has no metric %s with %q", url, name, label)
	}
	return sum, nil
}
