"""What builds sandboxes, one backend for each kind; `base` says what every backend promises."""
