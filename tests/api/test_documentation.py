"""Every fenced block of README.md and docs/: run as it stands, or read by the program it is for.

A block says its language. `python` blocks and the commands `curl` and `tgi generate` are run, with the port of a real
server put in place of 8080 and nothing else changed. What needs a GPU, a Gaudi card, Docker, a model of the hub, or
minutes, is given to the parser that would read it. A block or a command that no rule covers fails.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from text_generation_inference import cli
from text_generation_inference.api import replica_metrics
from text_generation_inference.bench import offline_command
from text_generation_inference.bench.page import command as report_command
from text_generation_inference.bench.serve import command as serve_command
from text_generation_inference.bench.static import task as static_task
from text_generation_inference.launch import measure_command, quantize_command
from text_generation_inference.launch.arguments import build_parser, read_arguments
from text_generation_inference.ray_serve.command import build_ray_parser
from text_generation_inference.ray_serve.command import read_options as read_ray_options
from text_generation_inference.weights.model_files import explain_pickles

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str


BLOCKS = [
    Block(page, page.read_text()[: found.start()].count("\n") + 1, found[1], found[2])
    for page in PAGES
    for found in FENCED.finditer(page.read_text())
]


class Command(NamedTuple):
    """One line of a `bash` block."""

    block: Block
    text: str
    variables: dict[str, str]
    words: list[str]

    @property
    def program(self) -> str:
        words = [self.words[0], *self.words[1:3]]
        if words[0] == "tgi":
            return " ".join(words[:3] if words[1] == "bench" else words[:2])
        return words[0]


def commands_of(block: Block) -> list[Command]:
    lines = [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip()]
    commands: list[Command] = []
    for line in lines:
        words = shlex.split(line, comments=True)
        variables: dict[str, str] = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        commands.append(Command(block, line, variables, words))
    return commands


COMMANDS = [command for block in BLOCKS if block.language == "bash" for command in commands_of(block)]
RUN = {"curl", "tgi generate", "cat"}  # the last one feeds `tgi generate`


def name_of(item: Block | Command) -> str:
    block = item if isinstance(item, Block) else item.block
    end = item.language if isinstance(item, Block) else item.program
    return f"{block.page.name}:{block.line} {end}"


# -- reading -------------------------------------------------------------------------------------------------------


def without_output(words: list[str]) -> list[str]:
    """Arguments up to where the shell sends the output elsewhere."""
    return [word for word in words if not re.match(r"[0-9]?>", word)]


def check_launcher(command: Command, arguments: list[str] | None = None) -> None:
    options = build_parser("launcher", "").parse_args(command.words[1:] if arguments is None else arguments)
    read_arguments(options, {name: value for name, value in command.variables.items() if name != "PYTHONPATH"})


def check_make(command: Command) -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", *command.words[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr


def check_docker(command: Command) -> None:
    if "inspect" in command.words:  # of a base
        bases = "".join(path.read_text() for path in (ROOT / "docker").glob("*.Dockerfile"))
        assert any(f"BASE_IMAGE={word}\n" in bases for word in command.words)
        return
    assert command.words[1] == "run"
    place, image = next((n, word) for n, word in enumerate(command.words) if word.startswith("tgi-"))
    assert (ROOT / "docker" / f"{image.removeprefix('tgi-')}.Dockerfile").is_file()
    check_launcher(command, command.words[place + 1 :])


def check_pip(command: Command) -> None:
    assert command.words[1] == "install"
    project = (ROOT / "pyproject.toml").read_text()
    for word in command.words[2:]:
        assert word in ("-e", ".") or f'"{word}>=' in project


def check_hf(command: Command) -> None:
    assert command.words[1] == "download" and command.words[3] == "--local-dir"


def check_python(command: Command) -> None:
    """The one that is shown where it is needed, too."""
    assert command.text in explain_pickles("ORGANISATION/NAME")


def check_check(command: Command) -> None:
    parser = build_parser("tgi check", "")
    parser.add_argument("model", nargs="?")
    parser.parse_args(command.words[2:])


def check_server(command: Command) -> None:
    made_by = {"measure": measure_command, "quantize": quantize_command}[command.words[1]]
    made_by._build_parser(command.words[1]).parse_args(command.words[2:])


READ: dict[str, Callable[[Command], object]] = {
    "make": check_make,
    "docker": check_docker,
    "pip": check_pip,
    "hf": check_hf,
    "python": check_python,
    "text-generation-launcher": check_launcher,
    "text-generation-server": check_server,
    "text-generation-benchmark": lambda command: static_task.read_task(without_output(command.words[1:]), {}, "x"),
    "tgi check": check_check,
    "tgi ray": lambda command: read_ray_options(build_ray_parser().parse_args(command.words[2:])),
    "tgi bench offline": lambda command: offline_command.read_task(command.words[3:]),
    "tgi bench serve": lambda command: serve_command.read_task(command.words[3:]),
    "tgi bench report": lambda command: report_command.read_task(command.words[3:]),
}


PROGRAMS = {name.split()[0] for name in RUN | READ.keys()}


@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_a_block_says_what_it_is(block):
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "bash":
        assert [command.text for command in commands_of(block) if command.program not in RUN | READ.keys()] == []
    elif block.language == "text":  # what a program shows: no command hides there
        assert not any(line.split()[:1] and line.split()[0] in PROGRAMS for line in block.text.splitlines())
    else:
        assert block.language == "python"


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.program in READ], ids=name_of)
def test_a_command_is_understood(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()  # stands for a model folder
    (tmp_path / "h200").mkdir()
    for name in ("run.json", "gaudi.json", "h200/one.json"):
        (tmp_path / name).write_text("{}")
    if "conversations.json" in command.text:
        (tmp_path / "conversations.json").write_text('["What is gravity?"]')
    if "QUANT_CONFIG" in command.variables:
        (tmp_path / command.variables["QUANT_CONFIG"]).write_text("{}")
    READ[command.program](command)


def test_the_programs_of_the_docs_exist():
    table = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[1].split("[")[0]
    programs = {line.split("=")[0].strip() for line in table.strip().splitlines()}
    named = {command.words[0] for command in COMMANDS} - {"make", "docker", "pip", "curl", "cat", "hf", "python"}
    assert named <= programs
    for page in PAGES:
        assert set(re.findall(r"`(text-generation-[a-z]+)", page.read_text())) - {"text-generation-router"} <= programs
    for name in ("serve", "check", "download", "bench"):
        assert name in cli._OTHER_COMMANDS


def anchors_of(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", re.sub(r"`[^`\n]+`(?!\])", "", page.read_text())):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            assert found.is_file(), target
            assert not anchor or anchor in anchors_of(found), target


def test_files_that_the_docs_name_exist():
    """Paths of this repository, in backticks."""
    named = {
        path
        for page in PAGES
        for path in re.findall(r"`((?:tests|bench|docker|src|docs)/[\w./-]+\.\w+)(?: [^`]*)?`", page.read_text())
    }
    assert len(named) > 10 and [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def test_metrics_of_the_docs_are_those_of_the_server():
    api = ROOT / "src" / "text_generation_inference" / "api"
    source = "".join((api / name).read_text() for name in ("metrics.py", "picture_metrics.py", "encoded_series.py"))
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("observability.md", "buckets.md"))
    made = {*re.findall(r'"(tgi_[a-z_]+)"', source), *(f"tgi_replica_{name}" for name in replica_metrics.FAMILIES)}
    assert len(made) > 30 and made == {
        re.sub(r"_(bucket|sum)$", "", name) for name in re.findall(r"\b(tgi_[a-z_]+)", pages)
    }


# -- running -------------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(server, model_cache, tmp_path):
    """Runs a text as bash or python would, with our programs on the path and the server's port for 8080."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "tgi").write_text(f'#!/bin/sh\nexec {sys.executable} -m text_generation_inference.cli "$@"\n')
    (programs / "tgi").chmod(0o755)
    (tmp_path / "prompts.txt").write_text("The capital of France is\n2, 3, 5, 7,\n")

    def run(command: list[str], text: str) -> subprocess.CompletedProcess[str]:
        text = text.replace("localhost:8080", f"localhost:{server.port}")
        environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "TGI_CACHE_DIR": str(model_cache),
            "ADMIN_API_KEY": "no-key-of-this-server",
        }
        return subprocess.run(
            [*command, text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )

    return run


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=name_of)
def test_python_runs(shell, block):
    done = shell([sys.executable, "-c"], block.text)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 100


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.program == "curl"], ids=name_of)
def test_curl_runs(shell, command):
    done = shell(["bash", "-c"], command.text)
    assert done.returncode == 0, done.stderr
    if "_profile" in command.text:  # for administrators, whose key this server has not
        assert "ADMIN_API_KEY" in done.stdout
    else:
        lines = [line.removeprefix("data:").strip() for line in done.stdout.splitlines() if "event: " not in line[:7]]
        events = [json.loads(line) for line in lines if line not in ("", "[DONE]")]
        failed = [event for event in events if "error" in event and (isinstance(event, list) or event["error"])]
        assert events and not failed, done.stdout


def test_generate_runs(shell, tmp_path):
    """All lines in one test: each starts an engine."""
    lines = [command.text for command in COMMANDS if command.program in ("tgi generate", "cat")]
    assert len(lines) >= 3 and all("tgi generate" in line for line in lines)
    for line in lines:
        done = shell(["bash", "-c"], f"set -o pipefail; {line}")
        assert done.returncode == 0, done.stderr
        answer = done.stdout or (tmp_path / line.rpartition(">")[2].strip()).read_text()
        assert len(answer) > 20
