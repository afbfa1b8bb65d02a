"""The command `text-generation-benchmark`: how fast are static batches?

Says what is wrong with the flags before anything heavy is imported; `run` does the work.
"""

import io
import os
import sys
from collections.abc import Sequence

from text_generation_inference.bench import command_line
from text_generation_inference.bench.static.task import StaticTask, read_task
from text_generation_inference.config import ServerConfig, prepare_process


def main(arguments: Sequence[str] | None = None, prog: str = "text-generation-benchmark") -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a mark
    return command_line.run(lambda: read_task(arguments, os.environ, prog), _run, interrupted="interrupted")


def _run(task: StaticTask) -> int:
    prepare_process(ServerConfig(**task.settings))
    from text_generation_inference.bench.static.run import run_static  # loads torch: mistakes are told at once

    return run_static(task)


if __name__ == "__main__":
    sys.exit(main())
