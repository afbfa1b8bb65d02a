"""An engine without a model: speaks the real protocol and emits one token per request and step, at a given pace.

    python bench/engine_double.py SOCKET MODEL_FOLDER TIMES_FILE NUM_STREAMS

Once NUM_STREAMS requests have come it emits their tokens in steps; the seconds between two steps are the `seed` of the
requests in nanoseconds (0: as fast as it can), or the first number of TIMES_FILE if that is not 0 (below 0: as fast as
it can), for APIs without a seed. The time each step is sent goes to TIMES_FILE, an array of doubles.
"""

import mmap
import struct
import sys
import time
from pathlib import Path

import msgspec
import zmq

from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import Abort, Finish, Hello, ModelFacts, Ready, Submit, ToEngine, TokenOut

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(ToEngine).decode


def facts(folder: str) -> ModelFacts:
    return ModelFacts(
        model_id="double",
        dtype="float32",
        vocab_size=Tokenizer.load(folder).vocab_size,
        max_input_tokens=8191,
        max_total_tokens=8192,
        num_blocks=100_000,
        block_size=16,
        device="none",
        folder=folder,
    )


def main() -> None:
    path, folder, times_path, num_streams = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    tokenizer = Tokenizer.load(folder)
    words = tokenizer.encode(Path(__file__).read_text(), add_special_tokens=False)
    with open(times_path, "r+b") as file:
        times = mmap.mmap(file.fileno(), 0)
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.bind(f"ipc://{path}")
    print("ready", flush=True)
    waiting: list[Submit] = []
    while True:
        address, payload = socket.recv_multipart()
        match decode(payload):
            case Hello():
                socket.send_multipart([address, encode(Ready(facts(folder)))])
            case Submit() as submit:
                waiting.append(submit)
            case Abort():
                pass
        if len(waiting) == num_streams:
            emit(socket, address, waiting, words, times)
            waiting = []


def emit(socket, address: bytes, submits: list[Submit], words: list[int], times: mmap.mmap) -> None:
    ids = [submit.request.id for submit in submits]
    steps = submits[0].request.max_new_tokens
    (given,) = struct.unpack_from("d", times, 0)
    pause = max(0.0, given) if given else submits[0].request.seed / 1e9
    logprobs = [-0.125 - number / 1000 for number in range(len(ids))]
    due = time.monotonic() + 0.05
    for step in range(1, steps + 1):
        while (left := due - time.monotonic()) > 0:
            time.sleep(left)
        due = max(due, time.monotonic() - 0.05) + pause
        tokens = [words[(step + number) % len(words)] for number in range(len(ids))]
        finished = [Finish(i, "length", None, 0, 0, 0) for i in ids] if step == steps else []
        struct.pack_into("d", times, 8 * step, time.monotonic())
        socket.send_multipart([address, encode(TokenOut(ids, tokens, logprobs, [], [], finished))])


if __name__ == "__main__":
    main()
