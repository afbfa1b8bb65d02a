"""The engine process as a program: the SOCKET as its argument, the `ServerConfig` as JSON on standard input. See
`process`."""

import sys

import msgspec

from text_generation_inference.collection import pause_collection
from text_generation_inference.config import ServerConfig
from text_generation_inference.devices.visible import begin_early
from text_generation_inference.engine.parent import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before torch, which takes long to import
    pause_collection()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerConfig)
    begin_early(config.device, config.num_shard or 1)
    from text_generation_inference.engine.process import run

    run(config)
