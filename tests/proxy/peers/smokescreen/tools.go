//go:build tools

// Package tools pins what build_smokescreen.sh builds.
package tools

import _ "github.com/stripe/smokescreen"
