"""The launcher in a process of its own, on an address that its owner holds: the child of a replica's actor.

    python -m text_generation_inference.ray_serve.launcher_process DESCRIPTOR [FLAGS of the launcher]

The owner has bound the socket and knows the port; nobody listens before the model is ready. The kernel ends this
process with its owner, and with it engine and api process.
"""

import socket
import sys

from text_generation_inference.engine.parent import end_with_parent
from text_generation_inference.launch import command


def main() -> int:
    end_with_parent()
    listener = socket.socket(fileno=int(sys.argv[1]))
    return command.main(sys.argv[2:], prog="tgi ray", listener=listener)


if __name__ == "__main__":
    sys.exit(main())
