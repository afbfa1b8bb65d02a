"""Runs the device suite on Gaudi cards and writes a report to send us: `make test-hpu`.

A card serves one process at a time, so every part runs in a process of its own and this one never touches a card. The
report tells what works and what was compiled after warm-up, and answers the open questions of docs/gaudi.md, by number.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

from hpu_questions import FROM_SUITE, QUESTIONS

ROOT = Path(__file__).parents[2]
REPORT = Path("hpu-report.txt")
SUITE = ["tests/devices/test_hpu.py", "tests/devices/test_bucketed.py", "tests/devices/test_hpu_pictures.py"]
ALONE = ["tests/devices/test_hpu_alone.py"]  # each engine in a process of its own, which has the card for itself
SPLIT = "test_two_cards_give_the_tokens_of_one"
NEEDED = [
    "torch",
    "msgspec",
    "numpy",
    "PIL",
    "tokenizers",
    "safetensors",
    "llguidance",
    "pytest",
    "hypothesis",
    "transformers",
]
PACKAGES = ["torch", "habana-torch-plugin", "habana-torch-dataloader", "transformers", "numpy"]
TIMEOUT_S = 7200
NOT_AN_ANSWER = "emulated, not an answer: "

NAME_CARD = """
from text_generation_inference.devices.hpu import HpuDevice, HpuSettings
device = HpuDevice(HpuSettings())
print(device.description, "| FP8 up to", device.fp8_max, "|", device.bridge.torch_hpu.device_count(), "cards seen")
"""

ADD_UP = """
import importlib, os, torch, torch.distributed as dist
from text_generation_inference.kernels.hpu.bridge import load_bridge
bridge = load_bridge()
hccl = importlib.import_module("habana_frameworks.torch.distributed.hccl")
world, rank, _ = hccl.initialize_distributed_hpu()
dist.init_process_group("gloo" if bridge.emulated else "hccl", rank=rank, world_size=world)
numbers = torch.full((4,), float(rank + 1)).to(bridge.device)
bridge.mark_step()  # before a collective
dist.all_reduce(numbers)
bridge.synchronize()
assert numbers.cpu().tolist() == [3.0] * 4, numbers
given = torch.rand(1000, generator=torch.Generator().manual_seed(rank))
sums = []
for _ in range(5):
    part = given.to(bridge.device)
    bridge.mark_step()
    dist.all_reduce(part)
    bridge.synchronize()
    sums.append(part.cpu())
assert all(torch.equal(each, sums[0]) for each in sums), "sums differ from time to time"
print("sum over 2 ranks is right")
dist.destroy_process_group()
"""


@dataclass
class Result:
    name: str
    outcome: str  # passed, failed, skipped
    why: str = ""
    late: int | None = None  # compiled after warm-up


def run(program: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """What a program said. One that hangs, as a card may, is ended and reported like one that failed."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        return subprocess.run(
            program,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace") + (error.stderr or b"").decode(errors="replace")
        return subprocess.CompletedProcess(program, 124, "", f"{said}\nno end within {TIMEOUT_S} s")


def describe_machine() -> list[str]:
    lines = [f"python {platform.python_version()}, {platform.platform()}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package}: not installed under this name")
    if shutil.which("hl-smi"):
        done = run(["hl-smi", "--query-aip=name,driver_version,memory.total", "--format=csv"])
        lines += [f"hl-smi: {line}" for line in (done.stdout or done.stderr).splitlines()]
    else:
        lines.append("hl-smi: not found")
    kept = sorted(name for name in os.environ if name.startswith(("PT_", "HABANA_", "HLS_", "EMULATED_")))
    return lines + [f"{name}={os.environ[name]}" for name in kept]


def run_suite(files: list[str], lazy: bool) -> list[Result]:
    """Every test, in one process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            *files,
            "--device",
            "hpu",
            "-q",
            "-o",
            "timeout=3600",
            f"--junitxml={file}",
        ]
        done = run(command, PT_HPU_LAZY_MODE="1" if lazy else "0")
        if not file.exists():
            return [Result("the suite", "failed", (done.stdout + done.stderr).strip()[-1500:])]
        return [read_case(case) for case in ElementTree.parse(file).iter("testcase")]


def read_case(case: ElementTree.Element) -> Result:
    result = Result(f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}", "passed")
    for found in case.iter():
        if found.tag in ("failure", "error"):
            result.outcome, result.why = "failed", (found.get("message") or found.text or "").strip()[:1500]
        elif found.tag == "skipped":
            result.outcome, result.why = "skipped", found.get("message") or ""
        elif found.tag == "property" and found.get("name") == "compiled_after_warm_up":
            result.late = int(found.get("value") or 0)
    return result


def add_up_on_two_cards() -> Result:
    name = "two cards add up"
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541", "PT_HPU_ENABLE_LAZY_COLLECTIVES": "true"}  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ADD_UP],
            env={**environment, **common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said: list[str] = []
    for process in ranks:
        try:
            said.append(process.communicate(timeout=600)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            said.append("no answer within 10 minutes\n" + process.communicate()[0])
    if all(process.returncode == 0 for process in ranks):
        return Result(name, "passed")
    return Result(name, "failed", "\n".join(said)[-1500:])


def describe(title: str, results: list[Result]) -> tuple[list[str], bool]:
    """Lines of the report about one part, and whether it went well: what was skipped altogether has not passed."""
    late = [result.late for result in results if result.late is not None]
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in ("passed", "failed", "skipped")}  # fmt: skip
    lines = ["", f"{title}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())]
    if late:
        lines.append(f"compiled after warm-up: {sum(late)} in {len(late)} engines")
    for result in results:
        lines.append(f"  {result.outcome:8} {result.name}" + ("" if result.late is None else f" (late: {result.late})"))
        if result.outcome == "failed":
            lines += [f"    | {line}" for line in result.why.splitlines()]
        elif result.outcome == "skipped":
            lines.append(f"    {result.why}")
    return lines, counts["failed"] == 0 and not any(late) and (counts["passed"] > 0 or len(results) == 1)


def answer_questions(
    emulated: bool, pair: Result, lazy: list[Result], eager: list[Result], alone: list[Result]
) -> list[str]:
    """Every open question by its number. What the stand-in says is no answer."""
    lines = ["", "Open questions of docs/gaudi.md"]
    for number, question in QUESTIONS.items():
        if number in FROM_SUITE:
            said = from_suite(number, pair, lazy, eager, alone)
        else:
            done = run([sys.executable, str(Path(__file__).with_name("hpu_probes.py")), str(number)])
            told = (done.stdout.strip() or "nothing was said").splitlines()[-1]
            said = told if done.returncode == 0 else f"the probe failed: {done.stderr.strip()[-500:]}"
        lines += [f"  {number}. {question}", f"     {NOT_AN_ANSWER if emulated else ''}{said}"]
    return lines


def from_suite(number: int, pair: Result, lazy: list[Result], eager: list[Result], alone: list[Result]) -> str:
    """Answers that tests have given already."""

    def told(results: list[Result]) -> str:
        failed = sum(result.outcome == "failed" for result in results)
        return f"{sum(result.outcome == 'passed' for result in results)} passed, {failed} failed"

    split = next((each for each in alone if each.name.endswith(SPLIT)), Result(SPLIT, "not run"))
    late = [sum(result.late or 0 for result in results) for results in (lazy, eager)]
    return {
        1: f"{late[0]} in lazy mode, {late[1]} without, were compiled after warm-up",
        10: f"{pair.outcome} {pair.why}".strip(),
        14: f"in lazy mode {told(lazy)}; without {told(eager)}",
        15: f"without lazy mode {told(eager)}",
        18: f"{split.outcome} {split.why}".strip(),
    }[number]


def write(lines: list[str]) -> None:
    body = "\n".join(lines) + "\n"
    digest = hashlib.sha256(body.encode()).hexdigest()
    REPORT.write_text(f"{body}sha256 of all lines above: {digest}\n")
    print(REPORT.read_text())


def missing_packages() -> list[str]:
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def main() -> int:
    if missing := missing_packages():
        print(
            f"{sys.executable} lacks {', '.join(missing)}. Install this project and its test packages beside Intel's"
            " software, whose torch and NumPy stay as they are:\n"
            "  python3 docker/runtime_requirements.py --without-torch --for-tests > packages.lock\n"
            "  python3 -m pip install --require-hashes --no-deps -r packages.lock\n"
            "  python3 -m pip install --no-deps --no-build-isolation -e .\n"
            "or name another Python: make test-hpu PYTHON=...",
            file=sys.stderr,
        )
        return 2
    lines = ["Report of the device suite on Gaudi", "", *describe_machine(), ""]
    card = run([sys.executable, "-c", NAME_CARD], PT_HPU_LAZY_MODE="1")
    if card.returncode:
        write([*lines, "No card could be used:", card.stderr.strip()[-1500:]])
        return 1
    emulated = "hpu (emulated)" in card.stdout
    lines += [card.stdout.strip()]
    if emulated:
        lines.append("This is the stand-in for Intel's software, hpu (emulated): it proves nothing about a card.")
    failed = False
    several = emulated or " 1 cards seen" not in card.stdout
    pair = add_up_on_two_cards() if several else Result("two cards add up", "skipped", "one card")
    lazy, eager = run_suite(SUITE, lazy=True), run_suite(SUITE, lazy=False)
    alone = run_suite(ALONE, lazy=True)
    parts = [("Ranks", [pair]), ("Lazy mode, HPU graphs", lazy), ("Eager mode, torch.compile", eager)]
    for title, results in (*parts, ("Engines in processes of their own, FP8, two cards", alone)):
        described, is_well = describe(title, results)
        lines += described
        failed |= not is_well
    lines += answer_questions(emulated, pair, lazy, eager, alone)
    lines += ["", "Something failed: please send this file." if failed else "All passed: please send this file."]
    write(lines)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
