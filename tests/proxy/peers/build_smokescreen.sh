#!/bin/bash
# build_smokescreen.sh MODULE DESTINATION: smokescreen of the version that MODULE/go.mod pins, as DESTINATION/bin/smokescreen.
# Needs Go.
set -euo pipefail
cd "$1"
CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$2/bin/" github.com/stripe/smokescreen
