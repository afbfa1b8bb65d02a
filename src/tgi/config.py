"""What the user asked for, and what follows from it.

Level 0. `ServerConfig` is what was asked; `read_environment` is the only reader of the environment; `resolve` is a pure
function from the configuration, the model's size and the device's limits to every number the engine runs with, each
with the reason it has that value.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tgi.errors import ResourceError, StartError
from tgi.types import Limits

DTYPES = ("float32", "float16", "bfloat16")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    model_id: str = "embedded"  # "embedded", a folder, a .gguf file, or a hub id
    revision: str | None = None
    device: str = "auto"
    dtype: str | None = None
    load_format: str = "safetensors"  # or "dummy": seeded random weights from the config alone
    seed: int = 0  # of dummy weights
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    max_batch_total_tokens: int | None = None
    max_batch_size: int | None = None
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    prefix_caching: bool = True
    overlap: bool = True  # plan the next step while one runs
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    custom_kernels: bool = True
    cache_dir: str = ""  # converted models and compiled kernels; empty: the user's cache folder
    offline: bool = False
    num_threads: int | None = None

    def check(self) -> None:
        """Raise `StartError` naming the first setting that makes no sense."""
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise StartError(f"`{name}` must be > 0. Given: {value}")
        if self.num_threads is not None and self.num_threads > 1024:
            raise StartError(f"`num_threads` must be <= 1024. Given: {self.num_threads}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise StartError(f"`dtype` must be one of {', '.join(DTYPES)}. Given: {self.dtype}")
        if self.load_format not in ("safetensors", "dummy"):
            raise StartError(f"`load_format` must be safetensors or dummy. Given: {self.load_format}")
        if not 0 < self.watermark_gamma < 1:
            raise StartError(f"`watermark_gamma` must be > 0 and < 1. Given: {self.watermark_gamma}")
        if self.waiting_served_ratio < 0 or self.max_waiting_tokens < 0:
            raise StartError("`waiting_served_ratio` and `max_waiting_tokens` must be >= 0")


_POSITIVE = (
    "max_input_tokens",
    "max_total_tokens",
    "max_batch_prefill_tokens",
    "max_batch_total_tokens",
    "max_batch_size",
    "num_threads",
)


def read_environment(environment: Mapping[str, str] | None = None) -> dict[str, object]:
    """`ServerConfig` fields given by environment variables, each the field's name in capitals."""
    environment = os.environ if environment is None else environment
    types = {field.name: field.type for field in msgspec.structs.fields(ServerConfig)}
    names = {
        name.upper(): name
        for name in types
        if name not in ("cache_dir", "offline", "custom_kernels", "seed", "device", "overlap", "num_threads")
    }
    names |= {"TGI_CACHE_DIR": "cache_dir", "HF_HUB_OFFLINE": "offline", "TGI_DEVICE": "device"}
    given: dict[str, object] = {}
    for variable, name in names.items():
        text = environment.get(variable)
        if text:
            try:
                given[name] = msgspec.convert(_spell(text, types[name]), types[name], strict=False)
            except msgspec.ValidationError as error:
                raise StartError(f"environment variable {variable}={text!r} is not valid: {error}") from None
    return given


def _spell(text: str, kind: object) -> str:
    """Spellings of true and false that msgspec does not take."""
    if kind is bool:
        return {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(text.lower(), text)
    return text


def cache_folder(config: ServerConfig, environment: Mapping[str, str] | None = None) -> Path:
    """Where converted models and compiled kernels are kept."""
    environment = os.environ if environment is None else environment
    if config.cache_dir:
        return Path(config.cache_dir).expanduser()
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tgi"


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """What `resolve` must know of a model."""

    max_positions: int  # longest sequence it was made for
    kv_bytes_per_token: int  # on one rank, all layers


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """Every derived number, and for each the reason in words."""

    block_size: int
    num_blocks: int  # the padding block included
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_size: int
    reasons: dict[str, str]


def resolve(config: ServerConfig, size: ModelSize, limits: Limits, free_bytes: int) -> Resolved:
    """Derive the engine's numbers. `free_bytes` is the memory free on the device once the weights are loaded."""
    config.check()
    reasons: dict[str, str] = {}
    batch_size = config.max_batch_size or limits.max_batch_size
    reasons["max_batch_size"] = "as given" if config.max_batch_size else "the device's default"
    longest = size.max_positions
    reasons["max_total_tokens"] = "positions of the model"
    if config.max_total_tokens:
        longest = config.max_total_tokens
        reasons["max_total_tokens"] = "as given"
        if longest > size.max_positions:
            raise StartError(
                f"`max_total_tokens` must be <= {size.max_positions}, the positions of the model. Given: {longest}"
            )
    if longest < 2:
        raise StartError(f"`max_total_tokens` must be >= 2. Given: {longest}")
    num_tokens = _pool_tokens(config, size, limits, free_bytes, batch_size * longest, reasons)
    num_blocks = max(1, num_tokens // limits.block_size)
    pool_tokens = num_blocks * limits.block_size
    if pool_tokens < longest:
        if config.max_total_tokens and config.max_batch_total_tokens:
            raise StartError(
                "`max_total_tokens` must be <= `max_batch_total_tokens`."
                f" Given: {config.max_total_tokens} and {config.max_batch_total_tokens}"
            )
        if config.max_total_tokens:
            raise ResourceError(
                f"Not enough memory to handle `max_total_tokens={longest}`: the KV cache has room for {pool_tokens}"
                f" tokens ({_gigabytes(free_bytes)} free). Lower `max_total_tokens` or free memory."
            )
        longest = pool_tokens
        reasons["max_total_tokens"] = "tokens in the KV cache"
    max_input = config.max_input_tokens or longest - 1
    reasons["max_input_tokens"] = "as given" if config.max_input_tokens else "max_total_tokens - 1"
    if max_input >= longest:
        raise StartError(f"`max_input_tokens`({max_input}) must be < `max_total_tokens`({longest})")
    prefill = config.max_batch_prefill_tokens or min(limits.max_batch_prefill_tokens, pool_tokens)
    reasons["max_batch_prefill_tokens"] = "as given" if config.max_batch_prefill_tokens else "the device's default"
    if limits.mixes_phases:
        reasons["waiting_served_ratio, max_waiting_tokens"] = "no effect: prefill and decode share a step here"
    elif prefill < max_input:
        raise StartError(f"`max_batch_prefill_tokens` must be >= `max_input_tokens`. Given: {prefill} and {max_input}")
    return Resolved(
        block_size=limits.block_size,
        num_blocks=num_blocks + 1,
        max_input_tokens=max_input,
        max_total_tokens=longest,
        max_batch_prefill_tokens=prefill,
        max_batch_size=batch_size,
        reasons=reasons,
    )


def _pool_tokens(
    config: ServerConfig, size: ModelSize, limits: Limits, free_bytes: int, useful: int, reasons: dict[str, str]
) -> int:
    """Tokens the KV cache holds: as given, else what memory allows, at most what a full batch can use."""
    affordable = int(free_bytes * limits.memory_share) // size.kv_bytes_per_token
    if config.max_batch_total_tokens:
        needed = config.max_batch_total_tokens * size.kv_bytes_per_token
        if needed > free_bytes:
            raise ResourceError(
                f"Not enough memory for a KV cache of `max_batch_total_tokens={config.max_batch_total_tokens}`: it"
                f" needs {_gigabytes(needed)}, {_gigabytes(free_bytes)} are free."
                f" At most {free_bytes // size.kv_bytes_per_token} tokens fit."
            )
        reasons["max_batch_total_tokens"] = "as given"
        return -(-config.max_batch_total_tokens // limits.block_size) * limits.block_size
    if affordable < limits.block_size:
        raise ResourceError(
            f"Not enough memory for a KV cache: {_gigabytes(free_bytes)} are free once the weights are loaded, and one"
            f" token takes {size.kv_bytes_per_token:,} bytes. Free memory or use a smaller model."
        )
    if useful <= affordable:
        reasons["max_batch_total_tokens"] = "max_batch_size x max_total_tokens"
        return -(-useful // limits.block_size) * limits.block_size
    reasons["max_batch_total_tokens"] = f"{limits.memory_share:.0%} of the {_gigabytes(free_bytes)} of memory free"
    return affordable


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
