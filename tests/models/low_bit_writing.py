"""Writes a tiny model in few bits, in a format of the tests' own, and the plain model that it stands for.

It can say all that a `LowBitWeight` can, of any matrix of any family; formats of others have tests of their own.
"""

import json
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from driving import Tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.layers.embedding import VocabWeight
from text_generation_inference.layers.experts import Router
from text_generation_inference.models.registry import build, read_config
from text_generation_inference.quant.low_bit import LowBitScheme, StoredLowBit, choose_stored
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Beside, Part, Parts

METHOD = "tests"  # as config.json calls it
NORMAL = tuple((torch.erfinv(torch.linspace(-0.95, 0.95, 16)) / 1.386).tolist())


@dataclass(frozen=True)
class Form:
    scheme: LowBitScheme
    is_ordered: bool = False  # columns are not in the order of inputs


FORMS = {
    "symmetric": Form(LowBitScheme(4, 32, scale_dtype=torch.float32)),
    "zero points": Form(LowBitScheme(4, 16, False, scale_dtype=torch.float32)),
    "8 bits": Form(LowBitScheme(8, None, scale_dtype=torch.float32)),
    "table": Form(LowBitScheme(4, 32, table=NORMAL, scale_dtype=torch.float32)),
    "order": Form(LowBitScheme(4, 32, False, scale_dtype=torch.float32), is_ordered=True),
}


class InTestsFormat(StoredLowBit):
    """Beside each other: `codes` and `scale`, where there are some `offset`, and where columns are ordered `order`."""

    def __init__(self, form: Form) -> None:
        super().__init__(form.scheme)
        self.form = form

    def shapes(self, part: Part) -> dict[str, tuple[int, ...]]:
        *experts, rows, columns = part.shape
        if part.transposed:
            rows, columns = columns, rows
        groups = self.scheme.groups(columns)
        shapes = {"codes": (*experts, rows, columns * self.scheme.bits // 8), "scale": (*experts, rows, groups)}
        if not self.scheme.is_symmetric:
            shapes["offset"] = shapes["scale"]
        if self.form.is_ordered:
            shapes["order"] = (columns,)
        return shapes

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        return _beside(part.name, "codes"), self.shapes(part)["codes"]

    def declare(self, part: Part) -> dict[str, Beside]:
        shapes = self.shapes(part)
        return {_beside(part.name, each): Beside((shapes[each],)) for each in list(shapes)[1:]}

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Any:
        for name, part in parts:
            yield from (self._wanted(name, part, each) for each in self.shapes(part))

    def _wanted(self, name: str, part: Part, each: str) -> Wanted:
        return Wanted(_beside(name, each), number=None if each == "order" else part.number)

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        read = {each: checkpoint.read(*self._wanted(name, part, each)).to(device) for each in self.shapes(part)}
        columns = read["codes"].shape[1] * 8 // self.scheme.bits
        table = None if self.scheme.table is None else torch.tensor(self.scheme.table, device=device)
        size = self.scheme.group_size or columns
        order = read.get("order")
        whole = LowBitWeight(
            read["codes"], read["scale"], read.get("offset"), self.scheme.bits, size, columns, table=table, order=order
        )
        by_row = part.dim is not None and part.dim == int(part.transposed)
        if by_row:
            whole = low_bit.take_rows(whole, part.start, part.end)
        elif part.dim is not None and order is None:
            whole = low_bit.take_columns(whole, part.start, part.end)
        elif part.dim is not None and order is not None:
            whole = _take_inputs(whole, order, part.start, part.end)
        offset = whole.offset
        return replace(
            whole,
            codes=part.arrange_rows(whole.codes),
            scale=part.arrange_rows(whole.scale),
            offset=offset if offset is None else part.arrange_rows(offset),
        )


def _take_inputs(weight: LowBitWeight, order: Tensor, start: int, end: int) -> LowBitWeight:
    """Columns of some inputs, wherever they are: each is a group of its own."""
    kept = ((order >= start) & (order < end)).nonzero()[:, 0]
    wide = low_bit.regroup(weight, 1)
    codes = low_bit.pack_codes(low_bit.unpack_codes(wide.codes, wide.bits)[:, kept], wide.bits)
    offset = None if wide.offset is None else wide.offset[:, kept]
    moved = order[kept] - start
    return replace(wide, codes=codes, scale=wide.scale[:, kept], offset=offset, order=moved, in_features=end - start)


def _beside(name: str, each: str) -> str:
    return f"{name.removesuffix('.weight')}.{each}"


@dataclass(frozen=True, slots=True)
class InFewBits(Quantization):
    form: Form
    method: str = METHOD
    origin: str = "this test"

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        return choose_stored(matrix, [InTestsFormat(self.form)] * len(names)) if _is_stored_so(matrix) else None


def _is_stored_so(matrix: Matrix) -> bool:
    return not isinstance(matrix, VocabWeight | Router) and min(matrix.shape) > 1


def detect(config: Mapping[str, Any], source: str) -> InFewBits:
    return InFewBits(FORMS[config["form"]])


def write_low_bit(tiny: Tiny, name: str, folder: Path) -> Tiny:
    """In a form of `FORMS`, and the model with the values that this stands for."""
    plain, few = write_folders(tiny.folder, name, folder)
    return Tiny(few, type(tiny.model).from_pretrained(plain).eval().float())


def write_folders(source: Path, name: str, folder: Path) -> tuple[Path, Path]:
    """What a model stands for in a form of `FORMS`: plain, and in that form."""
    form, stored, values = FORMS[name], InTestsFormat(FORMS[name]), load_file(source / "model.safetensors")
    model = build(read_config(source))
    model.adapt(list(values))
    matrices = [(prefix, each) for prefix, each in model.walk() if isinstance(each, Matrix) and _is_stored_so(each)]
    parts = {prefix + part.name: part for prefix, matrix in matrices for part in matrix.parts}
    tensors = dict(values)
    for full, part in parts.items():
        whole = tensors.pop(full)
        turned = [piece.t() if part.transposed else piece for piece in whole.view(-1, *whole.shape[-2:])]
        pieces = [_quantize(piece, form, full) for piece in turned]
        shown = [low_bit.dequantize(piece) for piece in pieces]
        values[full] = torch.stack([each.t() if part.transposed else each for each in shown]).view_as(whole)
        for each, shape in stored.shapes(part).items():
            found = [getattr(piece, each) for piece in pieces]
            tensors[_beside(full, each)] = found[0] if each == "order" else torch.stack(found).view(shape)
    paths = folder / "plain", folder / "few"
    for path, content in zip(paths, (values, tensors), strict=True):
        shutil.copytree(source, path)
        content = {key: value.contiguous() for key, value in content.items()}
        save_file(content, path / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    section = {"quant_method": METHOD, "form": name}
    (paths[1] / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return paths


def _quantize(plain: Tensor, form: Form, name: str) -> LowBitWeight:
    """Matrices of one parent, which have the same inputs, have them in the same order."""
    plain = plain.contiguous()
    if not form.is_ordered:
        return form.scheme.quantize(plain)
    parent = name.removesuffix(".weight").rpartition(".")[0]
    generator = torch.Generator().manual_seed(zlib.crc32(parent.encode()))
    order = torch.randperm(plain.shape[1], generator=generator)
    made = form.scheme.quantize(plain[:, order])
    made.order = order.to(torch.int32)
    return made
