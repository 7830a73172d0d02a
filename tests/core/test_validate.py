"""What the directory wants as a whole: which files are documents, which are bad, and what is told of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from reconciler.core import validate as module
from reconciler.core.load import Bounds, Problem
from reconciler.core.validate import desired, document_of
from tests.core.scene import agent, egress, platform, problems_of

if TYPE_CHECKING:
    from reconciler.core.resolve import Resolved

BASE = platform(enabled=True)

NAMES = {
    "platform.yaml": "platform",
    "agents/helper.yaml": "agents/helper",
    "egress/org.yaml": "egress/org",
    "reasons/CHG-1.yaml": None,
    "agents/helper.yml": None,
    "agents/helper.yaml.bak": None,
    "agents/helper.yaml~": None,
    "agents/.helper.yaml": None,
    "agents/.yaml": None,
    "agents/deep/helper.yaml": None,
    "other/helper.yaml": None,
    "helper.yaml": None,
    "platform.yaml/x.yaml": None,
}


@pytest.mark.parametrize(("file", "document"), NAMES.items())
def test_a_path_stands_for_a_document_or_for_none(file: str, document: str | None) -> None:
    assert document_of(file) == document


def test_documents_statements_and_ignored_files_are_told_apart() -> None:
    files = (
        BASE | agent() | egress() | {"reasons/a.yaml": b"", "reasons/a.alice.sig": b"", "x.bak": b"\xff", "README": b""}
    )
    found = desired(files)
    assert sorted(found.documents) == ["agents/helper", "egress/org", "platform"]
    assert found.statements == ("reasons/a.alice.sig", "reasons/a.yaml")
    assert found.ignored == ("README", "x.bak")
    assert found.problems == ()
    assert not found.empty


def test_a_directory_without_documents_is_empty_and_has_no_problems() -> None:
    assert desired({}).empty
    assert desired({"reasons/a.yaml": b"", "README": b""}).empty
    assert desired({}).problems == ()


def test_a_bad_document_is_named_and_the_others_go_on() -> None:
    found = desired(BASE | agent("good") | {"agents/bad.yaml": b"version: 1\n"})
    assert found.bad == {"agents/bad"}
    assert sorted(found.documents) == ["agents/good", "platform"]
    assert {problem.where for problem in found.problems} == {"/kind", "/name", "/image"}


PROBLEMS = {
    "a name that is not its file's": (
        agent() | {"agents/x.yaml": agent()["agents/helper.yaml"]},
        "agents/x.yaml /name",
    ),
    "a file name in capitals": ({"agents/X.yaml": agent("x")["agents/x.yaml"]}, "name the file with small letters"),
    "another kind": ({"egress/x.yaml": agent("x")["agents/x.yaml"]}, "egress/x.yaml /kind is not egress"),
    "the host's files without its isolation": (agent(image="host"), "agents/helper.yaml /image is host"),
    "an unknown field": (agent(alow=[]), "write allow"),
}


@pytest.mark.parametrize(("files", "told"), PROBLEMS.values(), ids=PROBLEMS)
def test_what_is_wrong_is_told(files: dict[str, bytes], told: str) -> None:
    assert any(told in problem for problem in problems_of(BASE | files)), problems_of(BASE | files)


def test_no_platform_document_beside_others_is_a_problem() -> None:
    found = desired(agent())
    assert found.bad == {"platform"}
    assert "is missing" in found.problems[0].message


HOST_IMAGE = agent(image="host", minimum_isolation="namespace")


@pytest.mark.parametrize("backend", ["auto", "bubblewrap"])
def test_the_hosts_files_as_image_fit_these_backends(backend: str) -> None:
    assert desired(platform(backend=backend) | HOST_IMAGE).problems == ()


@pytest.mark.parametrize("backend", ["docker", "k8s", "firecracker"])
def test_the_hosts_files_as_image_and_another_backend_named_is_a_problem(backend: str) -> None:
    found = desired(platform(backend=backend) | HOST_IMAGE)
    assert found.bad == {"agents/helper"}
    (problem,) = found.problems
    assert (problem.file, problem.where) == ("agents/helper.yaml", "/image")
    assert backend in problem.message


def test_unchanged_documents_are_taken_over_and_only_changed_ones_are_read() -> None:
    files = BASE | agent("one") | agent("two") | {"agents/bad.yaml": b"x"}
    first = desired(files)
    second = desired(files | agent("two", allow=["a.com"]), previous=first)
    assert second.documents["agents/one"] is first.documents["agents/one"]
    assert second.documents["agents/two"]["allow"] == ["a.com"]
    assert second.bad == {"agents/bad"}
    assert desired(files | agent("two", allow=["a.com"])) == second


def test_a_problem_across_documents_is_found_again_although_nothing_in_the_document_changed() -> None:
    first = desired(platform() | HOST_IMAGE)
    assert desired(platform(backend="docker") | HOST_IMAGE, previous=first).bad == {"agents/helper"}
    again = desired(platform(backend="docker") | HOST_IMAGE)
    assert desired(platform() | HOST_IMAGE, previous=again).problems == ()


def test_bounds_are_those_of_the_host() -> None:
    assert any("max_bytes" in problem.message for problem in desired(BASE, bounds=Bounds(bytes=5)).problems)


def test_problems_are_sorted_by_file_and_line() -> None:
    found = desired({"egress/b.yaml": b"a: no\nb: on\n", "agents/a.yaml": b"x: 0755\n"}).problems
    assert list(found) == sorted(found)
    assert [problem.file for problem in found] == ["agents/a.yaml", "egress/b.yaml", "egress/b.yaml", "platform.yaml"]


def test_a_bad_document_that_does_not_change_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    files = platform(backend="docker") | HOST_IMAGE | {"agents/bad.yaml": b"a: no\n", "egress/bad.yaml": b"\xff"}
    first = desired(files)
    read: list[str] = []

    def validate(file: str, data: bytes, *, bounds: Bounds | None = None) -> Resolved | tuple[Problem, ...]:
        read.append(file)
        return original(file, data, bounds=bounds)

    original = module.validate
    monkeypatch.setattr(module, "validate", validate)
    assert desired(files, previous=first) == first
    assert read == []
    assert desired(files | {"agents/bad.yaml": b"a: on\n"}, previous=first).bad == first.bad
    assert read == ["agents/bad.yaml"]


def test_a_bad_document_that_is_mended_is_good_again() -> None:
    first = desired(BASE | {"agents/helper.yaml": b"a: no\n"})
    assert desired(BASE | agent(), previous=first) == desired(BASE | agent())


def test_of_very_many_bad_files_each_is_named_and_what_is_told_stays_readable() -> None:
    bad = b"a:\n" + b"- no\n" * 500
    found = desired(BASE | {f"agents/a{number}.yaml": bad for number in range(300)})
    told = Counter(problem.file for problem in found.problems)
    assert len(told) == len(found.bad) == 300
    assert told["agents/a0.yaml"] == 101
    assert sum(told.values()) < 1000 + 101 + 2 * 300
    assert "more problems" in [one for one in found.problems if one.file == "agents/a99.yaml"][-1].message
