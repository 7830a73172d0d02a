"""What an engine's version says of its hazards, and which of a runtime's arguments open what it should close."""

from __future__ import annotations

import pytest

from reconciler.backends.docker_versions import Version, api, hazards, parse, unsafe_runtime


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("29.8.0", (29, 8, 0)),
        ("20.10.24+dfsg1", (20, 10, 24)),
        ("28.0.0-rc.1", (28, 0, 0)),
        ("v27.3.1", (27, 3, 1)),
        ("28.1", (28, 1, 0)),
        ("library-import", None),
        ("", None),
        ("29", None),
        ("29.8.0\n", None),
        ("29.x.0", None),
    ],
)
def test_versions(text: str, version: Version | None) -> None:
    assert parse(text) == version


@pytest.mark.parametrize(
    ("version", "isolated", "forwards", "route"),
    [
        pytest.param((20, 10, 24), False, True, True, id="20.10 has every hazard"),
        pytest.param((23, 0, 10), False, True, True, id="23.0.10 forwards"),
        pytest.param((23, 0, 11), False, False, True, id="23.0.11 does not"),
        pytest.param((24, 0, 9), False, True, True, id="no 24 was ever mended"),
        pytest.param((25, 0, 4), False, True, False, id="25.0.4 forwards"),
        pytest.param((25, 0, 5), False, False, False, id="25.0.5 does not"),
        pytest.param((26, 1, 5), False, False, False, id="26.1 stores `isolated` and does nothing"),
        pytest.param((27, 5, 1), False, False, False, id="27 has the mode for routed and nat alone"),
        pytest.param((28, 0, 0), True, False, False, id="28 isolates"),
        pytest.param((29, 8, 0), True, False, False, id="29 isolates"),
    ],
)
def test_hazards(version: Version, isolated: bool, forwards: bool, route: bool) -> None:
    found = hazards(version)
    assert (found.isolated, found.resolver_forwards, found.default_route) == (isolated, forwards, route)


@pytest.mark.parametrize(
    ("server", "oldest", "chosen"),
    [
        ("1.41", "1.12", "1.41"),
        ("1.56", "1.40", "1.56"),
        ("1.60", "1.44", "1.56"),
        ("1.70", "1.57", None),
        ("1.40", "1.12", None),
        ("1.45", "", "1.45"),
        ("", "", None),
        ("one", "1.12", None),
    ],
)
def test_the_newest_api_that_both_know(server: str, oldest: str, chosen: str | None) -> None:
    assert api(server, oldest) == chosen


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), None),
        (("--platform=systrap", "--debug-log=/tmp/x"), None),
        (("--network=sandbox", "--host-uds=none"), None),
        (("--network=host",), "--network=host"),
        (("-network=host",), "-network=host"),
        (("--network", "host"), "--network"),
        (("--network", "sandbox"), None),
        (("--host-uds=open",), "--host-uds=open"),
        (("--host-uds=all", "--debug"), "--host-uds=all"),
        (("--fsgofer-host-uds",), "--fsgofer-host-uds"),
        (("--net-raw",), "--net-raw"),
        (("--net-raw=false",), None),
        (("--allow-flag-override",), "--allow-flag-override"),
        (("--TESTONLY-unsafe-nonroot=true",), "--TESTONLY-unsafe-nonroot=true"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, tuple) else str(value),
)
def test_a_gvisor_that_was_opened_is_not_used(arguments: tuple[str, ...], found: str | None) -> None:
    assert unsafe_runtime(arguments) == found
