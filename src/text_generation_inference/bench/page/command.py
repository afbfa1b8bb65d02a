"""The command `tgi bench report`: one page from the JSON reports of any benchmarks.

Never imports torch.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from text_generation_inference.bench import command_line
from text_generation_inference.bench.page.page import make_page
from text_generation_inference.bench.page.read import read_runs
from text_generation_inference.bench.report import check_writable, write_whole
from text_generation_inference.errors import StartError


class PageTask(msgspec.Struct, frozen=True):
    files: list[str]
    output: str
    title: str | None


def main(arguments: Sequence[str], prog: str = "tgi bench report") -> int:
    return command_line.run(lambda: read_task(arguments, prog), make_report, interrupted="interrupted: nothing written")


def read_task(arguments: Sequence[str], prog: str = "tgi bench report") -> PageTask:
    parser = command_line.Parser(
        prog,
        usage="%(prog)s [OPTIONS] FILE ...",
        description="Make one HTML page, with tables and charts, from the reports that benchmarks wrote (--json)."
        " It needs nothing but a browser. Runs of the same benchmark share their charts.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a JSON report of any benchmark")
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default: report.html")
    parser.add_argument("--title", metavar="TEXT", help="of the page (default: named after the model)")
    options = parser.parse_intermixed_args(list(arguments))
    return PageTask(options.files, options.output, options.title)


def make_report(task: PageTask) -> int:
    check_writable(task.output, "--output")
    target = Path(task.output).expanduser().resolve()
    if any(Path(file).expanduser().resolve() == target for file in task.files):
        raise StartError(f"--output {task.output} is one of the reports: give another name")
    runs = read_runs(task.files)
    write_whole(task.output, make_page(runs, task.title).encode())
    print(f"{task.output}: {len(runs)} run{'s' if len(runs) > 1 else ''}")
    return 0
