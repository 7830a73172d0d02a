"""One table of attacks, run as the workload on every backend, and in the open where they must succeed."""
