"""What a user is told who has no GPU, or not the right one, before anything is loaded."""

import argparse
import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from text_generation_inference.bench.shapes import write_shape
from text_generation_inference.config import ServerConfig
from text_generation_inference.devices import cuda, driver, visible
from text_generation_inference.devices.driver import Driver, Gpu
from text_generation_inference.errors import StartError
from text_generation_inference.launch import arguments, check
from text_generation_inference.launch.arguments import build_parser, read_arguments

H200 = Gpu("NVIDIA H200", 150_754_820_096, (9, 0))
T4 = Gpu("Tesla T4", 15_828_320_256, (7, 5))
GOOD = Driver((13, 0), [H200])


@pytest.mark.parametrize(
    ("torch_cuda", "found", "words"),
    [
        (None, GOOD, ["a PyTorch built for CUDA; 2.11.0 is not"]),
        ("13.0", Driver(problem="there is no NVIDIA driver here"), ["no GPU can be used, there is no NVIDIA driver"]),
        (
            "13.0",
            Driver((12, 2), [H200]),
            ["driver is too old", "CUDA up to 12.2", "built for CUDA 13.0", "Update the driver, or install a PyTorch"],
        ),
        (
            "12.8",
            Driver((13, 0), [Gpu("Tesla V100", 10**10, (7, 0)), H200]),
            ["Tesla V100 has compute capability 7.0, at least 7.5 is needed", "CUDA_VISIBLE_DEVICES"],
        ),
    ],
)
def test_why_there_is_no_gpu(torch_cuda: str | None, found: Driver, words: list[str]) -> None:
    with pytest.raises(StartError) as error:
        cuda.explain_missing("2.11.0", torch_cuda, found, custom_kernels=False)
    for text in [*words, "`device` cpu"]:
        assert text in str(error.value)


@pytest.mark.parametrize("runs", [(13, 0), (13, 2), None])
def test_a_good_driver_is_no_problem(runs: tuple[int, int] | None) -> None:
    cuda.explain_missing("2.11.0", "13.0", Driver(runs, [H200]), custom_kernels=False)
    cuda.explain_missing("2.11.0", "12.8", Driver((12, 0), [T4]), custom_kernels=False)


@pytest.mark.parametrize("version", ["2.7.1", "2.10.0+cu128"])
def test_a_torch_that_is_older_than_what_was_tried(version: str) -> None:
    with pytest.raises(StartError, match=rf"needs PyTorch 2\.11 or later; this is {re.escape(version)}"):
        cuda.explain_missing(version, "12.8", GOOD, custom_kernels=False)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"needs Triton.*install the package triton.*--disable-custom-kernels"):
        cuda.explain_missing("2.11.0", "13.0", GOOD, custom_kernels=True)
    cuda.explain_missing("2.11.0", "13.0", GOOD, custom_kernels=False)


class Library:
    """The driver's functions, as far as they are asked."""

    def __init__(self, init_status: int, gpus: list[Gpu]) -> None:
        self.init_status, self.gpus = init_status, gpus

    def cuDriverGetVersion(self, number: Any) -> int:
        number._obj.value = 12_040
        return 0

    def cuInit(self, flags: int) -> int:
        return self.init_status

    def cuDeviceGetCount(self, number: Any) -> int:
        number._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, handle: Any, place: int) -> int:
        handle._obj.value = place
        return 0

    def cuDeviceGetName(self, name: Any, length: int, handle: ctypes.c_int) -> int:
        name.value = self.gpus[handle.value].name.encode()
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, handle: ctypes.c_int) -> int:
        memory._obj.value = self.gpus[handle.value].memory_bytes
        return 0

    def cuDeviceGetAttribute(self, number: Any, attribute: int, handle: ctypes.c_int) -> int:
        number._obj.value = self.gpus[handle.value].capability[attribute - 75]
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"system not yet initialized"
        return 0


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (Library(0, [H200, T4]), Driver((12, 4), [H200, T4])),
        (Library(100, []), Driver((12, 4), [], "the NVIDIA driver sees no GPU (is CUDA_VISIBLE_DEVICES set?)")),
        (Library(3, []), Driver((12, 4), [], "the NVIDIA driver does not start: system not yet initialized")),
        (None, Driver(None, [], "there is no NVIDIA driver here")),
    ],
)
def test_reading_the_driver(monkeypatch: pytest.MonkeyPatch, library: Library | None, expected: Driver) -> None:
    def load(name: str) -> Library:
        if library is None:
            raise OSError(name)
        return library

    monkeypatch.setattr(driver.ctypes, "CDLL", load)
    assert driver.read_driver.__wrapped__() == expected


def notes(*given: str) -> list[str]:
    options: argparse.Namespace = build_parser("tgi", "").parse_args(given)
    return read_arguments(options, {}).notes


def test_what_has_no_effect_depends_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--cuda-graphs", "1,2", "--cuda-memory-fraction", "0.5")
    monkeypatch.setattr(visible, "read_driver", lambda: Driver())
    assert [note.split()[0] for note in notes(*given)] == ["--cuda-graphs", "--cuda-memory-fraction"]
    assert notes(*given, "--device", "cuda") == []
    monkeypatch.setattr(visible, "read_driver", lambda: GOOD)
    assert notes(*given) == []
    assert [note.split()[0] for note in notes(*given, "--device", "cpu")] == ["--cuda-graphs", "--cuda-memory-fraction"]


def test_check_shows_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check, "read_driver", lambda: Driver((13, 0), [H200, T4]))
    report = check.check_model(arguments.ServerConfig(model_id=str(tmp_path)))
    assert report.gpu["name"] == "NVIDIA H200"
    assert report.gpu["others"] == "1, not used"
    lines = check.render(report).splitlines()
    assert any(line.endswith("NVIDIA H200, 150.75 GB, capability 9.0") for line in lines)
    assert any(line.endswith("bfloat16, FP8; the driver runs CUDA 13.0") for line in lines)
    assert check.check_model(arguments.ServerConfig(model_id=str(tmp_path), device="cpu")).gpu == {}


def test_check_does_not_blame_the_architecture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is known, whatever is wrong with the device."""

    def refuse(*_: object) -> None:
        raise StartError("no GPU")

    monkeypatch.setattr("text_generation_inference.launch.check_fit.choose_device", refuse)
    write_shape("smollm2-135m", tmp_path)
    report = check.check_model(arguments.ServerConfig(model_id=str(tmp_path), device="cuda", load_format="dummy"))
    assert report.problems[-1] == "no GPU"
    assert "LlamaForCausalLM, supported" in check.render(report)


def test_a_missing_gpu_is_told_before_a_model_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    from text_generation_inference.engine import build

    monkeypatch.setattr(
        "text_generation_inference.devices.device.read_driver", lambda: Driver(problem="there is no NVIDIA driver here")
    )
    monkeypatch.setattr(build, "find_model", lambda *_: pytest.fail("a model was looked for"))
    with pytest.raises(StartError, match="`device` cuda"):
        build.start_engine(ServerConfig(model_id="somebody/a-large-model", device="cuda"))


def test_sizes_of_graphs() -> None:
    with pytest.raises(StartError, match="`cuda_graphs`"):
        ServerConfig(cuda_graphs=[4, -1]).check()
    ServerConfig(cuda_graphs=[0]).check()
