#!/bin/sh
# packages.sh [rig]: installs the Debian packages that ringfence, its demo and its tests need and this machine lacks, with
# `rig` also those that building the rig's programs needs; names each one first.
set -eu
missing=""
need() { # need PACKAGE COMMAND...: the package is missing when the command fails
	package=$1
	shift
	"$@" >/dev/null 2>&1 || missing="$missing $package"
}
need bubblewrap bwrap --version
need iproute2 ip -V
need util-linux nsenter --version
need openssh-client test -x /usr/bin/ssh-keygen
need openssl openssl version
need ca-certificates test -s /etc/ssl/certs/ca-certificates.crt
need nftables test -x /usr/sbin/nft
need libseccomp2 sh -c 'ldconfig -p | grep -q libseccomp.so.2'
need python3 test -x /usr/bin/python3
need python3-venv "${PYTHON:-python3}" -c 'import ensurepip, venv'
if [ "${1:-}" = rig ]; then
	need gcc gcc --version
	need libc6-dev test -e /usr/include/stdio.h
	need libssl-dev test -e /usr/include/openssl/evp.h
	need zlib1g-dev test -e /usr/include/zlib.h
	need pkg-config pkg-config --version
	need golang-go go version
	need systemd systemd-analyze --version
fi
[ -z "$missing" ] && exit 0
for package in $missing; do
	echo "installing the Debian package $package"
done
if [ "$(id -u)" != 0 ]; then
	echo "that needs root: sudo apt-get install$missing" >&2
	exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null
# shellcheck disable=SC2086 # one word a package is what is meant
apt-get install -y -qq --no-install-recommends $missing >/dev/null
