#!/usr/bin/env bash
# Usage: tools/bench-docs.sh DOCUMENT FOLDER
#
# Replaces what stands between the lines "<!-- begin NAME -->" and
# "<!-- end NAME -->" of DOCUMENT with FOLDER/NAME.md, for every NAME whose file
# is there. What is written by hand around it stays.
set -euo pipefail

if [[ $# -ne 2 || ! -f $1 || ! -d $2 ]]; then
	echo "usage: tools/bench-docs.sh DOCUMENT FOLDER" >&2
	exit 2
fi
document=$1 folder=$2
new=$(mktemp)
trap 'rm -f "$new"' EXIT

awk -v folder="$folder" '
	/^<!-- begin [a-z-]+ -->$/ {
		print
		file = folder "/" $3 ".md"
		if ((getline line <file) > 0) {
			printf "\n%s\n", line
			while ((getline line <file) > 0) print line
			close(file)
			print ""
			name = $3
		}
		next
	}
	name != "" {
		if ($0 == "<!-- end " name " -->") { print; name = "" }
		next
	}
	{ print }
	END { if (name != "") { print "no end of " name >"/dev/stderr"; exit 1 } }
' "$document" >"$new"
cat "$new" >"$document"
