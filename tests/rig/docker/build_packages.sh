#!/bin/bash
# build_packages.sh DESTINATION: Debian packages unpacked beside the machine's own and not installed (root, for apt-get):
#   debian/    the engine that Debian 12 ships: docker.io, containerd, runc (and the client, which speaks to both engines)
#   emulator/  QEMU's user emulation of arm64, to start arm64 images where the machine is none
#   tools/     what an engine calls: iptables, nft, tini; busybox for images; libseccomp's headers for runc
set -euo pipefail
destination=$1
fetch() { # fetch DIRECTORY PACKAGE...: these, and what they need that the machine lacks
	local directory=$destination/$1 debs
	shift
	debs=$(mktemp -d)
	mkdir -p "$directory" "$debs/partial"
	apt-get install -qq -y --reinstall --no-install-recommends --download-only \
		-o APT::Sandbox::User=root -o Debug::NoLocking=true -o Dir::Cache::archives="$debs" "$@" >/dev/null
	for deb in "$debs"/*.deb; do dpkg-deb -x "$deb" "$directory"; done
	rm -rf "$debs"
	# Papers only, in a cache.
	rm -rf "$directory/usr/share"
}
tools=(iptables nftables busybox-static tini libseccomp-dev libseccomp2 libip6tc2 libip4tc2 libnetfilter-conntrack3
	libnfnetlink0 libnftables1 libnftnl11 libxtables12 libmnl0 libjansson4 libedit2 libbsd0 libmd0)
debian=(docker.io containerd runc libdevmapper1.02.1 libseccomp2)
fetch tools "${tools[@]}" || {
	apt-get update -qq # the lists were older than the mirror
	fetch tools "${tools[@]}"
}
fetch debian "${debian[@]}"
fetch emulator qemu-user-static
find "$destination/emulator" -type f ! -name qemu-aarch64-static -delete
for each in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore; do
	ln -sfn xtables-nft-multi "$destination/tools/usr/sbin/$each"
done
ln -sfn tini-static "$destination/tools/usr/bin/docker-init"
