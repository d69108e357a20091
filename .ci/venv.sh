#!/usr/bin/env bash
# Usage: .ci/venv.sh NAME REQUIREMENTS [OVERRIDES]
#
# Makes a Python virtual environment with what REQUIREMENTS pins, or finds the
# one that an earlier run made, and prints its path; everything else goes to
# standard error. OVERRIDES are pins that win over what packages ask for.
#
# The environment lies outside the checkout, in
# ${XDG_CACHE_HOME:-$HOME/.cache}/membrane/venv/NAME-KEY, where KEY is a digest
# of the pins and of the Python version, so that a fresh clone finds it again.
# PYTHON names another interpreter than python3.
set -euo pipefail

uv_version=0.13.9

if [[ $# -lt 2 || $# -gt 3 || ! $1 =~ ^[a-z0-9_-]+$ ]]; then
	echo "usage: .ci/venv.sh NAME REQUIREMENTS [OVERRIDES]" >&2
	exit 2
fi
name=$1 requirements=$2 overrides=${3:-}
python=${PYTHON:-python3}

for file in "$requirements" ${overrides:+"$overrides"}; do
	if [[ ! -r $file ]]; then
		echo "venv.sh: cannot read the pins at \"$file\"" >&2
		exit 2
	fi
done

# pins FILE prints its lines without comments and blanks.
pins() { sed -e 's/[[:space:]]*#.*$//' -e '/^[[:space:]]*$/d' "$1"; }

root=${XDG_CACHE_HOME:-$HOME/.cache}/membrane/venv
mkdir -p "$root"
key=$({
	"$python" -c 'import sys, platform; print(sys.version_info[:3], platform.machine())'
	pins "$requirements"
	echo "-- overrides"
	if [[ -n $overrides ]]; then pins "$overrides"; fi
} | sha256sum | cut -c1-16)
venv=$root/$name-$key

# Two checkouts may ask at once: the second waits and finds it made.
exec 9>"$root/$name-$key.lock"
flock 9

# "complete" is written last, so an environment that was cut short is redone.
if [[ -e $venv/complete ]] && "$venv/bin/python" -c '' 2>/dev/null; then
	touch "$venv/complete"
	echo "$venv"
	exit 0
fi

# Environments of other pins of this name that nobody used for two weeks.
for old in "$root/$name"-*/complete; do
	if [[ -n $(find "$old" -mtime +14 2>/dev/null) ]]; then
		rm -rf "${old%/complete}" "${old%/complete}.lock"
	fi
done

if uv --version >/dev/null 2>&1; then
	uv=uv
else
	uv=$root/uv-$uv_version/bin/uv
	if ! "$uv" --version >/dev/null 2>&1; then
		(
			exec 8>"$root/uv-$uv_version.lock"
			flock 8
			"$uv" --version >/dev/null 2>&1 && exit 0
			rm -rf "$root/uv-$uv_version"
			"$python" -m venv "$root/uv-$uv_version"
			"$root/uv-$uv_version/bin/pip" install --quiet "uv==$uv_version"
		) >&2
	fi
fi

echo "venv.sh: making $venv" >&2
rm -rf "$venv"
"$uv" venv --quiet --python "$(command -v "$python")" "$venv" >&2
"$uv" pip install --quiet --python "$venv/bin/python" \
	${overrides:+--override "$overrides"} --requirement "$requirements" >&2
touch "$venv/complete"
echo "$venv"
