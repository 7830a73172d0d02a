"""The tests of ringfence, mirroring its packages."""
