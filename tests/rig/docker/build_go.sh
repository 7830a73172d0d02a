#!/bin/bash
# build_go.sh MODULES TOOLS DESTINATION: a current Docker Engine with its docker-proxy, containerd, shim and runc, and
# gVisor's runsc, from the Go modules that MODULES/*/go.mod pin. TOOLS: where libseccomp's headers were unpacked.
# Needs Go of any age, gcc and pkg-config (`deploy/packages.sh rig`). Keep Go's own caches too, and a second build takes seconds.
set -euo pipefail
modules=$1 tools=$2 bin=$3/bin
mkdir -p "$bin"
step() { echo "$(date +%T) ${SECONDS}s $*" >&2; }
at() { go list -m -f "$1" "$2"; }
build() { nice -n 10 go build -trimpath -gcflags=all=-dwarf=false "$@"; }
engine=github.com/moby/moby/v2 containerd=github.com/containerd/containerd/v2 runc=github.com/opencontainers/runc
gvisor=gvisor.dev/gvisor

# The modules say which Go they need. An older one, as Debian 12's, has that from where they come from too: it is a module.
wanted=$(sed -n 's/^go //p' "$modules"/*/go.mod | sort -V | tail -n 1)
if [ "$(printf '%s\n' "go$wanted" "$(go env GOVERSION)" | sort -V | head -n 1)" != "go$wanted" ]; then
	toolchain=golang.org/toolchain@v0.0.1-go$wanted.$(go env GOOS)-$(go env GOARCH)
	step "$toolchain, since $(go env GOVERSION) is too old"
	go mod download "$toolchain"
	unpacked=$(go env GOMODCACHE)/$toolchain
	chmod +x "$unpacked"/bin/* "$unpacked"/pkg/tool/*/*
	export PATH=$unpacked/bin:$PATH GOTOOLCHAIN=local
	unset GOROOT
fi

cd "$modules/runc"
step runc "$(at '{{.Version}}' $runc)"
lib=$tools/usr/lib/$(gcc -print-multiarch)
CGO_ENABLED=1 PKG_CONFIG_PATH=$lib/pkgconfig CGO_CFLAGS=-I$tools/usr/include CGO_LDFLAGS=-L$lib \
	build -tags seccomp -ldflags "-s -w -X main.version=$(at '{{.Version}}' $runc | sed s/^v//)" -o "$bin/" $runc

export CGO_ENABLED=0
cd "$modules/engine"
go mod download $engine $containerd
# The module says which engine it is: the last one that was released when it was tagged.
version=$(sed -n 's/^ *last: "\(.*\)"/\1/p' "$(at '{{.Dir}}' $engine)/releases/versions.yaml")
step Docker Engine "$version" from $engine "$(at '{{.Version}}' $engine)"
build -ldflags "-s -w -X $engine/dockerversion.Version=$version -X $engine/dockerversion.GitCommit=$(at '{{.Version}}' $engine)" \
	-o "$bin/" $engine/cmd/dockerd $engine/cmd/docker-proxy
step containerd "$(at '{{.Version}}' $containerd)"
build -tags "no_btrfs no_devmapper no_zfs no_cri" -ldflags "-s -w -X $containerd/version.Version=$(at '{{.Version}}' $containerd)" \
	-o "$bin/" $containerd/cmd/containerd $containerd/cmd/containerd-shim-runc-v2

cd "$modules/gvisor"
step runsc "$(at '{{.Version}}' $gvisor)"
build -ldflags "-s -w -X $gvisor/runsc/version.version=$(at '{{.Version}}' $gvisor)" -o "$bin/" $gvisor/runsc
step done
