"""The command `tgi bench`: which benchmark, or the page of their reports.

Only hands the arguments on; what a benchmark needs is imported when it is asked for.
"""

import sys
from collections.abc import Sequence

from text_generation_inference.bench.command_line import EXIT_USAGE

_COMMANDS = {
    "offline": "how fast a model runs here, without a server",
    "serve": "how fast a server answers, at any address",
    "report": "one page with the tables and charts of JSON reports",
}


def main(arguments: Sequence[str], prog: str = "tgi bench") -> int:
    match list(arguments):
        case ["offline", *rest]:
            from text_generation_inference.bench import offline_command

            return offline_command.main(rest, f"{prog} offline")
        case ["serve", *rest]:
            from text_generation_inference.bench.serve import command as serve_command

            return serve_command.main(rest, f"{prog} serve")
        case ["report", *rest]:
            from text_generation_inference.bench.page import command as page_command

            return page_command.main(rest, f"{prog} report")
        case [("-h" | "--help"), *_]:
            print(_help(prog))
            return 0
        case given:
            asked = f"{given[0]!r} is not a benchmark" if given else "say what to measure"
            print(f"error: {asked}: {prog} {', '.join(_COMMANDS)} (see {prog} --help)", file=sys.stderr)
            return EXIT_USAGE


def _help(prog: str) -> str:
    lines = [f"usage: {prog} COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<9}{text}" for name, text in _COMMANDS.items()]
    lines += ["", f"`{prog} COMMAND --help` says how. Static batches: text-generation-benchmark."]
    return "\n".join(lines)
