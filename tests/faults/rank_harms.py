"""A server of two ranks under load, and everything that can happen to one of them. For test_ranks.py, which does each
once, and bench/rank_faults.py, which does each as often as you like.

Every harm is followed by the same checks: open streams end with a typed error in time, the log names the rank, the
server comes back by itself with the answer that it gave before, and nothing is left of the ranks that were.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import numpy as np
from safetensors.numpy import save_file
from serving import NO_TLS, Server
from traffic import DONE, Event, chat, client_of, is_gone, open_files, start_lasting

from text_generation_inference.config import ServerConfig
from text_generation_inference.weights.source import find_model

LIMIT_S = 4.0  # what the server calls a hang: far above a step's time here
# Six failures in a row, none of them a minute after the one before, end the launcher, which is right; here there are more.
PATIENT = (
    "import sys\n"
    "from text_generation_inference.launch import child, command\n"
    "child._GOOD_RUN_S = 0.0\n"
    "sys.exit(command.main())\n"
)
PROMPT = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 12, "details": True}}


@dataclass(frozen=True)
class Harm:
    words: str
    what: str | signal.Signals  # a fault at the place of a step's computation, or a signal
    within_s: float  # that streams end
    logged: dict[int, str]  # by rank: what the log says


_HUNG = r"rank {} hung: \d+ s in a step"
_LACKS = "rank {}: failpoint engine.compute: can't allocate memory: in the middle of a step"
HARMS = {
    "kill": Harm(
        "kill -9",
        signal.SIGKILL,
        3.0,
        {0: "the engine process was killed by SIGKILL", 1: "rank 1 was killed by SIGKILL"},
    ),
    "stop": Harm(
        "SIGSTOP",
        signal.SIGSTOP,
        LIMIT_S + 4.0,
        {0: "the engine process .*stopped", 1: _HUNG.format(1)},
    ),
    "raise": Harm(
        "an exception in a step",
        "raise@1",
        4.0,
        {0: "rank 0: failpoint engine.compute", 1: "rank 1: failpoint engine.compute"},
    ),
    "memory": Harm(
        "out of memory in a step, on this rank alone",
        "memory@1",
        8.0,
        {0: _LACKS.format(0), 1: _LACKS.format(1)},
    ),
    "hang": Harm(
        "stuck in a step, the other rank in a sum",
        "hang@1",
        LIMIT_S + 4.0,
        {0: _HUNG.format(0), 1: _HUNG.format(1)},
    ),
}


def make_tiny(folder: Path) -> Path:
    """A Llama of two layers with random weights and the embedded model's tokenizer: it starts in little time."""
    embedded = find_model(ServerConfig()).path
    config = json.loads((embedded / "config.json").read_text())
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
    config.update(sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], 64), "model.norm.weight": (64,)}
    for layer in (f"model.layers.{number}." for number in range(2)):
        shapes |= {f"{layer}{name}_layernorm.weight": (64,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (64, 64) for name in "qo"}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (32, 64) for name in "kv"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (128, 64) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (64, 128)
    random = np.random.default_rng(0)
    tensors = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, folder)
    return folder


@dataclass
class Outcome:
    error_s: float  # until the last stream had its error
    back_s: float  # until the right answer to a new request
    error: str  # what a client was told


class RankVictim:
    """A server of two ranks, its faults, and what it had before anything happened to it."""

    def __init__(self, folder: Path, *arguments: str, cache: Path | None = None, slack_s: float = 0.0) -> None:
        self.folder = folder / "tmp"
        self.folder.mkdir()
        self._slack_s = slack_s  # for a loaded machine
        self._faults = folder / "faults"
        self._faults.touch()
        self.server = Server(
            *("--device", "cpu", "--num-shard", "2", "--step-timeout-s", str(LIMIT_S)),
            *("--max-total-tokens", "1024", "--max-batch-total-tokens", "32768", *arguments),
            program=("-c", PATIENT),
            cache=cache,
            TMPDIR=str(self.folder),
            TGI_FAILPOINTS=f"@{self._faults}",
        )
        self._expected = self._greedy()
        httpx.post(self.server.url + chat("Hi", 2)[0], json=chat("Hi", 2)[1], timeout=60, verify=NO_TLS)
        self._shared_memory: set[str] = set()  # files there that our processes had
        self._before = self._state()

    def pid_of(self, rank: int) -> int:
        engine = self.server.children()["engine"]
        return engine if rank == 0 else _children(engine)[rank - 1]

    def rss_kb(self) -> int:
        """Of the launcher."""
        text = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1])

    def harm(self, kind: str, rank: int) -> Outcome:
        """Once, under load, with all checks."""
        harm = HARMS[kind]
        pids = [self.pid_of(0), self.pid_of(1)]
        log_start = len(self.server.lines)
        begin, error_s, streams, whole = asyncio.run(self._harm_under_load(harm, rank))
        error = _check_typed(streams, whole)
        assert error_s < harm.within_s + self._slack_s, f"streams ended after {error_s:.1f} s"
        self.server.wait_for(self._serves, "the engine's return", 120)
        assert self._greedy() == self._expected
        back_s = time.monotonic() - begin
        logged = "\n".join(self.server.lines[log_start:])
        assert re.search(harm.logged[rank], logged), logged
        assert "Traceback" not in logged, logged
        self.server.wait_for(lambda: all(map(is_gone, pids)), "the end of the ranks that were", 5)
        self._wait_until_as_before()
        return Outcome(error_s, back_s, error)

    def recover(self) -> None:
        """After a check that has failed: without faults, until it serves."""
        self._faults.write_text("")
        self.server.wait_for(self._serves, "the engine's return", 120)

    def stop(self) -> None:
        assert self.server.stop() == 0, self.server.log[-3000:]
        assert not _marked(self.folder) and not [*self.folder.iterdir()] and not self._left_in_shared_memory()

    # -- under load ------------------------------------------------------------------------------------------------

    async def _harm_under_load(
        self, harm: Harm, rank: int
    ) -> tuple[float, float, list[list[Event]], list[httpx.Response]]:
        async with client_of(self.server.url) as client:
            streams, whole = await start_lasting(client)
            self._left_in_shared_memory()  # what the ranks have there now
            begin = time.monotonic()
            if isinstance(harm.what, signal.Signals):
                os.kill(self.pid_of(rank), harm.what)
            else:
                self._faults.write_text(f"{rank}:engine.compute={harm.what}")
            await asyncio.wait([*streams, *whole], timeout=60)
            error_s = time.monotonic() - begin
            self._faults.write_text("")
            return begin, error_s, [task.result() for task in streams], [task.result() for task in whole]

    def _greedy(self) -> list[int]:
        answer = httpx.post(self.server.url + "/generate", json=PROMPT, timeout=60, verify=NO_TLS)
        assert answer.status_code == 200, answer.text
        return [token["id"] for token in answer.json()["details"]["tokens"]]

    def _serves(self) -> bool:
        return httpx.get(self.server.url + "/health", timeout=5, verify=NO_TLS).status_code == 200

    # -- what is left ----------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, object]:
        """What must be as it was: processes by kind, open files of those that live on, files, shared memory."""
        server, children = self.server, self.server.children()
        return {
            "processes": _marked(self.folder),
            "files": sorted(
                re.sub(r"\d+", "#", str(path.relative_to(self.folder)).split("/", 1)[-1])
                for path in self.folder.rglob("*")
            ),
            "launcher": _kinds_of_files(server.process.pid),
            "api": _kinds_of_files(children["api"]) if "api" in children else [],
            "shared memory": self._left_in_shared_memory(),
            "requests": server.metrics()["tgi_requests_in_flight"],
        }

    def _wait_until_as_before(self) -> None:
        end = time.monotonic() + 10
        while (now := self._state()) != self._before:
            changed = [f"{name}: {was} -> {now[name]}" for name, was in self._before.items() if now[name] != was]
            assert time.monotonic() < end, "; ".join(changed)
            time.sleep(0.1)

    def _left_in_shared_memory(self) -> list[str]:
        """What our processes had there, and nobody has any more; others use this machine too."""
        held: set[str] = set()
        for process in _marked_processes(self.folder):
            with suppress(OSError):
                held.update(os.readlink(fd) for fd in (process / "fd").iterdir())
                held.update(line.split()[-1] for line in (process / "maps").read_text().splitlines())
        self._shared_memory |= {name for name in held if name.startswith("/dev/shm/")}
        return sorted(name for name in self._shared_memory - held if Path(name).exists())


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for task in tasks for child in task.read_text().split())


def _marked_processes(folder: Path) -> list[Path]:
    """Every living process with this TMPDIR, whoever started it, and whoever has adopted it."""
    mark = f"TMPDIR={folder}".encode()
    found: list[Path] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0") and not is_gone(int(process.name)):
                found.append(process)
    return found


def _marked(folder: Path) -> list[str]:
    """What they run."""
    found: list[str] = []
    for process in _marked_processes(folder):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes().split(b"\0")
            found.append(command[2].decode() if len(command) > 2 else process.name)
    return sorted(found)


def _kinds_of_files(pid: int) -> list[str]:
    """That are open; connections of clients that end are not counted."""
    return sorted(re.sub(r"\d+", "#", name) for name in open_files(pid) if not name.startswith("socket:"))


def _check_typed(streams: list[list[Event]], whole: list[httpx.Response]) -> str:
    """Every request has ended with an error in its API's own form; what the native ones were told."""
    for number, events in enumerate(streams):
        if number % 2:
            assert events[-1].get("error_type") == "generation", events[-1]
        else:
            assert events[-2]["error"]["type"] == "server_error", events[-2:]
            assert events[-1] is DONE
    whole_native, whole_chat = whole
    assert (whole_native.status_code, whole_native.json()["error_type"]) == (424, "generation"), whole_native.text
    assert (whole_chat.status_code, whole_chat.json()["error"]["type"]) == (500, "server_error"), whole_chat.text
    return streams[1][-1]["error"]
