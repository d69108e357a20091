#!/usr/bin/env bash
# Usage: tools/invariants.sh [WORD]
#
# Shows for each row of tools/invariants.txt (with WORD: for each that has it)
# that its test passes, and that it fails in a build in which the tag switches
# the guard off. A build that breaks, a test that is skipped, is not there or
# does not end, and a crash outside the test are no failure of the test, and so
# end with status 1 as a test does that passes without its guard.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

word=${1:-}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# Without debug information linking takes half of the time.
build=(go test -c -vet=off -ldflags '-s -w')
export GOFLAGS=-buildvcs=false

rows=$(grep -v -e '^#' -e '^$' tools/invariants.txt | grep -e "$word" || true)
if [[ -z $rows ]]; then
	echo "invariants.sh: no row of tools/invariants.txt has ${word@Q}" >&2
	exit 1
fi

# A guard that nobody tries is none.
while read -r file tag; do
	if ! grep -q " $tag " tools/invariants.txt; then
		echo "invariants.sh: tools/invariants.txt has no row for $tag ($file)" >&2
		exit 1
	fi
done < <(grep -r --include='guard_off_*.go' -o 'invariant_off_[a-z_]*' . | tr : ' ')

# What the documents say is what is tried.
while read -r number tag package test _; do
	if ! grep -qF "| $number | \`$tag\` | \`$package\` | \`$test\` |" docs/architecture.md; then
		echo "invariants.sh: docs/architecture.md has no row for $tag with $test" >&2
		exit 1
	fi
done <<<"$rows"

run() { # run BINARY PACKAGE PATTERN LOG
	(cd "$2" && "$1" -test.run "^($3)\$" -test.v -test.count=1 -test.timeout=60s) >"$4" 2>&1
}

ended() { # ended PASS|FAIL TEST LOG
	grep -q -e "^--- $1: $2 (" "$3"
}

# The tests of a package with all guards on, in one run.
mapfile -t packages < <(awk '{ print $3 }' <<<"$rows" | sort -u)
for package in "${packages[@]}"; do
	log=$out/on-${package//[.\/]/_}
	names=$(awk -v p="$package" '$3 == p { print $4 }' <<<"$rows" | sort -u | paste -sd '|')
	if ! "${build[@]}" -o "$log.test" "$package" >"$log" 2>&1; then
		cat "$log"
		exit 1
	fi
	run "$log.test" "$package" "$names" "$log" || true
	rm "$log.test"
done

surprises=0
surprise() { # surprise WHAT LOG
	((++surprises))
	verdict="SURPRISE: $1"
	tail -n 40 "$2" | sed 's/^/  | /'
}

# judge sets verdict to what a row's test did.
judge() { # judge TAG PACKAGE TEST
	local tag=$1 package=$2 test=$3 log=$out/on-${2//[.\/]/_}
	if ! ended PASS "$test" "$log"; then
		surprise 'does not pass with the guard on' "$log"
		return
	fi
	verdict=passes
	if [[ $tag == - ]]; then
		return
	fi
	log=$out/off
	if ! "${build[@]}" -tags "$tag" -o "$log.test" "$package" >"$log" 2>&1; then
		surprise 'does not build with the guard off' "$log"
	elif run "$log.test" "$package" "$test" "$log"; then
		surprise 'does not fail with the guard off' "$log"
	elif ! ended FAIL "$test" "$log"; then
		surprise 'ends with the guard off, but not as a failed test' "$log"
	else
		verdict='passes, fails with the guard off'
	fi
}

while read -r number tag package test what; do
	judge "$tag" "$package" "$test"
	printf '%s  %-28s %-20s %-48s %s\n   %s\n' "$number" "$tag" "$package" "$test" "$verdict" "$what"
done <<<"$rows"

echo
echo "$(wc -l <<<"$rows") rows, $surprises surprises, $SECONDS seconds"
((surprises == 0))
