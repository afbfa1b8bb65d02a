"""A further machine of a group: the same command as machine 0, without HTTP and without an engine of its own.

Connects to machine 0, starts a process for each of its ranks with a connection of its own, and ends them when one of
them ends or when machine 0 says that the group has ended; then it connects again. So it is there before and after
machine 0, and needs no order to start in. It stops when it is told to.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

import msgspec

from text_generation_inference.config import SECRETS, ServerConfig, child_environment
from text_generation_inference.engine import machines

log = logging.getLogger("text_generation_inference.launch")

_MODULE = "text_generation_inference.engine.rank_main"
_PAUSE_S = 1.0
_TELL_EVERY_S = 10.0
_LOOK_EVERY_S = 0.25


def follow(config: ServerConfig) -> int:
    """Serve ranks of another machine's engine until told to stop."""
    return Follower(config).run()


class Follower:
    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._stopping = threading.Event()
        self._told = 0.0  # when the wait was last told

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, self._on_signal)
        config = self._config
        ranks = machines.ranks_of(config, config.node_rank)
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        log.info("`node_rank` %s, of %s machines: %s, no HTTP here", config.node_rank, config.nnodes, named)
        while not self._stopping.is_set():
            try:
                session = machines.new_session()
                with machines.call(config, session) as control:
                    reason = self._serve(control, session, ranks)
                if not self._stopping.is_set():
                    log.warning("The group has ended: %s", reason)
            except machines.Refused as error:
                self._tell(f"{config.master_addr}:{config.master_port} refuses this machine: {error}")
            except OSError as error:
                where = f"{config.master_addr}:{config.master_port}"
                self._tell(f"Waiting for machine 0 at {where} ({error.strerror or error})")
            self._stopping.wait(_PAUSE_S)
        log.info("Stopped")
        return 0

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        log.info("%s: stopping", signal.Signals(number).name)
        self._stopping.set()

    def _tell(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_EVERY_S:
            self._told = now
            log.warning("%s", text)

    def _serve(self, control: "machines.socket.socket", session: str, ranks: range) -> str:
        """Until the group ends; why it did."""
        processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in ranks:
                processes[rank] = self._start(session, rank)
            log.info("Connected to machine 0")
            while not self._stopping.is_set():
                if machines.has_ended(control, _LOOK_EVERY_S):
                    return "machine 0 has ended it"
                for rank, process in processes.items():
                    status = process.poll()
                    if status is not None:
                        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
                        return f"rank {rank} {how}"
            return "stopped"
        finally:
            for process in processes.values():
                process.kill()
            for process in processes.values():
                process.wait()

    def _start(self, session: str, rank: int) -> "subprocess.Popen[bytes]":
        own = msgspec.structs.replace(self._config, **dict.fromkeys(SECRETS))
        with machines.call(self._config, session, rank) as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(stream.fileno()), "--own-files"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(stream.fileno(),),
                env=child_environment(self._config, os.environ),
                start_new_session=True,
            )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(own))
        process.stdin.close()
        return process
