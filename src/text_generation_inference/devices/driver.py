"""What the NVIDIA driver says of its GPUs, without torch and without touching their memory; and its context, early.

Standard library only, so that the launcher can ask. Honours CUDA_VISIBLE_DEVICES, as the driver does.
"""

import ctypes
import threading
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p, create_string_buffer
from dataclasses import dataclass, field
from functools import cache

_LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # attributes of a device: its compute capability
_NO_DEVICE = 100


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Driver:
    """`cuda` is the newest CUDA that the driver runs, such as (13, 0); None without a driver."""

    cuda: tuple[int, int] | None = None
    gpus: list[Gpu] = field(default_factory=list[Gpu])
    problem: str = ""  # why there are no GPUs

    @property
    def runs(self) -> str:
        return f"CUDA {self.cuda[0]}.{self.cuda[1]}" if self.cuda else ""


@cache
def read_driver() -> Driver:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return Driver(problem="there is no NVIDIA driver here")
    try:
        return _ask(library)
    except AttributeError as error:
        return Driver(problem=f"the NVIDIA driver lacks a function ({error})")


def begin_context() -> None:
    """Have the first GPU's context made, in which all of this process is computed there: torch would do it when it is
    first asked for something, here it is done while torch is imported. What fails is left to torch, which tells it."""
    threading.Thread(target=_make_context, name="tgi-context", daemon=True).start()


def _make_context() -> None:
    handle, context = c_int(), c_void_p()
    try:
        library = ctypes.CDLL(_LIBRARY)
        if library.cuInit(0) == 0 and library.cuDeviceGet(byref(handle), 0) == 0:
            library.cuDevicePrimaryCtxRetain(byref(context), handle)
    except (OSError, AttributeError):
        return


def _ask(library: ctypes.CDLL) -> Driver:
    number = c_int()
    cuda = None
    if library.cuDriverGetVersion(byref(number)) == 0 and number.value:
        cuda = (number.value // 1000, number.value % 1000 // 10)
    status = library.cuInit(0)
    if status == _NO_DEVICE:
        return Driver(cuda, problem="the NVIDIA driver sees no GPU (is CUDA_VISIBLE_DEVICES set?)")
    if status != 0:
        return Driver(cuda, problem=f"the NVIDIA driver does not start: {_explain(library, status)}")
    library.cuDeviceGetCount(byref(number))
    gpus = [_ask_gpu(library, place) for place in range(number.value)]
    return Driver(cuda, gpus, "" if gpus else "the NVIDIA driver sees no GPU (is CUDA_VISIBLE_DEVICES set?)")


def _ask_gpu(library: ctypes.CDLL, place: int) -> Gpu:
    handle, name, memory = c_int(), create_string_buffer(256), c_size_t()
    major, minor = c_int(), c_int()
    library.cuDeviceGet(byref(handle), place)
    library.cuDeviceGetName(name, len(name), handle)
    library.cuDeviceTotalMem_v2(byref(memory), handle)
    library.cuDeviceGetAttribute(byref(major), _MAJOR, handle)
    library.cuDeviceGetAttribute(byref(minor), _MINOR, handle)
    return Gpu(name.value.decode(errors="replace"), memory.value, (major.value, minor.value))


def _explain(library: ctypes.CDLL, status: int) -> str:
    text = c_char_p()
    library.cuGetErrorString(status, byref(text))
    return text.value.decode(errors="replace") if text.value else f"error {status}"
