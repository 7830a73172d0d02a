"""Owns reading off a runtime's own words why a command could not be executed; knows no runtime's API."""

from reconciler.backends.base import ExitCode

_NOT_FOUND_WORDS = ("no such file or directory", "executable file not found", "not found in $path")
_NOT_EXECUTABLE_WORDS = ("permission denied", "is a directory", "exec format error", "not a directory")


def why_not(message: str) -> ExitCode:
    """Read off why a command could not be executed; what is neither is the sandbox's own failure."""
    words = message.lower()
    if any(each in words for each in _NOT_EXECUTABLE_WORDS):
        return ExitCode.NOT_EXECUTABLE
    if any(each in words for each in _NOT_FOUND_WORDS):
        return ExitCode.NOT_FOUND
    return ExitCode.SANDBOX_CRASHED
