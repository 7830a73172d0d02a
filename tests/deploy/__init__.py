"""Tests of what is deployed: the manifests as they are written, and as a cluster takes them."""
