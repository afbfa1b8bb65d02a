"""Writes small GGUF files for the tests of `text_generation_inference.weights`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
BLOCK_TYPE = {name: gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "F16", "BF16")}

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]


def byte_alphabet() -> list[str]:
    """How byte-level BPE spells each of the 256 bytes."""
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    return [chr(byte) if byte in _PRINTABLE else chr(256 + others.index(byte)) for byte in range(256)]


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "Ġ Ġ", "ĠĠ ĠĠ"]
TOKENS = [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
TOKEN_TYPES = [3, 3, 3, 4] + [1] * (len(TOKENS) - 4)


def metadata(changes: Mapping[str, Any] | None = None, arch: str = "llama") -> dict[str, Any]:
    """The metadata of the tiny model; a change to None removes the key."""
    values: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": INNER,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TOKEN_TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    values |= changes or {}
    return {key: value for key, value in values.items() if value is not None}


def weights(vocab: int = len(TOKENS), seed: int = 0, hidden: int = HIDDEN, inner: int = INNER) -> dict[str, np.ndarray]:
    """Random float32 tensors of the tiny model under their GGUF names."""
    random = np.random.default_rng(seed)
    kv = hidden // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    for layer in range(LAYERS):
        parts = {"attn_norm": (hidden,), "attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
        parts |= {"attn_output": (hidden, hidden), "ffn_norm": (hidden,), "ffn_gate": (inner, hidden)}
        parts |= {"ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return {name: random.standard_normal(shape, dtype=np.float32) * 0.1 for name, shape in shapes.items()}


def write(
    path: Path,
    values: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    quantise: str = "",
    blocks: Mapping[str, tuple[str, np.ndarray]] | None = None,
) -> Path:
    """Write a GGUF file; `quantise` names the type of all matrices, `blocks` holds those that come as blocks of a type."""
    values = metadata() if values is None else values
    writer = gguf.GGUFWriter(path, values["general.architecture"])
    for key, value in values.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, tensor in (weights() if tensors is None else tensors).items():
        if quantise and tensor.ndim == 2:
            kind = BLOCK_TYPE[quantise]
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    for name, (kind, rows) in (blocks or {}).items():
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def permute_rows(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Hugging Face query or key rows as llama.cpp stores them: the two halves of each head interleaved."""
    head_dim = len(tensor) // num_heads
    stored = np.empty_like(tensor)
    for head in range(num_heads):
        for index in range(head_dim // 2):
            stored[head * head_dim + 2 * index] = tensor[head * head_dim + index]
            stored[head * head_dim + 2 * index + 1] = tensor[head * head_dim + head_dim // 2 + index]
    return stored
