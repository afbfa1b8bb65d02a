"""Failures inside libraries written in Rust.

A panic there arrives as an exception that is no `Exception`, so that nobody catches it by accident: for a
server it is one more way in which a single request fails.
"""


def reraise_unless_failure(error: BaseException) -> None:
    """Let through what ends a program (Ctrl-C, exit); a panic is a failure like any other."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
