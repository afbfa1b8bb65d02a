"""Reads what a model folder says about text: its JSON files and the special tokens they name.

First step of loading, shared by the tokenizer and the chat template so that both see the same special tokens. Files may
be absent; a file that is present must be readable. Knows nothing of the model's weights or dimensions.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.files import read_json_object, shorten

OLDER = "added_tokens.json"


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens a folder declares beside `tokenizer.json`."""

    named: dict[str, AddedToken]  # by role: "bos_token", "eos_token", "image_token", ...
    unnamed: list[AddedToken]  # special without a role
    declared: list[AddedToken]  # added tokens, special or not, whose flags override those in `tokenizer.json`
    older: list[AddedToken]  # added tokens from the older form, which override nothing

    def texts(self) -> dict[str, str]:
        """The text of each named token, by role."""
        return {role: token.content for role, token in self.named.items()}


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in the file `name`; empty when there is no such file."""
    return _read_object(folder / name)


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """The object in a file that takes the place of a folder's `tokenizer_config.json`, and so must be there."""
    if not path.is_file():
        raise ModelFormatError(f"{path} is missing. Give the path of a file like a model's `tokenizer_config.json`.")
    return _read_object(path)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}


def read_special_tokens(folder: Path, config: dict[str, Any] | None = None) -> SpecialTokens:
    """The special tokens of a folder, with the precedence of transformers.

    `special_tokens_map.json` and `added_tokens.json` are the older form: they count only when `tokenizer_config.json`
    does not list the added tokens itself. A `config` given here takes the place of that file and comes before them.
    """
    given = config or {}
    config = read_json(folder, "tokenizer_config.json") if config is None else config
    extra = _extra_tokens(config)
    if "added_tokens_decoder" not in config:
        older = read_json(folder, "special_tokens_map.json")
        config = {**config, **older, **given}
        extra = extra or _extra_tokens(older)

    roles = {key: value for key, value in config.items() if key.endswith("_token")}
    if isinstance(extra, dict):
        roles.update(extra)
        extra = []
    named = {role: token for role, value in roles.items() if (token := _special_token(value)) is not None}
    unnamed = [token for value in extra if (token := _special_token(value)) is not None]

    special = {token.content for token in [*named.values(), *unnamed]}
    declared = _declared_tokens(folder, config)
    older = [] if "added_tokens_decoder" in config else _older_tokens(folder, special)
    # A declared token carries the flags (stripping, normalising) that a role given as plain text lacks.
    by_text = {token.content: token for token in [*older, *declared]}
    named = {role: by_text.get(token.content, token) for role, token in named.items()}
    return SpecialTokens(named, unnamed, declared, older)


def add_special_tokens(backend: Tokenizer, special_tokens: SpecialTokens) -> None:
    """Add those that a tokenizer lacks, and give those that it has the flags that a folder declares."""
    tokens = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    tokens.update({token.content: token for token in special_tokens.declared})
    for token in [*special_tokens.older, *special_tokens.named.values(), *special_tokens.unnamed]:
        tokens.setdefault(token.content, token)
    for text in special_tokens.texts().values():
        tokens[text].special = True  # a token with a role is special, whatever its flag says
    backend.add_tokens(list(tokens.values()))  # pyright: ignore[reportUnknownMemberType]


def _extra_tokens(config: dict[str, Any]) -> list[Any] | dict[str, Any]:
    value: object = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    if isinstance(value, list):
        return cast(list[Any], value)
    return cast(dict[str, Any], value) if isinstance(value, dict) else []


def _declared_tokens(folder: Path, config: dict[str, Any]) -> list[AddedToken]:
    path = folder / "tokenizer_config.json"
    declared: object = config.get("added_tokens_decoder", {})
    if not isinstance(declared, dict):
        raise ModelFormatError(f"{path}: `added_tokens_decoder` must be an object. Download the model again.")
    by_id: dict[int, AddedToken] = {}
    for token_id, fields in cast(dict[str, Any], declared).items():
        if not token_id.isdecimal() or (token := _token_of(fields, special=False)) is None:
            raise ModelFormatError(
                f"{path}: `added_tokens_decoder` holds no token under {token_id!r}. Download the model again."
            )
        by_id[int(token_id)] = token
    return [by_id[token_id] for token_id in sorted(by_id)]


def older_ids(folder: Path) -> dict[str, int]:
    """Tokens beside the vocabulary, where tokenizer_config.json declares none."""
    ids = read_json(folder, OLDER)
    for text, token_id in ids.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ModelFormatError(f"{folder / OLDER} has no id for {shorten(text)}. Download the model again.")
    return ids


def _older_tokens(folder: Path, special: set[str]) -> list[AddedToken]:
    ids = older_ids(folder)
    texts = sorted(ids, key=lambda text: ids[text])
    return [_added(text, normalized=text not in special, special=text in special) for text in texts]


def _special_token(value: object) -> AddedToken | None:
    if isinstance(value, str):
        return _added(value, special=True)
    return _token_of(value, special=True)


def _token_of(value: object, special: bool) -> AddedToken | None:
    """A token from its JSON fields, or None when the value is something else."""
    if not isinstance(value, dict):
        return None
    fields = cast(dict[str, Any], value)
    if not isinstance(fields.get("content"), str):
        return None
    is_special = special or bool(fields.get("special", False))
    return _added(
        fields["content"],
        single_word=bool(fields.get("single_word", False)),
        lstrip=bool(fields.get("lstrip", False)),
        rstrip=bool(fields.get("rstrip", False)),
        normalized=bool(fields.get("normalized", not is_special)),
        special=is_special,
    )


def _added(text: str, **flags: bool) -> AddedToken:
    try:
        return AddedToken(text, **flags)
    except (TypeError, UnicodeError) as error:  # JSON can say half of a pair of surrogates, which no text holds
        raise ModelFormatError(
            f"the tokenizer's files name a special token that is no text: {text[:40]!r}. Download the model again."
        ) from error
