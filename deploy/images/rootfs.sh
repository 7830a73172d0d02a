#!/bin/sh
# rootfs.sh ARCHITECTURE DIRECTORY PACKAGE...: a root file system of exactly these Debian packages, unpacked, not installed.
# No maintainer script runs, so that any architecture can be made on any machine; what the scripts would have done and an
# image needs is done below. Needs Debian's apt and dpkg; takes the mirror and the keys of the machine it runs on.
set -eu
architecture=$1 root=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# apt with a state of its own: the machine's lists and other architectures stay as they are.
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs"
: >"$work/status"
cat >"$work/apt.conf" <<A
Dir::State "$work";
Dir::State::lists "$work/lists";
Dir::State::status "$work/status";
Dir::Cache "$work/cache";
APT::Architecture "$architecture";
APT::Architectures { "$architecture"; };
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
A
export APT_CONFIG="$work/apt.conf"
apt-get update -qq
(cd "$work/debs" && apt-get download -qq "$@")

# /usr is merged, as on every Debian 12: the links come first and tar keeps them.
mkdir -p "$root"
for each in bin sbin lib lib64; do
	mkdir -p "$root/usr/$each"
	ln -sfn "usr/$each" "$root/$each"
done
for deb in "$work"/debs/*.deb; do
	dpkg-deb --fsys-tarfile "$deb" | tar -C "$root" --keep-directory-symlink -xpf -
done
mkdir -p "$root/etc" "$root/root" "$root/proc" "$root/sys" "$root/dev" "$root/run" "$root/tmp" "$root/var/tmp"
chmod 1777 "$root/tmp" "$root/var/tmp"

cat >"$root/etc/passwd" <<P
root:x:0:0:root:/root:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/:/usr/sbin/nologin
ringfence:x:65532:65532:ringfence:/:/usr/sbin/nologin
P
cat >"$root/etc/group" <<G
root:x:0:
nogroup:x:65534:
ringfence:x:65532:
G
echo 'hosts: files dns' >"$root/etc/nsswitch.conf"
# What was unpacked, for whoever has to know whether a vulnerability is in it.
for deb in "$work"/debs/*.deb; do dpkg-deb -W --showformat '${Package} ${Version} ${Architecture}\n' "$deb"; done |
	LC_ALL=C sort >"$root/etc/packages"

# Papers and translations; the licences stay.
rm -rf "$root/usr/share/man" "$root/usr/share/info" "$root/usr/share/locale" "$root/usr/share/lintian" "$root/usr/share/bug"
find "$root/usr/share/doc" ! -type d ! -name copyright -delete 2>/dev/null || true
