"""Owns the promise of REQUIRE_BACKENDS: where a backend is named there, a skipped test of it is a failed one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator


def required() -> frozenset[str]:
    """Read the comma-separated names of backends that this machine must have."""
    return frozenset(name.strip() for name in os.environ.get("REQUIRE_BACKENDS", "").split(",") if name.strip())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure when one of the test's marks is a required backend."""
    report = yield
    named = required() & {mark.name for mark in item.iter_markers()}
    if report.skipped and named and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"REQUIRE_BACKENDS names {', '.join(sorted(named))}, but: {reason}"
    return report
