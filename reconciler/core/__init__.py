"""Decisions: values in, values out. No clock, file, socket, log or randomness."""
