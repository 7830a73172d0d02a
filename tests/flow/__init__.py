"""Both pipelines from end to end, with a backend that builds nothing."""
