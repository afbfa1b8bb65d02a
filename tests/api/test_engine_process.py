"""The engine process and its client: real sockets, real model, real deaths."""

import asyncio
import gc
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from engine_process import SETTINGS, Process, collect, connected, make

from text_generation_inference.api.app import App
from text_generation_inference.api.generation import Generation
from text_generation_inference.api.http import HttpRequest
from text_generation_inference.api.service import Permit, Service
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.client import EngineClient
from text_generation_inference.errors import EngineError


@pytest.fixture(scope="module")
def engine(model_cache: Path) -> Iterator[Process]:
    process = Process(model_cache)
    process.wait_for_socket()
    yield process
    process.end()


def test_requests_of_two_clients_do_not_mix(engine: Process) -> None:
    async def run() -> None:
        one, facts = await connected(engine)
        two, _ = await connected(engine)
        assert (facts.vocab_size, facts.max_total_tokens) == (49152, 512)
        prompts = [[504, 3575, 282, 4649, 314], [1604, 3987, 24, 94, 727], [5]]
        alone = [(await collect(one, make(one, prompt, 12)))[0] for prompt in prompts]
        both = await asyncio.gather(
            *(collect(client, make(client, p, 12, top_n_tokens=2)) for client in (one, two) for p in prompts)
        )
        assert [tokens for tokens, _, _ in both] == alone * 2
        assert {(reason, tops) for _, reason, tops in both} == {("length", 24)}
        await one.close()
        await two.close()

    asyncio.run(run())


async def until_idle(client: EngineClient, num_free: int) -> None:
    for _ in range(100):
        load = client.load
        if load is not None and (load.num_running, load.num_waiting, load.num_free_blocks) == (0, 0, num_free):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the engine still holds something: {client.load}")


def test_leaving_a_stream_and_bad_requests(engine: Process) -> None:
    async def run() -> None:
        client, facts = await connected(engine)
        stream = client.submit(make(client, [5, 6, 7], 400))
        assert await stream.take()
        stream.abort()
        tokens, reason, _ = await collect(client, make(client, [5] * 600, 10))
        assert (tokens, reason) == ([], "refused")
        await until_idle(client, facts.num_blocks - 1)
        await client.close()

    asyncio.run(run())


def test_requests_of_a_dead_client_end(engine: Process) -> None:
    program = """
import asyncio, sys
from pathlib import Path
from text_generation_inference.engine.client import EngineClient
from text_generation_inference.types import GenerationRequest, SamplingParams
async def run():
    client = EngineClient(Path(sys.argv[1]))
    await client.connect()
    request = GenerationRequest(id=1, token_ids=[5], sampling=SamplingParams(), max_new_tokens=500, stop_token_ids=[], seed=0)
    await client.submit(request).take()
    print("token", flush=True)
    await asyncio.sleep(60)
asyncio.run(run())
"""

    async def run() -> None:
        client, facts = await connected(engine)
        other = subprocess.Popen([sys.executable, "-c", program, str(engine.socket)], stdout=subprocess.PIPE)
        assert other.stdout is not None
        assert other.stdout.readline() == b"token\n"
        other.kill()
        other.wait()
        await until_idle(client, facts.num_blocks - 1)
        await client.close()

    asyncio.run(run())


def test_death_of_the_engine_ends_every_stream(model_cache: Path) -> None:
    process = Process(model_cache)
    process.wait_for_socket()

    async def run() -> None:
        client, _ = await connected(process)
        streams = [asyncio.create_task(collect(client, make(client, [5 + n], 400))) for n in range(8)]
        await asyncio.sleep(0.3)
        process.process.send_signal(signal.SIGKILL)
        process.process.wait()
        client.fail(EngineError("the engine process was killed"))
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        with pytest.raises(EngineError, match="was killed"):
            await collect(client, make(client, [5], 3))
        assert client.num_in_flight == 0
        await client.close()

    asyncio.run(run())
    process.end()


def test_no_engine_at_all(tmp_path: Path) -> None:
    async def run() -> None:
        client = EngineClient(tmp_path / "absent.sock")
        with pytest.raises(EngineError, match="did not answer within 0.3 s"):
            await client.connect(0.3)
        await client.close()

    asyncio.run(run())


def test_a_model_that_cannot_start_says_why_in_one_line(model_cache: Path) -> None:
    process = Process(model_cache, model_id="/no/such/model")
    _, errors = process.process.communicate(timeout=60)
    assert process.process.returncode == 3
    assert errors.startswith("engine cannot start: ")
    assert errors.count("\n") == 1
    process.end()


def test_the_engine_ends_with_its_parent(model_cache: Path) -> None:
    """Even when the parent is killed with no chance to tidy up."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "engine.sock"
        program = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "text_generation_inference.engine", {str(socket)!r}], stdin=subprocess.PIPE)
child.stdin.write({json.dumps({"cache_dir": str(model_cache), **SETTINGS}).encode()!r})
child.stdin.close()
print(child.pid, flush=True)
time.sleep(60)
"""
        parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        end = time.monotonic() + 60
        while not socket.exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert stat.S_ISSOCK(socket.stat().st_mode)
        parent.kill()
        parent.wait()
        while Path(f"/proc/{child}").exists() and time.monotonic() < end:
            if "Z" in Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]:
                break  # dead; whoever adopted it has not asked yet
            time.sleep(0.05)
        else:
            assert not Path(f"/proc/{child}").exists()


def test_nothing_listens_on_a_network_port(engine: Process) -> None:
    inodes = {
        os.readlink(link)
        for link in (f"/proc/{engine.process.pid}/fd/{fd}" for fd in os.listdir(f"/proc/{engine.process.pid}/fd"))
        if os.path.islink(link)
    }
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{engine.process.pid}/net/{table}").read_text().splitlines()[1:]:
            assert f"socket:[{line.split()[9]}]" not in inodes


# -- the api's application in this process, on that engine ---------------------------------------------------------


class Answer:
    """What an application sent."""

    def __init__(self, leaves: bool) -> None:
        self.status, self.body = 0, b""
        self._leaves = leaves  # after the first piece
        self._gone = asyncio.Event()

    async def call(self, app: App, path: str, body: object) -> "Answer":
        bodies = [json.dumps(body).encode()]

        async def receive() -> MutableMapping[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        headers = [(b"content-type", b"application/json")]
        await app({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, self._send)
        await asyncio.sleep(0)  # for what was cancelled to end
        return self

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")
        if self.body and self._leaves:
            self._gone.set()


async def served(process: Process, folder: Path | None = None) -> tuple[EngineClient, App]:
    client, facts = await connected(process)
    if folder is not None:
        facts = msgspec.structs.replace(facts, folder=str(folder))
    service = Service(ServerConfig(disable_grammar_support=True), facts)
    service.attach(client, facts)
    return client, App(service)


def test_requests_leave_no_cycles_behind(engine: Process) -> None:
    """A cycle of references, with all that it holds, would stay until a collection that may be hours away."""

    def count() -> Counter[type]:
        kinds = Generation, HttpRequest, Permit
        return Counter(type(thing) for thing in gc.get_objects() if type(thing) in kinds)

    async def run() -> None:
        client, app = await served(engine)
        text = {"inputs": "Once", "parameters": {"max_new_tokens": 3}}
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        gc.collect()
        gc.disable()
        try:
            for path, body in (("/generate", text), ("/generate_stream", text), ("/v1/chat/completions", chat)):
                answer = await Answer(leaves=False).call(app, path, body)
                assert answer.status == 200 and answer.body
            await Answer(leaves=True).call(app, "/generate_stream", {"inputs": "Once"})
            refused = await Answer(leaves=False).call(app, "/generate", {**text, "parameters": {"temperature": -1}})
            assert refused.status == 422
            assert count() == {}
        finally:
            gc.enable()
        await client.close()

    asyncio.run(run())


def test_text_that_the_tokenizer_has_no_token_for(engine: Process, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"known": 0, "words": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))

    async def run() -> None:
        client, app = await served(engine, tmp_path)
        for path in ("/generate", "/generate_stream", "/tokenize", "/v1/completions"):
            for text, status in (("known others", 400 if path.startswith("/v1") else 422), ("known words", 200)):
                native = {"inputs": text, "parameters": {"max_new_tokens": 2}}
                body = {"prompt": text, "max_tokens": 2} if path.startswith("/v1") else native
                answer = await Answer(leaves=False).call(app, path, body)
                assert answer.status == (200 if path == "/generate_stream" else status)  # a stream has begun by then
                name = b"prompt" if path.startswith("/v1") else b"inputs"
                expected = b"tokenizer error `%s` holds text that this model's tokenizer cannot encode" % name
                told = expected in answer.body
                assert (b'"param":"prompt"' in answer.body) == (told and path.startswith("/v1"))
                assert told == (status != 200) == (b"error" in answer.body), answer.body
        await client.close()

    asyncio.run(run())
