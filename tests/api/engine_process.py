"""An engine process for tests, and requests to it."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from text_generation_inference.engine.client import EngineClient
from text_generation_inference.types import GenerationRequest, ModelFacts, SamplingParams

SETTINGS = {"max_batch_total_tokens": 2048, "max_total_tokens": 512}


class Process:
    """An engine process in a private folder."""

    def __init__(self, cache: Path, **settings: object) -> None:
        self.folder = tempfile.TemporaryDirectory()  # short path: a unix socket's is limited
        self.socket = Path(self.folder.name) / "engine.sock"
        command = [sys.executable, "-m", "text_generation_inference.engine", str(self.socket)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"cache_dir": str(cache), **SETTINGS, **settings}))
        self.process.stdin.close()
        self.process.stdin = None

    def wait_for_socket(self) -> None:
        end = time.monotonic() + 60
        while not self.socket.exists():
            assert self.process.poll() is None, "the engine ended"
            assert time.monotonic() < end
            time.sleep(0.05)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def make(client: EngineClient, tokens: list[int], new: int, **params: object) -> GenerationRequest:
    return GenerationRequest(
        id=client.next_id(),
        token_ids=tokens,
        sampling=SamplingParams(**params),
        max_new_tokens=new,
        stop_token_ids=[],
        seed=1,
    )


async def collect(client: EngineClient, request: GenerationRequest) -> tuple[list[int], str, int]:
    tokens: list[int] = []
    reason, num_tops = "", 0
    stream = client.submit(request)
    while not reason:
        for event in await stream.take():
            if event.token_id is not None:
                tokens.append(event.token_id)
            num_tops += len(event.top_tokens)
            if event.finish is not None:
                reason = event.finish.reason
    return tokens, reason, num_tops


async def connected(process: Process) -> tuple[EngineClient, ModelFacts]:
    client = EngineClient(process.socket)
    return client, await client.connect(60)
