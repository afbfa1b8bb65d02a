"""The command `text-generation-benchmark`: how fast are static batches?

Says what is wrong with the flags before anything heavy is imported; `run` does the work.
"""

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from text_generation_inference.bench.static.task import read_task
from text_generation_inference.errors import TgiError

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None, prog: str = "text-generation-benchmark") -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a mark
    try:
        task = read_task(arguments, os.environ, prog)
    except TgiError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        from text_generation_inference.bench.static.run import (
            run_static,  # loads torch, which takes seconds: mistakes above are told at once
        )

        return run_static(task)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; nothing more to say to it
        return EXIT_ERROR
    except (TgiError, OSError) as error:
        with suppress(OSError):  # the terminal may be gone
            print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
