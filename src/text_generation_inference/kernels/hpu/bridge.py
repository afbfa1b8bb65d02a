"""Intel's software for Gaudi cards (`habana_frameworks`), loaded when the device is chosen: the only import of it.

Everything else here asks a `Bridge` which card and mode it runs in. The package registers the torch device
`hpu` and the ops under `torch.ops.hpu` as it is imported, and reads lazy mode then, once. Newer releases are imported
with torch.
"""

import importlib
import importlib.util
import logging
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch

from text_generation_inference.config import choose_lazy_mode, is_loaded, lazy_mode_said
from text_generation_inference.errors import StartError

log = logging.getLogger(__name__)
PACKAGE = "habana_frameworks"
_INSTEAD = "`device` cpu runs without a card; docs/gaudi.md tells what a machine with Gaudi cards needs."
_NO_MEMORY = "PT_DEVMEM"  # the part of the software that speaks when the card has no memory left
_FP8_RANGE = {1: 0.0, 2: 240.0, 3: 448.0}  # largest number of the card's e4m3; Gaudi 1 has none


@dataclass(frozen=True, slots=True)
class Bridge:
    generation: int  # 1, 2 or 3
    lazy: bool  # ops are gathered and launched by `mark_step`; graphs can be captured
    emulated: bool  # the stand-in of the tests: no card
    software: str
    device: torch.device
    torch_hpu: Any  # habana_frameworks.torch.hpu
    core: Any  # habana_frameworks.torch.core
    kernels: Any  # habana_frameworks.torch.hpex.kernels
    normalization: Any  # habana_frameworks.torch.hpex.normalization

    @property
    def card(self) -> str:
        return "Gaudi" if self.generation == 1 else f"Gaudi{self.generation}"

    @property
    def version(self) -> tuple[int, ...]:
        """Of the software, as far as it is numbers; () where it is not known."""
        return tuple(int(number) for number in re.findall(r"\d+", self.software.split("+")[0])[:4])

    @property
    def fp8_max(self) -> float:
        return _FP8_RANGE[self.generation]

    def mark_step(self) -> None:
        """Launch what was gathered. Between pieces that repeat, so that each is compiled once."""
        if self.lazy:
            self.core.mark_step()

    def synchronize(self) -> None:
        self.mark_step()
        self.torch_hpu.synchronize()

    def load_ranks(self, world: int, rank: int, local_rank: int) -> None:
        """Makes HCCL known to torch.distributed, and this process take the card of its number on this machine."""
        importlib.import_module(f"{PACKAGE}.torch.distributed.hccl").initialize_distributed_hpu(world, rank, local_rank)

    def count_compilations(self) -> int:
        """Graphs and segments compiled in this process since its start."""
        return int(_metric("graph_compilation")["TotalNumber"])

    def count_fall_backs(self) -> tuple[int, str]:
        """Ops that were done on the host in this process since its start, and which these were."""
        stats = _metric("cpu_fallback")
        return int(stats["TotalNumber"]), str(stats.get("FallbackOps", ""))


def _metric(name: str) -> dict[str, Any]:
    return dict(importlib.import_module(f"{PACKAGE}.torch.hpu.metrics").metric_global(name).stats())


@contextmanager
def memory_errors() -> Generator[None]:
    """The card's lack of memory becomes torch's error for it."""
    try:
        yield
    except RuntimeError as error:
        if _NO_MEMORY not in str(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


@cache
def load_bridge(lazy: bool | None = None) -> Bridge:
    """Raises `StartError` with the way out if there is no card, or none that can run in this mode.

    None: as the environment says, else lazy.
    """
    came_before = is_loaded()
    if not came_before:
        choose_lazy_mode(lazy)
    try:
        habana = importlib.import_module(f"{PACKAGE}.torch")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(PACKAGE):
            raise
        raise StartError(f"`device` hpu needs Intel's package {PACKAGE}, which is not installed. {_INSTEAD}") from None
    except (ImportError, OSError, AssertionError) as error:
        # Versions of PyTorch and the package that do not belong together are found by an assertion as it is imported.
        raise StartError(f"`device` hpu: {PACKAGE} {_version()} cannot be used: {error}. {_INSTEAD}") from error
    parts = {name: _part(name) for name in ("hpu", "core", "hpex.kernels", "hpex.normalization")}
    if not parts["hpu"].is_available():
        raise StartError(
            "`device` hpu: no Gaudi card can be used. `hl-smi` shows those that the driver sees, HABANA_VISIBLE_DEVICES"
            f" those that a container gets; a card serves one process at a time. {_INSTEAD}"
        )
    is_lazy = bool(_part("utils.internal").is_lazy())
    _check_mode(is_lazy, lazy, came_before)
    emulated = bool(getattr(habana, "EMULATED", False))
    return Bridge(
        generation=_generation(),
        lazy=is_lazy,
        emulated=emulated,
        software=_version(),
        device=torch.device("hpu"),
        torch_hpu=parts["hpu"],
        core=parts["core"],
        kernels=parts["hpex.kernels"],
        normalization=parts["hpex.normalization"],
    )


def _check_mode(is_lazy: bool, asked: bool | None, came_before: bool) -> None:
    """Raises `StartError` if the software runs in another mode than the one that was asked for; warns if nobody asked,
    but it would have been told to be lazy."""
    said = lazy_mode_said()
    wanted = asked if asked is not None else said != "0"
    if is_lazy is wanted:
        return
    if said is not None and is_lazy is (said != "0"):
        raise StartError(
            f"PT_HPU_LAZY_MODE is {said} in the environment, but `pt_hpu_lazy_mode` {str(wanted).lower()} is asked"
            f" for: {PACKAGE} reads the variable as it is imported. Give one of them."
        )
    modes = {True: "lazy mode", False: "eager mode, without HPU graphs"}
    told = (
        f"{PACKAGE} runs in {modes[is_lazy]}, and {modes[wanted]} was wanted: it was"
        f" {'imported, perhaps with torch,' if came_before else 'told'} before PT_HPU_LAZY_MODE={int(wanted)} could be"
        " set. Set that in the environment before Python starts."
    )
    if asked is not None:
        raise StartError(told)
    log.warning("%s", told)


def is_present(lazy: bool | None) -> bool:
    """Whether there is a real card, to be chosen without being told to."""
    if importlib.util.find_spec(PACKAGE) is None:
        return False
    try:
        return not load_bridge(lazy).emulated
    except StartError:
        return False


def _part(name: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.torch.{name}")


def _generation() -> int:
    experimental = _part("utils.experimental")
    found, known = experimental._get_device_type(), experimental.synDeviceType
    names = {"synDeviceGaudi": 1, "synDeviceGaudi2": 2, "synDeviceGaudi3": 3}
    for name, generation in names.items():
        if found == getattr(known, name, None):
            return generation
    raise StartError(f"`device` hpu: {found} is not a Gaudi card that is known here. {_INSTEAD}")


def _version() -> str:
    try:
        return str(_part("version").__version__)
    except ImportError:
        return "of unknown version"
