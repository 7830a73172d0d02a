"""The commands of `ringfence`, a module for each thing that they act on; registered in `reconciler.cli`."""
