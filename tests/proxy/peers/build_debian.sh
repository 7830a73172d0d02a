#!/bin/bash
# build_debian.sh DESTINATION: Squid, tinyproxy and HAProxy as Debian has them, unpacked and not installed, so that no
# service of theirs ever starts (root, for apt-get). What they need and the machine lacks lies beside them.
set -euo pipefail
destination=$1
fetch() {
	local debs
	debs=$(mktemp -d)
	mkdir -p "$debs/partial"
	apt-get install -qq -y --reinstall --no-install-recommends --download-only \
		-o APT::Sandbox::User=root -o Debug::NoLocking=true -o Dir::Cache::archives="$debs" \
		squid tinyproxy-bin haproxy >/dev/null || return
	rm -f "$debs"/perl* "$debs"/libperl* "$debs"/libdbi*
	for deb in "$debs"/*.deb; do dpkg-deb -x "$deb" "$destination"; done
	rm -rf "$debs"
}
fetch || {
	apt-get update -qq # the lists were older than the mirror
	fetch
}
rm -rf "$destination"/usr/share/{doc,man,locale}
