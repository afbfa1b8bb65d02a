"""The command `text-generation-launcher`, which is also `tgi serve`.

Reads arguments, says what has no effect, and hands over to the supervisor. Loads nothing heavy, so that help
and mistakes come at once.
"""

import logging
import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import metadata

from text_generation_inference.config import hub_token
from text_generation_inference.errors import TgiError
from text_generation_inference.launch.arguments import Launch, build_parser, read_arguments
from text_generation_inference.version import __version__

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "llguidance", "uvicorn")

log = logging.getLogger("text_generation_inference.launch")


def main(
    arguments: Sequence[str] | None = None,
    prog: str = "text-generation-launcher",
    listener: socket.socket | None = None,
) -> int:
    """Serve until told to stop; the exit status. `listener`: bound already, in place of host and port."""
    try:
        parser = build_parser(prog, "Serve a language model over HTTP.")
        launch = read_arguments(parser.parse_args(arguments), os.environ)
    except TgiError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if launch.local_rank > 0:
        print(f"LOCAL_RANK={launch.local_rank}: this machine's ranks are started by LOCAL_RANK=0", file=sys.stderr)
        return 0
    return run_guarded(lambda: _serve(launch, listener))


def run_guarded(run: Callable[[], int]) -> int:
    """Run a command; what goes wrong becomes one line and an exit status."""
    try:
        return run()
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; nothing more to say to it
        return EXIT_ERROR
    except (TgiError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _serve(launch: Launch, listener: socket.socket | None) -> int:
    from text_generation_inference.api.logs import configure_logging
    from text_generation_inference.launch.supervisor import serve

    config = launch.config
    secrets = (config.api_key, config.admin_api_key, config.ngrok_authtoken, config.rank_token, hub_token())
    configure_logging(config.log_level, config.json_output, nested=True, secrets=secrets)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _leave)  # until there is something to stop in order
    if config.env:
        log.info("Runtime environment: %s", describe_environment())
    log.info("%s", config)
    if launch.variables:
        log.info("From the environment: %s", ", ".join(launch.variables))
    for note in launch.notes:
        log.warning("%s", note)
    if config.node_rank > 0:
        from text_generation_inference.launch.follower import follow

        return follow(config)
    return serve(config, listener)


def _leave(number: int, frame: object) -> None:
    sys.exit(0)


def describe_environment() -> str:
    """Versions of what runs here. Holds no value of a variable, which may be a secret."""
    versions = [f"tgi {__version__}", f"Python {platform.python_version()}", platform.platform()]
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join([*versions, f"{os.cpu_count()} CPUs"])


if __name__ == "__main__":
    sys.exit(main())
