"""What runs at the fence: the egress proxy, and the gate that proves the fence from inside."""

OWNER = "ringfence"
"""Owner marker: another distribution also installs a package called `proxy`; `main.py` refuses to start with theirs."""
