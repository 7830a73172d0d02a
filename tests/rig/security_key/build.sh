#!/bin/bash
# build.sh DESTINATION: OpenSSH's own security key in software, of its regression tests, as DESTINATION/sk-dummy.so.
# From Debian's source package, so that it has the version of the ssh-keygen that loads it (root, for apt-get; a compiler
# and OpenSSL's headers). Nothing is installed.
set -euo pipefail
destination=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial"
shopt -s nullglob
for each in /etc/apt/sources.list.d/*.sources; do
	grep -qi '^URIs:.*debian' "$each" && sed 's/^Types:.*/Types: deb-src/' "$each" && echo
done >"$work/debian.sources"
for each in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
	[ -e "$each" ] && sed -n '/debian/s/^deb /deb-src /p' "$each"
done >"$work/debian.list"
mkdir "$work/sources"
mv "$work"/debian.* "$work/sources"
sources=(-o Dir::Etc::sourcelist=- -o "Dir::Etc::sourceparts=$work/sources" -o "Dir::State::lists=$work/lists"
	-o APT::Sandbox::User=root)
apt-get -qq "${sources[@]}" update
cd "$work"
apt-get -qq "${sources[@]}" --download-only source openssh
tar -xzf openssh_*.orig.tar.gz
cd openssh-*/
./configure --quiet >&2
programs=(regress/misc/sk-dummy/sk-dummy.c regress/misc/sk-dummy/fatal.c ed25519.c hash.c openbsd-compat/sha2.c)
for each in "${programs[@]}"; do
	cc -O2 -fPIC -w -I. -Iopenbsd-compat -DHAVE_CONFIG_H -c "$each" -o "$(basename "$each" .c).o"
done
cc -shared -Wl,-z,defs -o "$destination/sk-dummy.so" sk-dummy.o fatal.o ed25519.o hash.o sha2.o -lcrypto
