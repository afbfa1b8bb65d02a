"""Model folders that somebody has tampered with: each ends a start quickly, in one clear line, before it costs anything.

All of them in one program of its own with little memory, because what a defect would do here is hang, or take it all.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from model_folders import FOLDERS, make_sound, panicking_tokenizer
from serving import Server

from text_generation_inference.errors import ValidationError
from text_generation_inference.launch.check import main as check_command
from text_generation_inference.text.tokenizer import Tokenizer

EACH_S = 20  # seconds; those that are refused take milliseconds

# Starts and checks each folder; for each one line of JSON with the errors and the seconds of both.
PROGRAM = r"""
import faulthandler, json, resource, signal, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
import torch
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import start_engine
from text_generation_inference.engine.warm_up import warm_up
from text_generation_inference.errors import TgiError
from text_generation_inference.launch.check import check_model
from text_generation_inference.text.tokenizer import Tokenizer
torch.set_num_threads(1)

def start(folder):
    config = ServerConfig(model_id=folder, device="cpu", custom_kernels=False, max_batch_total_tokens=512, cache_dir=sys.argv[1])
    config.check()
    engine = start_engine(config)
    try:
        warm_up(engine)
        Tokenizer.load(engine.folder)  # as the api process does then
    finally:
        engine.close()

def check(folder):
    report = check_model(ServerConfig(model_id=folder, device="cpu", custom_kernels=False, cache_dir=sys.argv[1]))
    if report.problems:
        raise TgiError("\n".join(report.problems))

def too_long(number, frame):
    raise TimeoutError
signal.signal(signal.SIGALRM, too_long)
for folder in sys.argv[3:]:
    said = {"name": Path(folder).name}
    for run in (start, check):
        begun = time.monotonic()
        signal.alarm(int(sys.argv[2]))
        try:
            run(folder)
            said[run.__name__] = ""
        except TgiError as error:
            said[run.__name__] = str(error)
        except BaseException as error:
            said[run.__name__] = f"{type(error).__name__}: {error}"[:2000]
        signal.alarm(0)
    print(json.dumps(said), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("tampered")
    folders: list[str] = []
    for number, (name, (tamper, _)) in enumerate([("sound", (lambda folder: None, "")), *FOLDERS.items()]):
        folder = make_sound(root / str(number) / name)
        tamper(folder)
        folders.append(str(folder))
    command = [sys.executable, "-c", PROGRAM, str(root / "cache"), str(EACH_S), *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(folders), f"after {found[-1:]}: {done.stderr[-3000:]}"
    return {said["name"]: said for said in found}


def test_the_sound_one_starts(outcomes: dict[str, dict[str, Any]]) -> None:
    assert (outcomes["sound"]["start"], outcomes["sound"]["check"]) == ("", "")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_start_ends_in_one_clear_line(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    error = outcomes[name]["start"]
    assert FOLDERS[name][1] in error
    assert "\n" not in error and len(error) < 600


@pytest.mark.parametrize(
    "name", [name for name in FOLDERS if "weights" not in name or "not finite" not in FOLDERS[name][1]]
)
def test_check_says_the_same(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    """But for what only computing can tell."""
    error = outcomes[name]["check"]
    words = FOLDERS[name][1]
    if words.startswith("has shape"):
        words = "has shape"
    assert words in error, outcomes[name]
    assert "\n" not in error and len(error) < 600


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a" * 5000, "`model_id` has 5000 bytes, and no name or path has more than 4096"),
        ("org/" + "a" * 300, "`model_id` has a name of 300 bytes in it"),
        ("a\0b", "`model_id` holds control characters"),
        ("a\x1b[31mb", "`model_id` holds control characters"),
        ("x/" * 1500, "not found: there is no such file or folder"),
        ("~nobody-of-that-name/model", "nothing says where that home folder is"),
    ],
)
def test_names_that_can_be_no_model(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_command([name]) != 0
    out, error = capsys.readouterr()
    lines = [line for line in (out + error).splitlines() if words in line]
    assert len(lines) == 1 and len(lines[0]) < 600


# A container's user: a number that no file knows, without a home.
NOBODY = r"""
import os, sys
import torch
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import start_engine
from text_generation_inference.engine.warm_up import warm_up
from text_generation_inference.errors import StartError
os.setgroups([])
os.setgid(54321)
os.setuid(54321)
os.environ.pop("HOME", None)
os.environ.pop("XDG_CACHE_HOME", None)
torch.set_num_threads(1)
for cache in sys.argv[2:]:
    try:
        engine = start_engine(ServerConfig(model_id=sys.argv[1], device="cpu", max_batch_total_tokens=512, cache_dir=cache))
        warm_up(engine)
        engine.close()
        print("started")
    except StartError as error:
        print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without an entry in passwd")
def test_a_user_without_home_or_passwd_entry(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:  # which others may enter, unlike that of pytest
        Path(name).chmod(0o755)
        folder = make_sound(Path(name) / "model")
        for path in folder.iterdir():
            path.chmod(0o644)
        cache = Path(name) / "cache"
        cache.mkdir(mode=0o777)
        cache.chmod(0o777)
        command = [sys.executable, "-c", NOBODY, str(folder), "", str(cache)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    without, with_cache = done.stdout.splitlines()
    assert "`cache_dir`: ~/.cache cannot be found" in without and "Set HOME" in without
    assert with_cache == "started"


def test_the_launcher_ends_with_that_line(tmp_path: Path, model_cache: Path) -> None:
    """As a user has it: no traceback, a status that says so."""
    folder = make_sound(tmp_path / "NaN weights")
    FOLDERS["NaN weights"][0](folder)
    server = Server("--model-id", str(folder), "--max-batch-total-tokens", "512", wait=False, cache=model_cache)
    assert server.process.wait(60) != 0
    server.stop()
    errors = [line for line in server.lines if "ERROR" in line]
    assert len(errors) == 1 and "the model produced scores that are not finite" in errors[0], server.log
    assert "Traceback" not in server.log


def test_a_panic_of_the_tokenizer_while_serving(tmp_path: Path, model_cache: Path) -> None:
    """A 4xx that names the field, for texts that are worked on beside the event loop too; others do not notice."""
    folder = make_sound(tmp_path / "model")
    panicking_tokenizer(folder)
    server = Server("--model-id", str(folder), "--max-batch-total-tokens", "512", cache=model_cache)
    with server.client() as client:
        for text in ("X" * 30, "X" * 3000):
            answer = client.post("/generate", json={"inputs": text, "parameters": {"max_new_tokens": 1}})
            assert answer.status_code == 422 and "`inputs` holds text" in answer.json()["error"], answer.text
            answer = client.post("/tokenize", json={"inputs": text})
            assert answer.status_code == 422 and "`inputs` holds text" in answer.json()["error"], answer.text
            answer = client.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
            assert answer.status_code == 400, answer.text
        answer = client.post("/generate", json={"inputs": "XY", "parameters": {"max_new_tokens": 1}})
        assert answer.status_code == 200, answer.text
    assert server.stop() == 0
    assert "Traceback" not in server.log


def test_a_panic_of_the_tokenizer_is_the_texts_fault(tmp_path: Path) -> None:
    folder = make_sound(tmp_path / "model")
    panicking_tokenizer(folder)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("XY")
    with pytest.raises(ValidationError, match="`inputs` holds text that this model's tokenizer cannot encode"):
        tokenizer.encode("X" * 30)
    with pytest.raises(ValidationError, match="cannot encode"):
        tokenizer.encode_with_offsets("X" * 30)
    assert tokenizer.encode("XY")
