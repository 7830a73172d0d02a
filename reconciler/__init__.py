"""The daemon and the CLI of ringfence.

Config: watch -> snapshot -> load -> validate -> reason -> reconcile -> plan -> journal -> state -> live proxies.
Jobs:   spool.claim -> choose -> intent -> backend.launch (fence, gate, command) -> collect -> spool.report -> teardown.

`core` decides (pure values); this package carries values between its steps; `backends` build the fences.
"""
