"""Converts a GGUF file, once, into a cached folder laid out like a Hugging Face model.

`source` calls `convert_gguf`; `checkpoint` reads the result. Values are the exact float32 of the quantised ones, and
the blocks themselves are kept beside them in `ggml.safetensors`, for kernels that compute from them. Tensors pass
through memory in slices of a few megabytes, whatever the size of the model.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from text_generation_inference.files import check_plain_file
from text_generation_inference.weights.cache import is_complete, publish_folder
from text_generation_inference.weights.gguf import GgufFile, find_parts, to_float32
from text_generation_inference.weights.gguf_model import TensorPlan, plan_tensors, read_config, read_generation_config
from text_generation_inference.weights.gguf_tokenizer import read_tokenizer, read_tokenizer_config
from text_generation_inference.weights.model_files import BLOCKS, CONFIG, WEIGHTS
from text_generation_inference.weights.progress import Progress, silent
from text_generation_inference.weights.safetensors_layout import SafetensorsLayout

CONVERTER_VERSION = 5  # raise it when the output changes, so that older cached folders are not reused
_OF_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
GGML_TYPES = (*_OF_32, "IQ4_XS", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_SLICE_BYTES = 4 * 2**20  # of float32 output
_PROBE_BYTES = 2**20
_SMALL_FILES_BYTES = 32 * 2**20  # tokenizer and configs, generously


def cache_folder(cache_dir: Path, name: str, digest: str) -> Path:
    """Where the conversion of the file `name` with this content digest is kept."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "model"
    return cache_dir / "converted" / f"{safe[:80]}-{digest[:16]}-v{CONVERTER_VERSION}"


def probe_digest(path: Path) -> str:
    """A digest that changes when the file does, without reading gigabytes: size, time and both ends of the content.

    Of a split model, that of all parts.
    """
    digest = hashlib.sha256()
    for part in find_parts(path):
        check_plain_file(part)
        stat = part.stat()
        digest.update(struct.pack("<QQ", stat.st_size, stat.st_mtime_ns))
        with part.open("rb") as file:
            digest.update(file.read(_PROBE_BYTES))
            file.seek(max(0, stat.st_size - _PROBE_BYTES))
            digest.update(file.read(_PROBE_BYTES))
    return digest.hexdigest()


def convert_gguf(path: Path, folder: Path, progress: Progress = silent) -> bool:
    """Make `folder` from the GGUF file at `path`; returns False if it was there already.

    Raises `ModelFormatError` for a file that cannot be converted and `ResourceError` for a full or read-only disk;
    either way, and when interrupted, nothing half-written is left.
    """
    if is_complete(folder):
        return False
    progress("reading model file", 0, 0)
    file = GgufFile.open(path)
    config = read_config(file)
    plans = plan_tensors(file, config)
    texts = describe_gguf(file, config)
    weights = SafetensorsLayout(
        {plan.name: ("F32", plan.shape, 4 * math.prod(plan.shape)) for plan in plans}, {"format": "pt"}
    )
    kept = {
        plan.name: plan.source
        for plan in plans
        if plan.keeps_blocks and plan.source is not None and plan.source.type_name in GGML_TYPES
    }
    stored = {plan.name: plan.stored_rows(file) for plan in plans if plan.name in kept}
    blocks = SafetensorsLayout(
        {name: ("U8", rows.shape, rows.size) for name, rows in stored.items()},
        {name: source.type_name for name, source in kept.items()},
    )

    def fill(temporary: Path) -> None:
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        with (temporary / WEIGHTS).open("wb") as values, (temporary / BLOCKS).open("wb") as raw:
            values.write(weights.header)
            raw.write(blocks.header)
            done = 0
            for plan in plans:
                for num_written in _write_tensor(file, plan, values, raw if plan.name in kept else None):
                    done += num_written
                    progress("converting weights", done, weights.num_bytes)

    num_bytes = weights.num_bytes + blocks.num_bytes + _SMALL_FILES_BYTES
    return publish_folder(folder, num_bytes, fill, lambda: progress("waiting for another process to convert", 0, 0))


def describe_gguf(file: GgufFile, config: dict[str, Any]) -> dict[str, str]:
    """Every file of its folder but the weights, by name. Raises if there is no tokenizer that can be used."""
    return {
        CONFIG: _to_json(config),
        "generation_config.json": _to_json(read_generation_config(file, config["vocab_size"])),
        "tokenizer.json": read_tokenizer(file, config["vocab_size"]).to_str(),
        "tokenizer_config.json": _to_json(read_tokenizer_config(file, config["max_position_embeddings"])),
    }


def _write_tensor(file: GgufFile, plan: TensorPlan, values: BinaryIO, raw: BinaryIO | None) -> Iterator[int]:
    """Append one tensor to the open files; yields the bytes of values written by each slice."""
    if plan.make is not None:
        yield values.write(_to_bytes(plan.make()))
    elif plan.source is None:
        yield values.write(bytes(4 * math.prod(plan.shape)))
    elif not plan.keeps_blocks:
        row = to_float32(plan.stored_rows(file), plan.source.type_name)[0] + np.float32(plan.offset)
        yield values.write(_to_bytes(row if plan.row_order is None else row[plan.row_order]))
    else:
        for stored in _row_slices(plan.stored_rows(file), plan):
            yield values.write(_to_bytes(to_float32(stored, plan.source.type_name)))
            if raw is not None:
                raw.write(stored.tobytes())


def _row_slices(rows: np.ndarray, plan: TensorPlan) -> Iterator[np.ndarray]:
    """The stored rows in the order of the converted weight, a few megabytes at a time."""
    step = max(1, _SLICE_BYTES // (4 * plan.shape[-1]))
    for start in range(0, len(rows), step):
        if plan.row_order is None:
            yield rows[start : start + step]
        else:
            yield rows[plan.row_order[start : start + step]]


def _to_bytes(values: np.ndarray) -> bytes:
    return values.astype("<f4", copy=False).tobytes()


def _to_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
