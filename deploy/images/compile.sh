#!/bin/sh
# compile.sh ROOT DIRECTORY...: byte code for Python in an image, where nobody can write it later and start-up time counts.
# Byte code is the same on every architecture: the image's own python3 makes it, or where that cannot run a host's same version.
set -eu
root=$1
shift
set -- -m compileall -q -f -j 1 --invalidation-mode unchecked-hash "$@"
if chroot "$root" /usr/bin/python3 -c '' 2>/dev/null; then
	exec chroot "$root" /usr/bin/python3 "$@"
fi
echo "compile.sh: the image's python3 cannot run here; it will compile when it starts" >&2
