"""Tensors that are moved in pieces arrive as they were, whoever asks in which order; files that change are refused."""

import os
import random
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.quant.choose import assign_methods
from text_generation_inference.quant.fp8 import ON_LOADING, Fp8Scheme
from text_generation_inference.quant.fp8_formats import StoredQuantization
from text_generation_inference.quant.gptq import GptqQuantization, Stored
from text_generation_inference.quant.method import Matrix
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Declared, Module, Number, Part
from text_generation_inference.weights.load import load_checkpoint
from text_generation_inference.weights.upload import FileSpan, Upload, identify

CPU = torch.device("cpu")
DEVICES = [CPU, torch.device("cuda", 0)] if torch.cuda.is_available() else [CPU]
PIECE = 256


def same(one: Tensor, other: Tensor) -> bool:
    one, other = (each.cpu().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)


def upload_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tgi-upload")]


def open_descriptors(folder: Path) -> list[str]:
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return [target for link in links if link.is_symlink() and (target := os.readlink(link)).startswith(str(folder))]


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    def make(*shape: int) -> Tensor:
        return torch.randint(0, 100, shape, dtype=torch.int32)

    return {
        "matrix": make(40, 30).float(),
        "halves": make(64, 17).bfloat16(),
        "bytes": make(33, 129).to(torch.float8_e4m3fn),
        "cube": make(5, 6, 7).half(),
        "row": make(300).float(),
        "number": make().float(),
        "none": make(0, 4).float(),
        "small": make(3).to(torch.int8),  # what comes after it is not aligned
        "flags": make(90) > 50,
        "large": make(200, 50).float(),
    }


@pytest.fixture
def checkpoint(tensors: dict[str, Tensor], tmp_path: Path) -> Checkpoint:
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, tmp_path / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, tmp_path / "model-2.safetensors", {"format": "pt"})
    return Checkpoint.open(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("shape", [(1,), (7,), (64, 16), (33, 129), (3, 5, 1000), (0, 4)])
def test_every_byte_arrives(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    original = torch.randint(0, 100, shape, dtype=torch.int32).to(dtype)
    with Upload(CPU, piece_bytes=PIECE) as upload:
        moved = [upload(original) for _ in range(3)]
    for copy in moved:
        assert (copy.shape, copy.dtype) == (original.shape, original.dtype)
        assert torch.equal(copy.view(torch.uint8), original.view(torch.uint8))


def test_a_view_arrives_as_what_it_shows() -> None:
    whole = torch.randn(50, 40)
    with Upload(CPU, piece_bytes=128) as upload:
        assert torch.equal(upload(whole[:, 3:17]), whole[:, 3:17])
        assert torch.equal(upload(whole.t()), whole.t())
        assert torch.equal(upload(whole[:, 3:4]), whole[:, 3:4])


WANTED = [
    *(Wanted(name) for name in ("matrix", "halves", "bytes", "cube", "row", "number", "none", "small", "flags")),
    Wanted("large"),
    Wanted("large"),  # twice, as tied weights are
    Wanted("matrix", 0, 3, 31),
    Wanted("matrix", 0, 5, 5),
    Wanted("halves", 0, 1, None),
    Wanted("halves", 1, 2, 9),
    Wanted("halves", -1, 0, 17),
    Wanted("bytes", 0, None, 20),
    Wanted("bytes", 1, 100, 129),
    Wanted("cube", 0, 1, 4),
    Wanted("cube", 1, 2, 5),
    Wanted("cube", 2, 6, 7),
    Wanted("cube", 1, 0, 6, True),
    Wanted("row", 0, 7, 290, True),
    Wanted("halves", 1, 4, 5, True),
    Wanted("number", on_host=True),
]


def expected(wanted: Wanted, tensors: dict[str, Tensor]) -> Tensor:
    tensor = tensors[wanted.name]
    if wanted.dim is None:
        return tensor
    start, end = wanted.start or 0, tensor.shape[wanted.dim] if wanted.end is None else wanted.end
    return tensor.narrow(wanted.dim, start, end - start)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("ahead_bytes", [0, 3000, 1 << 20])
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_asking(
    checkpoint: Checkpoint, tensors: dict[str, Tensor], seed: int, ahead_bytes: int, device: torch.device
) -> None:
    chance = random.Random(seed)
    announced = chance.sample(WANTED, 18) if seed else WANTED  # the others are asked for all the same
    asked = list(WANTED)
    if seed > 1:
        chance.shuffle(asked)
    if seed > 3:
        asked = asked[:12]  # some are announced and never asked for
    with Upload(device, PIECE, ahead_bytes) as checkpoint.upload:
        checkpoint.announce(announced)
        found = [checkpoint.read(*wanted) for wanted in asked]
    for wanted, tensor in zip(asked, found, strict=True):
        right = expected(wanted, tensors)
        assert tensor.device == (CPU if wanted.on_host else device), wanted
        assert (tensor.shape, tensor.dtype) == (right.shape, right.dtype), wanted
        assert same(tensor, right), wanted
    twice = [tensor.data_ptr() for wanted, tensor in zip(asked, found, strict=True) if wanted == Wanted("large")]
    assert len(set(twice)) == len(twice)  # each has its own
    assert not upload_threads()


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_used_at_once_while_the_next_are_read(tmp_path: Path, device: torch.device) -> None:
    values = {f"{number:02}": torch.randint(-9999, 9999, (700, 1000), dtype=torch.int32) for number in range(24)}
    save_file(values, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    with Upload(device, piece_bytes=100_000, ahead_bytes=9_000_000) as checkpoint.upload:
        checkpoint.announce(Wanted(name) for name in values)
        joined = [(checkpoint.read(name) * 2 + 1)[::3].clone() for name in values]  # memory is used again and again
    for found, value in zip(joined, values.values(), strict=True):
        assert same(found, (value * 2 + 1)[::3])


def test_what_was_left_behind_is_let_go(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    size = tensors["large"].nbytes
    with Upload(CPU, PIECE, ahead_bytes=2 * size) as upload:
        checkpoint.upload = upload
        checkpoint.announce([Wanted("large")] * 5 + [Wanted("matrix"), Wanted("row")])
        assert upload.waiting_bytes == 2 * size
        assert same(checkpoint.read("matrix"), tensors["matrix"])  # beyond what is read ahead
        assert upload.waiting_bytes == tensors["row"].nbytes
        assert same(checkpoint.read("large"), tensors["large"])  # again, though nobody announced it any more
        assert same(checkpoint.read("row"), tensors["row"])
        assert upload.waiting_bytes == 0


def test_no_such_range(checkpoint: Checkpoint) -> None:
    with Upload(CPU, PIECE) as checkpoint.upload, pytest.raises(ValueError, match="is no range of dimension 0"):
        checkpoint.read("matrix", 0, 3, 41)


@pytest.mark.parametrize("announces", [True, False])
@pytest.mark.parametrize("name", ["large", "small", "number"])
def test_a_file_cut_short_is_refused(checkpoint: Checkpoint, tmp_path: Path, name: str, announces: bool) -> None:
    for path in tmp_path.glob("*.safetensors"):
        os.truncate(path, path.stat().st_size // 2)
    with Upload(CPU, PIECE) as checkpoint.upload:
        checkpoint.announce([Wanted(name)] if announces else [])
        with pytest.raises(ModelFormatError, match=r"model-\d.safetensors: was changed while it was read"):
            checkpoint.read(name)
    assert not upload_threads()


def test_another_file_in_its_place_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for path in tmp_path.glob("*.safetensors"):
        content = path.read_bytes()
        path.rename(path.with_suffix(".old"))
        path.write_bytes(content[::-1])
    with (
        Upload(CPU, PIECE) as checkpoint.upload,
        pytest.raises(ModelFormatError, match="was changed while it was read"),
    ):
        checkpoint.read("large")


def test_a_file_written_anew_in_place_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for path in tmp_path.glob("*.safetensors"):
        changed = path.stat().st_mtime_ns
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(changed, changed + 1))  # however coarse the file system's clock is
    with Upload(CPU, PIECE) as checkpoint.upload, pytest.raises(ModelFormatError, match="was changed while"):
        checkpoint.read("matrix")


def test_an_unusual_header_is_refused(tmp_path: Path) -> None:
    header = b'{"a":["U8",[4],[0,4]]}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(ModelFormatError, match="header"):
        Checkpoint.open(tmp_path)


def test_a_short_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    with path.open("rb") as file:
        span = FileSpan(path, identify(file.fileno()), 300, (801,), torch.uint8)
    with Upload(CPU, PIECE) as upload, pytest.raises(ModelFormatError, match="was changed while it was read"):
        upload.read(span)


def test_a_file_that_is_gone_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    with Upload(CPU, PIECE) as checkpoint.upload, pytest.raises(ModelFormatError, match="cannot be read: No such file"):
        checkpoint.read("large")


def test_an_error_on_a_thread_is_the_callers() -> None:
    with Upload(CPU, piece_bytes=64) as upload, pytest.raises(RuntimeError):
        upload(torch.zeros(100, device="meta"))


def test_only_who_asks_for_it_hears_of_an_error(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    files = {path.name: path for path in checkpoint.folder.glob("*.safetensors")}
    os.truncate(files["model-1.safetensors"], 20)  # of "bytes", and not of "cube"
    with Upload(CPU, PIECE) as checkpoint.upload:
        checkpoint.announce([Wanted("bytes"), Wanted("cube")])
        assert same(checkpoint.read("cube"), tensors["cube"])
        with pytest.raises(ModelFormatError, match="model-1.safetensors"):
            checkpoint.read("bytes")
        assert same(checkpoint.read("cube"), tensors["cube"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_of_the_caller_ends_everything(
    checkpoint: Checkpoint, tmp_path: Path, error: type[BaseException]
) -> None:
    before = len(open_descriptors(tmp_path))
    upload = Upload(CPU, piece_bytes=64)

    def load() -> None:
        with upload as checkpoint.upload:
            checkpoint.announce([Wanted("large")] * 10)
            checkpoint.read("large")
            raise error

    with pytest.raises(error):
        load()
    assert not upload_threads()
    assert upload.waiting_bytes == 0
    assert len(open_descriptors(tmp_path)) == before


class Layer(Module):
    """This rank's: a joined matrix by rows, another by columns, a vector and a number."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scale = 1.0
        self.joined = Matrix(Ops(), [Part(f"{part}.weight", (48, 32), 0, 16, 40) for part in "qkv"])
        self.columns = Matrix(Ops(), [Part("o.weight", (32, 48), 1, 8, 24)])
        self.norm: Tensor | None = None

    def declare(self) -> list[Declared]:
        return [Declared("norm", [Part(f"{self.name}.norm.weight", (32,))])]

    def declare_numbers(self) -> list[Number]:
        return [Number("scale", (f"{self.name}.k_scale",))]

    def values(self) -> dict[str, Tensor]:
        found = {"norm": self.norm, "scale": torch.tensor(self.scale)}
        for name, value in (("joined", self.joined.weight), ("columns", self.columns.weight)):
            if isinstance(value, Fp8Weight):
                found |= {f"{name}.{field}": getattr(value, field) for field in ("data", "scale", "input_scale")}
            elif isinstance(value, LowBitWeight):
                found |= {f"{name}.{field}": getattr(value, field) for field in ("codes", "scale", "offset", "order")}
            else:
                found[name] = value
        return {name: value for name, value in found.items() if value is not None}


class Stack(Module):
    def __init__(self) -> None:
        self.layers = [Layer(f"layers.{number}") for number in range(6)]


STORED = StoredQuantization("compressed-tensors", Fp8Scheme(input_scale_name="input_scale"))
LISTED = GptqQuantization(Stored(bits=4, group_size=16, is_symmetric=False, has_index=True))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("quantization", [None, ON_LOADING, STORED, LISTED])
@pytest.mark.parametrize("ahead_bytes", [0, 5000, 1 << 20])
def test_a_model_is_the_same_with_and_without(
    tmp_path: Path, quantization: Quantization | None, ahead_bytes: int, device: torch.device
) -> None:
    stored: dict[str, Tensor] = {}
    for prefix, module in Stack().walk():
        for name, part in (named for declared in module.declare() for named in declared.named(prefix)):
            weight = torch.randn(part.shape)
            if quantization is STORED and weight.ndim == 2:
                beside = name.removesuffix("weight")
                stored[beside + "weight_scale"] = torch.rand(weight.shape[0], 1) + 0.1
                stored[beside + "input_scale"] = torch.rand(1) + 0.1
                stored[name] = weight.to(torch.float8_e4m3fn)
            elif quantization is LISTED and weight.ndim == 2:
                beside, (rows, columns) = name.removesuffix("weight"), weight.shape
                stored[beside + "qweight"] = torch.randint(-(2**31), 2**31, (columns // 8, rows)).int()
                stored[beside + "qzeros"] = torch.randint(-(2**31), 2**31, (columns // 16, rows // 8)).int()
                stored[beside + "scales"] = torch.rand(columns // 16, rows).half()
                stored[beside + "g_idx"] = (torch.arange(columns).flip(0) // 16).int()
            else:
                stored[name] = weight.bfloat16()
        stored |= {number.names[0]: torch.rand(()) + 0.1 for number in module.declare_numbers()}
    save_file(stored, tmp_path / "model.safetensors")

    def load(upload: Upload | None) -> list[dict[str, Tensor]]:
        model, checkpoint = Stack(), Checkpoint.open(tmp_path)
        checkpoint.upload = upload
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        assign_methods(model, quantization and quantization.named_as_in(shapes))
        load_checkpoint(model, checkpoint, torch.bfloat16, device)
        return [layer.values() for layer in model.layers]

    with Upload(device, PIECE, ahead_bytes) as upload:
        moved = load(upload)
        assert upload.waiting_bytes == 0  # nothing was read for nobody
    mapped = load(None)
    assert ["joined.input_scale" in layer for layer in moved] == [quantization is STORED] * 6
    assert ["columns.order" in layer for layer in moved] == [quantization is LISTED] * 6
    for one, other in zip(moved, mapped, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert (one[name].shape, one[name].dtype) == (other[name].shape, other[name].dtype)
            assert same(one[name], other[name]), name
