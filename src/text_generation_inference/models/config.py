"""`Config`: a Hugging Face config whose missing or wrong fields are named in the error.

A family says what its missing fields mean (`with_defaults`) and what its fields are called (`renamed`); null is not
missing: a reader either has a meaning for it or refuses it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.files import shorten

# Far beyond any model, and small enough that what follows from them can be computed before anything is allocated.
_MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "expansion_ratio": 2**10,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "n_routed_experts": 2**14,
    "moe_intermediate_size": 2**22,
    "shared_expert_intermediate_size": 2**22,
    "n_shared_experts": 2**14,
    "kv_lora_rank": 2**20,
    "q_lora_rank": 2**20,
    "qk_nope_head_dim": 2**14,
    "qk_rope_head_dim": 2**14,
    "v_head_dim": 2**14,
    "depth": 2**12,
    "num_global_layers": 2**12,
    "resampler_depth": 2**12,
    "resampler_n_latents": 2**16,
    "resampler_n_heads": 2**14,
    "resampler_head_dim": 2**14,
    "attention_heads": 2**14,
    "max_num_tiles": 2**8,
    "num_position_embeddings": 2**24,
    "projection_dim": 2**20,
    "embed_dim": 2**20,
    "num_heads": 2**14,
    "out_hidden_size": 2**20,
    "image_size": 2**16,
    "patch_size": 2**12,
    "temporal_patch_size": 2**8,
    "spatial_merge_size": 2**8,
}
_MOST_OF_ANY = 2**62
_LARGEST = 10**30


class Config:
    def __init__(
        self, fields: Mapping[str, Any], source: str, within: str = "", names: Mapping[str, str] | None = None
    ) -> None:
        self.fields = fields
        self.source = source
        self._within = within  # the object that these fields are in, with a dot
        self._names = names or {}  # what a field is called in the file, where that is another name

    def with_defaults(self, **values: Any) -> Self:
        """What fields mean that are not there; null stays null."""
        return type(self)({**values, **self.fields}, self.source, self._within, self._names)

    def renamed(self, **others: str) -> Self:
        """With names that Llama's config has for fields that are called otherwise. The first of two names counts."""
        found = {ours: theirs for ours, theirs in others.items() if theirs in self.fields and ours not in self.fields}
        fields = {**self.fields, **{ours: self.fields[theirs] for ours, theirs in found.items()}}
        return type(self)(fields, self.source, self._within, {**self._names, **found})

    def inner(self, name: str) -> Self:
        """The fields of an object in this one; none where it is missing or null."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, f"must be an object, it is {shorten(value)}")
        return type(self)(value or {}, self.source, f"{self._within}{name}.")

    def wrong(self, name: str, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self.source}: `{self._within}{self._names.get(name, name)}` {what}")

    def integer(self, name: str, default: int | None = None) -> int:
        """Null is the default: of sizes that follow from others (`num_key_value_heads`, `n_inner`)."""
        value = self.fields.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.wrong(name, f"must be a positive integer, it is {shorten(value)}")
        most = _MOST.get(name, _MOST_OF_ANY)
        if value > most:
            raise self.wrong(name, f"must be at most {most}, it is {shorten(value)}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """An integer that may be 0, which is what null means too."""
        value = self.fields.get(name, default)
        return 0 if value in (0, None) and not isinstance(value, bool | float) else self.integer(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, f"must be a number, it is {shorten(value)}")
        return float(max(-_LARGEST, min(value, _LARGEST))) if isinstance(value, int) else value  # others overflow

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if not 0 < value < _LARGEST:  # nor may it be NaN
            raise self.wrong(name, f"must be > 0 and < {_LARGEST:g}, it is {value}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.fields.get(name) is None else self.integer(name)

    def optional_number(self, name: str) -> float | None:
        value = None if self.fields.get(name) is None else self.number(name)
        if value is not None and not abs(value) < _LARGEST:
            raise self.wrong(name, f"must be finite, it is {value}")
        return value

    def optional_positive(self, name: str) -> float | None:
        return None if self.fields.get(name) is None else self.positive(name)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Null is false, as it is to Python, where false is the default too."""
        value = self.fields.get(name, default)
        value = False if value is None and default is False else value
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, it is {shorten(value)}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.fields.get(name)
        return default if value is None else str(value)

    def choice(self, name: str, known: Collection[str], default: str | None = None) -> str:
        value = self.fields.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(name, f"is {shorten(value)}, which is not supported; known: {', '.join(known)}")
        return value

    def words(self, name: str, count: int, known: Collection[str]) -> list[str] | None:
        """So many of the words known; None where the field is missing or null."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != count:
            raise self.wrong(name, f"must be a list of {count} words, it is {shorten(value)}")
        for word in value:
            if not isinstance(word, str) or word not in known:
                raise self.wrong(name, f"has {shorten(word)}, which is not supported; known: {', '.join(known)}")
        return list(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """So many numbers above 0."""
        value = self.fields.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != count:
            raise self.wrong(name, f"must be a list of {count} numbers, it is {shorten(value)}")
        return tuple(Config({name: each}, self.source, self._within).positive(name) for each in value)

    def refuse(self, name: str, *meant: object) -> None:
        """Raise unless a field is missing, null, or one of the values that mean what is computed."""
        value = self.fields.get(name)
        if value is not None and value not in meant:
            raise self.wrong(name, f"is {shorten(value)}, which is not supported")

    def get(self, name: str) -> Any:
        return self.fields.get(name)


def windows_by_layer(config: Config, num_layers: int, default: Sequence[bool], window: int | None) -> list[int | None]:
    """The window of each layer: `layer_types` says which have one; `default` does where it is missing."""
    types = config.words("layer_types", num_layers, ("full_attention", "sliding_attention"))
    is_windowed = [each == "sliding_attention" for each in types] if types is not None else list(default)
    if window is None and types is not None and any(is_windowed):
        raise config.wrong("layer_types", "has layers with a window, but `sliding_window` is null")
    return [window if each else None for each in is_windowed]
