#!/usr/bin/env bash
# Usage: tools/fuzz.sh FUZZTIME
#
# Runs each fuzz target of the module for FUZZTIME, one after the other, and
# fails at the first that finds something. Targets are read from the test files
# that the build would take: asking the test binaries would link them all.
set -euo pipefail

fuzztime=${1:?usage: tools/fuzz.sh FUZZTIME}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

fuzz() { # fuzz PACKAGE TARGET
	go test -run '^$' -fuzz "^$2\$" -fuzztime "$fuzztime" "$1" 2>&1 | tee "$log"
}

# On a busy machine Go may report its own end of fuzzing as a failure, with no
# failing input.
only_deadline() {
	grep -q 'context deadline exceeded' "$log" && ! grep -q 'Failing input written' "$log"
}

packages=$(go list -f '{{.ImportPath}} {{.Dir}}{{range .TestGoFiles}} {{.}}{{end}}{{range .XTestGoFiles}} {{.}}{{end}}' ./...)
count=0
while read -r package dir files; do
	for file in $files; do
		while read -r target; do
			echo "== $package $target"
			if ! fuzz "$package" "$target"; then
				only_deadline || exit 1
				echo "== $package $target again: it ended without a failing input"
				fuzz "$package" "$target"
			fi
			count=$((count + 1))
		done < <(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*testing\.F.*/\1/p' "$dir/$file")
	done
done <<<"$packages"

if [[ $count -eq 0 ]]; then
	echo "fuzz.sh: found no fuzz target" >&2
	exit 1
fi
echo "$count fuzz targets, $fuzztime each"
