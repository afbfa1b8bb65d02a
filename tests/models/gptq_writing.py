"""Writes tiny models in GPTQ, AWQ and Marlin, each as its tools do, and the plain model that each stands for.

Codes are packed bit by bit here, in the words of the formats' definitions; no code is shared with the project.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from text_generation_inference.config import ServerConfig
from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.engine.rank import load_model
from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.models.registry import read_config, read_quantization
from text_generation_inference.parallel import Parallel
from text_generation_inference.quant.choose import choose_quantization
from text_generation_inference.quant.method import Matrix
from text_generation_inference.weights.source import ModelFolder

Tensors = dict[str, Tensor]
AWQ_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}


@dataclass
class Codes:
    """A matrix `[in, out]` in codes."""

    codes: Tensor  # int64 [in, out]
    scales: Tensor  # [groups, out]
    zeros: Tensor  # int64 [groups, out]
    groups: Tensor  # [in]: the group of each input
    bits: int

    @property
    def values(self) -> Tensor:
        """`[out, in]`."""
        return (self.scales.float()[self.groups] * (self.codes - self.zeros[self.groups])).t().contiguous()


def encode(
    weight: Tensor,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    groups: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float16,
) -> Codes:
    """weight `[out, in]`, each group with the scale that its largest values give."""
    count = weight.shape[1]
    group_size = count if group_size == -1 else group_size
    groups = torch.arange(count) // group_size if groups is None else groups
    middle, most = 2 ** (bits - 1), 2**bits - 1
    scales, zeros = [], []
    for number in range(int(groups.max()) + 1):
        some = weight[:, groups == number]
        if symmetric:
            scales.append(some.abs().amax(1) / max(middle - 1, 1))
            zeros.append(torch.full((len(weight),), middle))
        else:
            low, high = some.amin(1).clamp(max=0), some.amax(1).clamp(min=0)
            scales.append((high - low) / most)
            zeros.append((-low / scales[-1]).round().long().clamp(1, most))  # those of 0 are what v1 cannot say
    scale, zero = torch.stack(scales).to(scale_dtype), torch.stack(zeros)
    codes = (weight.t() / scale.float()[groups]).round().long() + zero[groups]
    return Codes(codes.clamp(0, most), scale, zero, groups, bits)


def pack_stream(codes: Tensor, bits: int) -> Tensor:
    """Along the first dimension: one bit after the other into words of 32, from the lowest on."""
    flat = (codes[:, None] >> torch.arange(bits)[None, :, None] & 1).flatten(0, 1)
    flat = torch.cat((flat, flat.new_zeros(-len(flat) % 32, flat.shape[1])))
    words = (flat.view(-1, 32, flat.shape[1]) << torch.arange(32)[None, :, None]).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq_tensors(made: Codes, version: int = 1, with_index: bool = True) -> Tensors:
    less = 1 if version == 1 else 0
    found = {
        "qweight": pack_stream(made.codes, made.bits),
        "qzeros": pack_stream((made.zeros - less).t(), made.bits).t().contiguous(),
        "scales": made.scales,
    }
    return found | ({"g_idx": made.groups.int()} if with_index else {})


def awq_tensors(made: Codes) -> Tensors:
    order = torch.tensor(AWQ_ORDER[made.bits])

    def pack(codes: Tensor) -> Tensor:
        runs = codes.unflatten(1, (-1, len(order)))[..., order].flatten(1)
        return pack_stream(runs.t(), made.bits).t().contiguous()

    return {"qweight": pack(made.codes), "qzeros": pack(made.zeros), "scales": made.scales}


def marlin_tensors(made: Codes) -> Tensors:
    """As one kernel reads them: a thread of 32 finds its part of each of four squares of 16 x 16 in one word."""
    count, outputs = made.codes.shape
    words = torch.zeros(count // 16, outputs // 64, 32, 4, dtype=torch.int64)
    tiles = made.codes.view(count // 16, 16, outputs // 64, 64)
    for thread in range(32):
        for square in range(4):
            for nibble in range(8):
                half, rest = divmod((0, 2, 4, 6, 1, 3, 5, 7)[nibble], 4)
                row = 2 * (thread % 4) + rest % 2 + 8 * (rest // 2)
                column = 16 * square + 8 * half + thread // 4
                words[:, :, thread, square] |= tiles[:, row, :, column] << 4 * nibble
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    if len(made.scales) > 1:  # by group: of 64 outputs every eighth, eight times
        scales = made.scales.unflatten(1, (-1, 8, 8)).transpose(2, 3).flatten(1)
    else:
        places = [2 * run + each for run in range(4) for each in (0, 1, 8, 9, 16, 17, 24, 25)]
        scales = made.scales.unflatten(1, (-1, 32))[..., places].flatten(1)
    return {"B": words.view(count // 16, -1), "s": scales.contiguous()}


@dataclass
class Written:
    folder: Path
    plain: Path  # the same values without a format
    made: dict[str, Codes] = field(default_factory=dict)

    @property
    def model(self) -> transformers.PreTrainedModel:
        return transformers.AutoModelForCausalLM.from_pretrained(self.plain, dtype=torch.float32).eval()


def is_matrix(name: str) -> bool:
    return name.endswith(("_proj.weight", ".c_fc.weight", ".w1.weight", ".w2.weight", ".w3.weight"))


def write(
    source: Path,
    folder: Path,
    config: dict | None,  # what config.json says
    quantize: Callable[[str, Tensor], tuple[Codes, Tensors] | None],  # None: stays as it is
    extra: Tensors | None = None,
    divisors: Tensors | None = None,  # of the inputs of matrices
) -> Written:
    written = Written(folder / "stored", folder / "plain")
    fields = json.loads((source / "config.json").read_text())
    tensors: Tensors = {}
    plain: Tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        found = quantize(name, value) if is_matrix(name) or name == "lm_head.weight" else None
        plain[name] = value
        if found is None:
            tensors[name] = value
            continue
        base = name.removesuffix("weight")
        written.made[base.removesuffix(".")] = found[0]
        plain[name] = found[0].values / (divisors or {}).get(name, 1)
        tensors |= {base + each: tensor for each, tensor in found[1].items()}
    for where, content, more in (
        (written.folder, tensors | (extra or {}), {} if config is None else {"quantization_config": config}),
        (written.plain, plain, {}),
    ):
        where.mkdir(parents=True)
        save_file(content, where / "model.safetensors", {"format": "pt"})
        (where / "config.json").write_text(json.dumps({**fields, **more}))
    return written


def load_matrices(folder: Path, rank: int = 0, world: int = 1, quantize: str | None = None) -> dict[str, Matrix]:
    """By path, as the rank holds them."""
    config = read_config(folder)
    quantization = choose_quantization(quantize, read_quantization(config))
    device = CpuDevice(folder, custom_kernels=False)
    device.ops.low_bit_ops = Ops().low_bit_ops
    source = ModelFolder(model_id="tiny", path=folder, note="")
    parallel = Parallel(rank, world)
    model = load_model(ServerConfig(), source, config, quantization, device, torch.float32, parallel, lambda *_: None)
    return {f"{prefix}{module.parts[0].name}": module for prefix, module in model.walk() if isinstance(module, Matrix)}


def _storage_bytes(weight: object) -> int:
    """What is really held; tensors that are parts of larger ones hold those."""
    if isinstance(weight, Tensor):  # as it lies in the file
        return weight.nbytes
    assert isinstance(weight, LowBitWeight)
    parts = (weight.codes, weight.scale, weight.offset, weight.order)
    return sum(part.untyped_storage().nbytes() for part in parts if part is not None)


def check_same(
    written: Written, worlds: tuple[int, ...] = (1, 2, 4), quantize: str | None = None
) -> list[LowBitWeight]:
    """Bit for bit on every rank, and as large as is said; what is held in few bits."""
    held: list[LowBitWeight] = []
    for rank, world in [(rank, count) for count in worlds for rank in range(count)]:
        plain = load_matrices(written.plain, rank, world)
        for name, matrix in load_matrices(written.folder, rank, world, quantize).items():
            weight = matrix.weight
            assert matrix.method.bytes(matrix.shape, torch.float32) == _storage_bytes(weight), name
            if isinstance(weight, LowBitWeight):
                held.append(weight)
                weight = low_bit.dequantize(weight)
            assert isinstance(weight, Tensor)
            assert torch.equal(weight, plain[name].weight), name
    return held
