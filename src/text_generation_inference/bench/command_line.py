"""What the commands of `tgi bench` have in common: mistakes are one line on standard error, never a traceback.

Standard library only.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from text_generation_inference.errors import StartError, TgiError

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

Task = TypeVar("Task")


class Parser(argparse.ArgumentParser):
    """Raises `StartError` for a flag that makes no sense; never abbreviates."""

    def __init__(self, prog: str, usage: str, description: str) -> None:
        width = min(110, shutil.get_terminal_size((112, 24)).columns - 2)
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=width),
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise StartError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def run(read: Callable[[], Task], work: Callable[[Task], int], interrupted: str) -> int:
    """The exit status of `work` on what `read` makes of the command line."""
    try:
        task = read()
    except TgiError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        return work(task)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; nothing more to say to it
        return EXIT_ERROR
    except (TgiError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        return EXIT_INTERRUPTED
