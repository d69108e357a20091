# Usage: awk -f tools/cover.awk FLOORS PROFILE
#
# Prints the statement coverage of each package and of the module from a Go
# coverage profile, and exits 1 if one is below its floor. A profile made with
# -coverpkg has each block once per test binary; a block counts as covered if
# any of them ran it.

FNR == NR {
	if ($1 != "" && $1 !~ /^#/) floor[$1] = $2
	next
}
$1 == "mode:" { next }
{
	# membrane/kvwire/key.go:12.2,14.3 STATEMENTS COUNT
	statements[$1] = $2
	if ($3 > 0) ran[$1] = 1
}
END {
	for (block in statements) {
		package = block
		sub(/\/[^\/]*:.*$/, "", package)
		all[package] += statements[block]
		total += statements[block]
		if (block in ran) {
			covered[package] += statements[block]
			total_covered += statements[block]
		}
	}
	if (total == 0) {
		print "cover: the profile has no statements" > "/dev/stderr"
		exit 1
	}
	n = 0
	for (package in all) names[++n] = package
	for (i = 2; i <= n; i++) { # mawk has no sort
		name = names[i]
		for (j = i - 1; j > 0 && names[j] > name; j--) names[j + 1] = names[j]
		names[j + 1] = name
	}
	for (i = 1; i <= n; i++)
		row(names[i], covered[names[i]], all[names[i]], names[i] in floor ? floor[names[i]] : floor["package"])
	row("total", total_covered, total, floor["total"])
	exit failed
}
function row(name, have, want, least,    percent) {
	percent = 100 * have / want
	printf "%-32s %5.1f %%  (floor %d %%)%s\n", name, percent, least, percent < least ? "  BELOW" : ""
	if (percent < least) failed = 1
}
