//go:build tools

package tools // keeps `go mod tidy` from forgetting what build-go.sh builds

import _ "github.com/opencontainers/runc"
