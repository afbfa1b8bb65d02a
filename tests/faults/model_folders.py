"""Model folders that somebody has tampered with, made on the spot: small, and each with one thing wrong.

`FOLDERS` says for each what is done to a sound folder, and words of the error that a start must end with.
"""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def make_sound(folder: Path) -> Path:
    """A model that starts."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    vocabulary = {chr(32 + number): number for number in range(64)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.save(str(folder / "tokenizer.json"))
    hidden, inner, key_values = 32, 48, 16
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (64, hidden), "lm_head.weight": (64, hidden)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (key_values, hidden),
            prefix + "self_attn.v_proj.weight": (key_values, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    tensors = {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    norms = [
        f"model.layers.{layer}.{name}" for layer in range(2) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in [*norms, "model.norm"]}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


Tamper = Callable[[Path], None]


def config(**fields: Any) -> Tamper:
    def change(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))

    return change


def text(name: str, content: str) -> Tamper:
    return lambda folder: (folder / name).write_text(content) and None


def both(*tampers: Tamper) -> Tamper:
    def change(folder: Path) -> None:
        for tamper in tampers:
            tamper(folder)

    return change


def deep(name: str) -> Tamper:
    return text(name, '{"a":' * 100_000 + "1" + "}" * 100_000)


def pipe(name: str) -> Tamper:
    """Who opens it waits until somebody writes."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def device(name: str, target: str = "/dev/zero") -> Tamper:
    """Never ends."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return change


def sparse(name: str, num_bytes: int) -> Tamper:
    """Takes no room on the disk, and all memory of who reads it."""

    def change(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(num_bytes)

    return change


def tensors(**changes: float) -> Tamper:
    """Fill tensors with a value; the names have `__` for dots."""

    def change(folder: Path) -> None:
        loaded = load_file(folder / WEIGHTS)
        for name, value in changes.items():
            loaded[name.replace("__", ".")].fill_(value)
        save_file(loaded, folder / WEIGHTS, {"format": "pt"})

    return change


def header(change_header: Callable[[str], str], length: int | None = None) -> Tamper:
    """Change the header of the weights, and say another length of it."""

    def change(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (old_length,) = struct.unpack("<Q", data[:8])
        new = change_header(data[8 : 8 + old_length].decode()).encode()
        said = struct.pack("<Q", len(new) if length is None else length)
        (folder / WEIGHTS).write_bytes(said + new + data[8 + old_length :])

    return change


def _lie(header_text: str, **fields: Any) -> str:
    entries = json.loads(header_text)
    entries["model.norm.weight"].update(fields)
    return json.dumps(entries)


def _twice(header_text: str) -> str:
    entries = json.loads(header_text)
    again = json.dumps({"lm_head.weight": entries["lm_head.weight"]})
    return header_text.rstrip()[:-1] + "," + again[1:]


def index(file_name: str) -> Tamper:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": file_name}}))

    return change


def gguf(data: bytes) -> Tamper:
    def change(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        (folder / "model.gguf").write_bytes(data)

    return change


def _only_gguf_pipe(folder: Path) -> None:
    gguf(b"")(folder)
    pipe("model.gguf")(folder)


GGUF_HEAD = b"GGUF" + struct.pack("<I", 3)

FOLDERS: dict[str, tuple[Tamper, str]] = {
    # -- dimensions
    "hidden size of a billion": (config(hidden_size=10**9), "`hidden_size` must be at most"),
    "hidden size beyond integers": (config(hidden_size=10**400), "`hidden_size` must be at most"),
    "negative hidden size": (config(hidden_size=-32), "`hidden_size` must be a positive integer"),
    "no hidden size": (config(hidden_size=None), "`hidden_size` must be a positive integer"),
    "hidden size zero": (config(hidden_size=0), "`hidden_size` must be a positive integer"),
    "hidden size as float": (config(hidden_size=32.0), "`hidden_size` must be a positive integer"),
    "hidden size as text": (config(hidden_size="32"), "`hidden_size` must be a positive integer"),
    "hidden size true": (config(hidden_size=True), "`hidden_size` must be a positive integer"),
    "a million layers": (config(num_hidden_layers=10**6), "`num_hidden_layers` must be at most"),
    "a billion layers": (config(num_hidden_layers=10**9), "`num_hidden_layers` must be at most"),
    "layers that are not there": (config(num_hidden_layers=4000), "model.layers.2"),
    "a vocabulary of 2^40": (config(vocab_size=2**40), "`vocab_size` must be at most"),
    "a vocabulary of 2^24": (config(vocab_size=2**24), "has shape [64, 32]"),
    "a wide model": (config(hidden_size=2**20, intermediate_size=2**22, head_dim=8), "has shape"),
    "an intermediate size of 10^12": (config(intermediate_size=10**12), "`intermediate_size` must be at most"),
    "heads of 10^9": (config(head_dim=10**9), "`head_dim` must be at most"),
    "heads that do not divide": (config(num_attention_heads=5, num_key_value_heads=5), "has shape"),
    "key heads that do not divide": (config(num_key_value_heads=3), "cannot share 3 key/value heads"),
    "more heads than dimensions": (
        config(num_attention_heads=64, num_key_value_heads=64),
        "`num_attention_heads` is 64, more than there are hidden dimensions",
    ),
    "positions beyond integers": (config(max_position_embeddings=10**30), "`max_position_embeddings` must be at most"),
    "eps NaN": (config(rms_norm_eps=float("nan")), "`rms_norm_eps` must be > 0"),
    "eps infinite": (config(rms_norm_eps=float("inf")), "`rms_norm_eps` must be > 0"),
    "eps as text": (config(rms_norm_eps="1e-5"), "`rms_norm_eps` must be a number"),
    "eps beyond floats": (config(rms_norm_eps=10**400), "`rms_norm_eps` must be > 0"),
    "theta zero": (config(rope_theta=0), "`rope_theta` must be > 0"),
    "theta infinite": (config(rope_theta=float("inf")), "`rope_theta` must be > 0"),
    "rotary factor NaN": (
        config(rope_scaling={"rope_type": "yarn", "factor": 2.0, "attention_factor": float("nan")}),
        "`rope_scaling.attention_factor` must be finite",
    ),
    "a long architecture": (config(architectures=["x" * 10**6]), "is not supported"),
    "an end of text that is none": (config(eos_token_id=-1), "`eos_token_id` must be a token id"),
    # -- JSON
    "deep config": (deep("config.json"), "nested too deeply"),
    "deep tokenizer": (deep("tokenizer.json"), "is not a valid tokenizer"),
    "deep tokenizer config": (deep("tokenizer_config.json"), "nested too deeply"),
    "deep generation config": (deep("generation_config.json"), "nested too deeply"),
    "deep index": (both(lambda f: (f / WEIGHTS).unlink(), deep(INDEX)), "nested too deeply"),
    "config that is no object": (text("config.json", "[1]"), "must hold a JSON object"),
    "config that is no text": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00") and None,
        "is not valid JSON",
    ),
    # -- files that are none
    "config as pipe": (pipe("config.json"), "is a pipe"),
    "weights as pipe": (pipe(WEIGHTS), "is a pipe"),
    "tokenizer as pipe": (pipe("tokenizer.json"), "is a pipe"),
    "tokenizer config as pipe": (pipe("tokenizer_config.json"), "is a pipe"),
    "a GGUF file as pipe": (_only_gguf_pipe, "is a pipe"),
    "config as device": (device("config.json"), "is a device"),
    "weights as device": (device(WEIGHTS), "is a device"),
    "weights as folder": (both(lambda f: (f / WEIGHTS).unlink(), lambda f: (f / WEIGHTS).mkdir()), "is a folder"),
    "tokenizer as device": (device("tokenizer.json"), "is a device"),
    "generation config as device": (device("generation_config.json"), "is a device"),
    "config without end": (sparse("config.json", 2**40), "such a file has at most"),
    "tokenizer without end": (sparse("tokenizer.json", 2**40), "such a file has at most"),
    "weights without end": (sparse(WEIGHTS, 2**42), "is not a sound safetensors file"),
    # -- weights that lie
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "holds no .safetensors file"),
    "header of 2^62 bytes": (header(lambda text: text, 2**62), "is not a sound safetensors file"),
    "header cut": (header(lambda text: text, 40), "is not a sound safetensors file"),
    "header deep": (header(lambda text: "[" * 100_000), "is not a sound safetensors file"),
    "offsets behind the end": (header(lambda text: _lie(text, data_offsets=[2**40, 2**40 + 128])), "is not a sound"),
    "offsets that overlap": (header(lambda text: _lie(text, data_offsets=[0, 128])), "is not a sound"),
    "negative offsets": (header(lambda text: _lie(text, data_offsets=[-128, 0])), "is not a sound"),
    "a shape of 2^64": (header(lambda text: _lie(text, shape=[2**32, 2**32])), "is not a sound"),
    "a name twice": (header(_twice), "is not a sound safetensors file"),
    "index out of the folder": (index("../../etc/passwd"), "which is no .safetensors file of this folder"),
    "index to a root path": (index("/etc/passwd.safetensors"), "which is no .safetensors file of this folder"),
    "index to a file that is not there": (index("other.safetensors"), "is listed in"),
    "GGUF of a few bytes": (gguf(b"GGUF"), "too few for a GGUF file"),
    "GGUF of another kind": (gguf(b"PK\x03\x04" + bytes(100)), "GGUF"),
    "GGUF with 2^60 tensors": (gguf(GGUF_HEAD + struct.pack("<QQ", 2**60, 1) + bytes(64)), "GGUF"),
    "GGUF with a key of 2^60 bytes": (gguf(GGUF_HEAD + struct.pack("<QQQ", 0, 1, 2**60) + bytes(64)), "GGUF"),
    # -- numbers that are none
    "NaN weights": (tensors(model__norm__weight=float("nan")), "not finite"),
    "infinite weights": (tensors(lm_head__weight=float("inf")), "not finite"),
}


def panicking_tokenizer(folder: Path) -> None:
    """Its expression panics on many `X` in a row."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(X+X+)+Y"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
