"""Owns what a problem is, and how many of one file are told: nobody mends a thousand at once, and each costs a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST = 100
"""Problems of one file that are told one by one; the others are counted."""
_LONGEST = 1000
"""Characters of one message: a document's own text may be part of it."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One finding: where it is and what to write instead. `where` is a JSON pointer, empty for the whole document."""

    file: str
    line: int
    column: int
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.where or '/'}: {self.message}"


class Problems:
    """Collects the problems of one file, in the order in which they are found: the first `MOST`, and a count."""

    __slots__ = ("_found", "_more", "_unknown")

    def __init__(self) -> None:
        self._found: dict[Problem, None] = {}
        self._more = 0
        self._unknown = False

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def full(self) -> bool:
        """Whether no more are told one by one: what costs work to find need not be found any more."""
        return len(self._found) >= MOST

    def add(self, problem: Problem) -> None:
        """Take one in."""
        if len(problem.message) > _LONGEST:
            message = f"{problem.message[:_LONGEST]}…"
            problem = Problem(problem.file, problem.line, problem.column, problem.where, message)
        if problem in self._found:
            return
        if not self.full:
            self._found[problem] = None
            return
        self._more += 1

    def take(self, problems: Iterable[Problem]) -> None:
        """Take in as many as are told and one more; the rest are not looked for, nor counted."""
        for problem in problems:
            if self.full:
                self.leave()
                return
            self.add(problem)

    def leave(self) -> None:
        """Note that there are more, or may be, which nobody counts."""
        self._unknown = True

    def count(self, more: int) -> None:
        """Count others that nobody made a problem of."""
        self._more += more

    def sorted(self) -> tuple[Problem, ...]:
        """Give those that are told, sorted, and at the end one that says how many more there are."""
        found = tuple(sorted(self._found))
        if not self._more and not self._unknown:
            return found
        return (*found, _rest(found[-1], None if self._unknown else self._more))


def fewer(problems: tuple[Problem, ...]) -> tuple[Problem, ...]:
    """Give only the first problem of a file, and that there are others."""
    return problems if len(problems) <= 1 else (problems[0], _rest(problems[0], None))


def _rest(last: Problem, more: int | None) -> Problem:
    count = "and there may be more" if more is None else f"and {more} more"
    return Problem(last.file, last.line, last.column, last.where, f"… {count} problems; mend these first")
