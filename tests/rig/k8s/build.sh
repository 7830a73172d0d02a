#!/bin/bash
# build.sh MODULES SHARED DESTINATION: a one-node Kubernetes without a registry:
#   bin/     kube: etcd, the parts of Kubernetes and kube-router's policy controller in one binary, called by a part's name;
#            netpol: kube-network-policies; containerd with CRI, ctr; gVisor's shim
#   debian/  CNI's plugins and ipset, unpacked and not installed (root, for apt-get)
# from the Go modules that MODULES/*/go.mod pin, and SHARED/*/go.mod of the Docker rig, whose runc and runsc serve here too.
# Needs Go. Keep Go's own caches too, and a second build takes seconds.
set -euo pipefail
modules=$1 shared=$2 bin=$3/bin debian=$3/debian
mkdir -p "$bin" "$debian"
export CGO_ENABLED=0
step() { echo "$(date +%T) ${SECONDS}s $*" >&2; }
at() { go list -m -f '{{.Version}}' "$1"; }
build() { nice -n 10 go build -trimpath -gcflags=all=-dwarf=false "$@"; }

step Debian packages
debs=$(mktemp -d)
trap 'rm -rf "$debs"' EXIT
mkdir "$debs/partial"
fetch() {
	apt-get install -qq -y --reinstall --no-install-recommends --download-only -o APT::Sandbox::User=root \
		-o Debug::NoLocking=true -o Dir::Cache::archives="$debs" containernetworking-plugins ipset libipset13 >/dev/null
}
fetch || {
	apt-get update -qq # the lists were older than the mirror
	fetch
}
for deb in "$debs"/*.deb; do dpkg-deb -x "$deb" "$debian"; done
rm -rf "$debian/usr/share" # papers only, in a cache

cd "$shared/engine"
containerd=github.com/containerd/containerd/v2
step containerd "$(at $containerd)"
build -tags "no_btrfs no_devmapper no_zfs" -ldflags "-s -w -X $containerd/version.Version=$(at $containerd)" \
	-o "$bin/" $containerd/cmd/containerd $containerd/cmd/ctr

cd "$shared/gvisor"
step gVisor\'s shim "$(at gvisor.dev/gvisor)"
build -ldflags "-s -w" -o "$bin/containerd-shim-runsc-v1" "$modules/shim/main.go"

cd "$modules/kube"
version=$(at k8s.io/kubernetes) minor=${version#v1.}
step Kubernetes "$version", kube-router "$(at github.com/cloudnativelabs/kube-router/v2)"
base=k8s.io/component-base/version
build -ldflags "-s -w -X $base.gitVersion=$version -X $base.gitMajor=1 -X $base.gitMinor=${minor%%.*} \
	-X k8s.io/client-go/pkg/version.gitVersion=$version" -o "$bin/kube" .
ln -s kube "$bin/kubectl"

cd "$modules/knp"
step kube-network-policies "$(at sigs.k8s.io/kube-network-policies)"
build -ldflags "-s -w" -o "$bin/netpol" .
step done
