"""Puts a model into codes, layer by layer, and writes the checkpoint.

In each layer matrices are taken in the order in which they are multiplied: each is given the inputs that it gets once
those before it are in codes. What a layer makes of the text then goes into the next. A layer is written when it is
done; a run that goes on computes finished layers once more, from what was written.
"""

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.errors import StartError
from text_generation_inference.kernels.matrices import plain
from text_generation_inference.make_quantized.output import Output
from text_generation_inference.make_quantized.packing import SUFFIXES, pack, unpack
from text_generation_inference.make_quantized.passes import Layers, open_model
from text_generation_inference.make_quantized.settings import MakingSettings
from text_generation_inference.make_quantized.solver import Inputs, Solved, round_to_nearest, solve
from text_generation_inference.make_quantized.targets import Kept, RoundedMatrix, StoredRows, find_targets
from text_generation_inference.models.layer import DecoderLayer
from text_generation_inference.models.registry import read_config, read_quantization
from text_generation_inference.version import __version__
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.progress import Progress, silent

_FEWEST_TOKENS = 64  # of an expert, below which its inputs say too little
_SHARD_BYTES = 5 * 10**9
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Source:
    folder: Path
    weights: Path  # folder of the weights, mostly the same
    trusts_code: bool = False


@dataclass(slots=True)
class Made:
    """What a run has made."""

    num_matrices: int = 0
    num_bytes: int = 0
    kept: list[Kept] = field(default_factory=list)  # that could have been in codes, and are not
    notes: list[str] = field(default_factory=list)


def check_plain(folder: Path) -> None:
    """Raise `StartError` for a model that is quantised already."""
    stored = read_quantization(read_config(folder))
    if stored is not None:
        raise StartError(
            f"{folder} is quantised already ({stored.method}): quantising starts from a model in bfloat16, float16 or"
            " float32"
        )


class Maker:
    """`rows`: windows that are computed together. `dtype`: of what is not in codes; None: as it was."""

    def __init__(
        self,
        source: Source,
        output: Output,
        settings: MakingSettings,
        device: Device,
        rows: int = 4,
        dtype: torch.dtype | None = None,
        max_shard_bytes: int = _SHARD_BYTES,
        progress: Progress = silent,
        tell: Tell = lambda text: None,
    ) -> None:
        settings.check()
        self._source, self._output, self._settings, self._device = source, output, settings, device
        self._rows, self._dtype, self._max_shard_bytes = rows, dtype, max_shard_bytes
        self._progress, self._tell = progress, tell
        check_plain(source.folder)
        config = read_config(source.folder)
        self._checkpoint = Checkpoint.open(source.weights)
        self._model = open_model(config, self._checkpoint, device.torch_device, source.trusts_code)
        self._made = Made()

    @property
    def max_positions(self) -> int:
        return self._model.max_positions

    def describe_progress(self) -> str:
        """Of a run that was ended early."""
        count = len(self._model.model.layers)
        done = sum(map(self._output.has_layer, range(count)))
        return f"{done} of {count} layers are finished, in {self._output.folder}; the same command goes on after them"

    def run(self, windows: Sequence[Sequence[int]]) -> Made:
        """`windows` are token ids of the text, none longer than the model's positions."""
        digest = hashlib.sha256(msgspec.json.encode(windows)).hexdigest()
        about = {"settings": self._settings, "text": digest, "model": self._fingerprint()}
        with self._output.opened(about):
            layers = Layers(self._model, self._checkpoint, self._device, windows, self._rows)
            layers.embed()
            started, first = time.monotonic(), None
            for number in range(len(layers)):
                is_done = self._output.has_layer(number)
                first = number if first is None and not is_done else first
                self._progress("quantize layers", number, len(layers))
                began = time.monotonic()
                worst = self._take_up(layers, number) if is_done else self._make(layers, number)
                now = time.monotonic()
                text = f"layer {number + 1} of {len(layers)}: "
                if first is None:
                    text += "was finished"
                else:
                    left = (now - started) / (number + 1 - first) * (len(layers) - number - 1)
                    text += f"{worst}, {now - began:.1f} s, {left:.0f} s left"
                    started = started if number > first else began
                self._tell(text)
            self._progress("quantize layers", len(layers), len(layers))
            del layers
            self._made.num_bytes = self._finish()
        return self._made

    def _fingerprint(self) -> str:
        """Changes with the names, shapes and types of the weights, and where they are."""
        checkpoint = self._checkpoint
        found = [(name, checkpoint.shape(name), str(checkpoint.dtype(name))) for name in checkpoint.names()]
        sizes = [(path.name, path.stat().st_size) for path in sorted(self._source.weights.glob("*.safetensors"))]
        return hashlib.sha256(msgspec.json.encode((found, sizes))).hexdigest()

    # -- a layer ---------------------------------------------------------------------------------------------------

    def _find(self, layers: Layers, number: int) -> list[RoundedMatrix]:
        targets, kept = find_targets(layers.get(number), layers.prefix(number), self._settings)
        for target in targets:
            target.matrix.method = layers.observer
        self._made.kept += kept
        self._made.num_matrices += sum(len(target.pieces) for target in targets)
        return targets

    def _make(self, layers: Layers, number: int) -> str:
        """Returns what to say of it."""
        targets, tensors, notes = self._find(layers, number), dict[str, Tensor](), list[str]()
        worst = ("", 0.0)
        with layers.loaded(number) as layer:
            for target in _in_order(layers, layer, targets):
                layers.observer.look_at(target)
                layers.look(layer)
                inputs = layers.observer.inputs
                layers.observer.look_away()
                lost = self._put_into_codes(target, inputs, tensors, notes)
                name = target.pieces[0].name.removeprefix(layers.prefix(number))
                worst = max(worst, (name, lost), key=lambda each: each[1])
            layers.advance(layer)
        self._output.write_layer(number, tensors, notes)
        self._made.notes += notes
        return f"most is lost in {worst[0]} ({100 * worst[1]:.2f}% of its products)" if targets else "nothing to do"

    def _put_into_codes(
        self, target: RoundedMatrix, inputs: list[Inputs], tensors: dict[str, Tensor], notes: list[str]
    ) -> float:
        """Returns the share of products that is lost."""
        weight = plain(target.matrix.weight)
        count = target.num_experts or 1
        rows = weight.shape[0] // count
        error = total = 0.0
        few = 0
        for number, seen in enumerate(inputs):
            wanted = weight[number * rows : (number + 1) * rows]
            if seen.count < (1 if target.num_experts is None else _FEWEST_TOKENS):
                solved, few = round_to_nearest(wanted, self._settings), few + 1
            else:
                solved = solve(wanted, seen, self._settings)
            found = solved.widen()
            error += _size_of(found - wanted, seen)
            total += _size_of(wanted, seen)
            for piece in target.of_expert(number):
                part = _take_rows(solved, piece, number * rows)
                for suffix, tensor in pack(part, self._settings.bits).items():
                    tensors[f"{piece.name}.{suffix}"] = tensor.cpu().clone()
            wanted.copy_(found)
        if few:
            named = target.pieces[0].name
            notes.append(
                f"{named}: {few} of {count} experts got fewer than {_FEWEST_TOKENS} tokens of the text: they got"
                " the nearest codes"
            )
        return error / total if total else 0.0

    def _take_up(self, layers: Layers, number: int) -> str:
        """A layer that is finished: what comes out of it."""
        tensors, notes = self._output.read_layer(number)
        targets = self._find(layers, number)
        self._made.notes += notes
        with layers.loaded(number) as layer:
            for target in targets:
                weight = plain(target.matrix.weight)
                for piece in target.pieces:
                    stored = {suffix: tensors[f"{piece.name}.{suffix}"] for suffix in SUFFIXES}
                    wide = unpack(stored, self._settings.bits).widen().to(weight.device)
                    weight[piece.start : piece.end] = piece.to_matrix(wide)
            layers.advance(layer)
        return ""

    # -- the whole -------------------------------------------------------------------------------------------------

    def _finish(self) -> int:
        if not self._made.num_matrices:
            raise StartError(f"no matrix of this model can be quantised: {self._made.kept[0].reason or 'none may be'}")
        return self._output.finish(
            self._source.folder,
            self._checkpoint,
            len(self._model.model.layers),
            describe(self._settings, self._made.kept),
            self._dtype,
            self._max_shard_bytes,
            self._progress,
        )


def describe(settings: MakingSettings, kept: Sequence[Kept]) -> dict[str, Any]:
    """What config.json says of it: as GPTQ checkpoints do."""
    names = sorted({name for each in kept for name in each.names})
    left = {"dynamic": {f"-:^{re.escape(name)}$": dict[str, Any]() for name in names}} if names else {}
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": settings.bits,
        "group_size": settings.group_size,
        "desc_act": settings.act_order,
        "sym": settings.symmetric,
        "damp_percent": settings.percdamp,
        "static_groups": settings.has_static_groups,
        "true_sequential": True,
        "lm_head": False,
        "pack_dtype": "int32",
        **left,
        "meta": {"quantizer": [f"text-generation-inference:{__version__}"]},
    }


def _in_order(layers: Layers, layer: DecoderLayer, targets: Sequence[RoundedMatrix]) -> list[RoundedMatrix]:
    """Targets as a pass comes to them; those that it does not come to are last."""
    seen = layers.observer.note_order()
    layers.look(layer, only_first=True)
    layers.observer.stop_noting()
    places = {id(matrix): place for place, matrix in enumerate(seen)}
    return sorted(targets, key=lambda target: places.get(id(target.matrix), len(seen)))


def _take_rows(solved: Solved, piece: StoredRows, first: int) -> Solved:
    """Those of one tensor, in its order; the rows of `solved` begin with the row `first` of the matrix."""
    rows = slice(piece.start - first, piece.end - first)
    codes, scale, zero = (piece.to_stored(each[rows]) for each in (solved.codes, solved.scale, solved.zero))
    return Solved(codes, scale, zero, solved.group_of)


def _size_of(weight: Tensor, inputs: Inputs) -> float:
    """The sum of squares of all products with what came in."""
    return float(((weight @ inputs.total) * weight).sum())
