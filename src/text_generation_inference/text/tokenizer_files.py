"""The tokenizer of a model folder from whichever files it has.

`tokenizer.json` says everything. Without it, `vocab.json` and `merges.txt` (GPT-2, OPT) or `tokenizer.model` (Llama,
Baichuan, InternLM2) hold the vocabulary, and the name of the tokenizer's class says how text is cut: a class that is
not known here is refused, because a guess would silently give wrong tokens. Code that comes with a model is not run.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.files import MAX_JSON_BYTES, check_plain_file, shorten
from text_generation_inference.text.model_folder import (
    OLDER,
    SpecialTokens,
    add_special_tokens,
    older_ids,
    read_json,
)
from text_generation_inference.text.panics import reraise_unless_failure
from text_generation_inference.text.sentencepiece import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    build_sentencepiece,
    defined_apart,
    read_sentencepiece,
)

_JSON, _VOCABULARY, _MERGES, _PIECES = "tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model"
_IDS = "or serve token ids in place of text with SKIP_TOKENIZER_IN_TGI=true"
_PUT = f"Put a tokenizer.json of this model into its folder (converted copies on the hub have one), {_IDS}"
# Classes of `transformers` and of code that comes with models, and types of models in whose configs none is named.
_BYTE_LEVEL = ("GPT2Tokenizer", "CodeGenTokenizer")
_BYTE_LEVEL_MODELS = ("gpt2", "opt", "gptj", "gpt_neo", "gpt_bigcode", "codegen")
_SENTENCEPIECE = (
    "LlamaTokenizer",
    "LLaMATokenizer",
    "CodeLlamaTokenizer",
    "BaichuanTokenizer",
    "BaiChuanTokenizer",
    "InternLMTokenizer",
    "InternLM2Tokenizer",
)
_SENTENCEPIECE_MODELS = ("llama", "mistral", "mixtral", "baichuan", "internlm", "internlm2")


def has_tokenizer(names: Collection[str]) -> bool:
    """Whether a folder with these files has a tokenizer that is read here."""
    return _JSON in names or {_VOCABULARY, _MERGES} <= set(names) or _PIECES in names


def explain_missing(names: Collection[str]) -> str:
    """Why a folder with these files has none, and what to do."""
    tiktoken = next((name for name in sorted(names) if name.endswith((".tiktoken", "tiktoken.model"))), None)
    if tiktoken is not None:
        return _explain_tiktoken(tiktoken)
    return (
        f"there is no {_JSON}, nor {_VOCABULARY} with {_MERGES}, nor {_PIECES}, so text cannot be turned into tokens."
        f" Download the model again, or write the file with `AutoTokenizer.from_pretrained(folder)"
        f".save_pretrained(folder)` of transformers, {_IDS}."
    )


def _explain_tiktoken(name: str) -> str:
    return (
        f"there is no {_JSON}, and {name} alone does not say how text is cut: that is in Python code of the model,"
        f" which is not run. {_PUT}."
    )


def read_backend(folder: Path, special_tokens: SpecialTokens) -> tuple[Tokenizer, SpecialTokens]:
    """The tokenizer of a folder, and its special tokens with those that its class has in any case."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    if _JSON in names:
        return _read(folder / _JSON, lambda path: Tokenizer.from_file(str(path))), special_tokens
    if not has_tokenizer(names):
        raise ModelFormatError(f"{folder}: {explain_missing(names)}")
    config = read_json(folder, "tokenizer_config.json")
    model = read_json(folder, "config.json")
    name: object = config.get("tokenizer_class") or model.get("tokenizer_class")
    kind, found = model.get("model_type"), name.removesuffix("Fast") if isinstance(name, str) else None
    if {_VOCABULARY, _MERGES} <= names and (found in _BYTE_LEVEL or (name is None and kind in _BYTE_LEVEL_MODELS)):
        return _byte_level(folder, config, special_tokens)
    if _PIECES in names and (found in _SENTENCEPIECE or (name is None and kind in _SENTENCEPIECE_MODELS)):
        return _sentencepiece(folder, config, special_tokens)
    raise ModelFormatError(
        f"{folder}: there is no {_JSON}, and how the tokenizer {shorten(name or kind)} cuts text is not known here."
        f" {_PUT}."
    )


def surround(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Put these tokens around every text."""
    ends = {name: token for name, token in (("bos", bos), ("eos", eos)) if token is not None}
    if not ends:
        return
    special = [
        # The key is not the token itself, in which a colon would be read as syntax.
        {"id": name, "ids": [tokenizer.token_to_id(token)], "tokens": [token]}
        for name, token in ends.items()
    ]
    first, second = (
        [f"{part}:{index}" for part in ("bos", text, "eos") if part == text or part in ends]
        for index, text in enumerate(("$A", "$B"))
    )
    template = processors.TemplateProcessing(single=first, pair=first + second, special_tokens=special)
    tokenizer.post_processor = template


def _read(path: Path, read: Callable[[Path], Tokenizer]) -> Tokenizer:
    try:
        check_plain_file(path, MAX_JSON_BYTES)
        return read(path)
    except ModelFormatError:
        raise
    except BaseException as error:  # the library raises plain Exception for every kind of bad file
        reraise_unless_failure(error)
        raise ModelFormatError(f"{path} is not a valid tokenizer: {error}. Download the model again.") from error


def _byte_level(folder: Path, config: dict[str, Any], special_tokens: SpecialTokens) -> tuple[Tokenizer, SpecialTokens]:
    def build(path: Path) -> Tokenizer:
        merges = folder / _MERGES
        check_plain_file(merges, MAX_JSON_BYTES)
        return Tokenizer(cast(Any, models.BPE).from_file(str(path), str(merges)))

    tokenizer = _read(folder / _VOCABULARY, build)
    prefix = config.get("add_prefix_space") is True
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    roles = ("bos_token", "eos_token", "unk_token")
    special_tokens = _with_roles(special_tokens, dict.fromkeys(roles, "<|endoftext|>"))
    _finish(folder, tokenizer, config, special_tokens, adds_bos=False)
    return tokenizer, special_tokens


def _sentencepiece(
    folder: Path, config: dict[str, Any], special_tokens: SpecialTokens
) -> tuple[Tokenizer, SpecialTokens]:
    def read(path: Path) -> Tokenizer:
        if not path.read_bytes().startswith(b"\n"):  # the first field of a message
            raise ModelFormatError(f"{folder}: {_explain_tiktoken(_PIECES)}")
        stored = read_sentencepiece(path)
        apart = defined_apart(stored)
        pieces = _rename(stored.pieces, config)
        spaces = replace(stored.spaces, only_first=config.get("legacy") is False)
        if isinstance(prefix := config.get("add_prefix_space"), bool):
            spaces = replace(spaces, adds_prefix=prefix)
        unknown = pieces[stored.pieces.index(stored.unknown)]
        renamed = {old for old, new in zip(stored.pieces, pieces, strict=True) if old != new}
        built = build_sentencepiece(pieces, stored.scores, stored.kinds, unknown, spaces, apart - renamed)
        kinds = zip(pieces, stored.kinds, strict=True)
        marked = [
            (piece, kind)
            for piece, kind in kinds
            if kind in (UNKNOWN, CONTROL) or (kind == USER_DEFINED and piece not in apart and " " not in piece)
        ]
        built.add_tokens(  # pyright: ignore[reportUnknownMemberType]
            [AddedToken(piece, normalized=False, special=kind != USER_DEFINED) for piece, kind in marked]
        )
        return built

    tokenizer = _read(folder / _PIECES, read)
    usual = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    known = {role: token for role, token in usual.items() if tokenizer.token_to_id(token) is not None}
    special_tokens = _as_they_are(_with_roles(special_tokens, known))
    _finish(folder, tokenizer, config, special_tokens, adds_bos=True)
    return tokenizer, special_tokens


def _with_roles(special_tokens: SpecialTokens, roles: dict[str, str]) -> SpecialTokens:
    """With these tokens where a folder names none; some name an empty text."""
    named = {role: token for role, token in special_tokens.named.items() if token.content}
    usual = {role: AddedToken(text, normalized=False, special=True) for role, text in roles.items()}
    return replace(special_tokens, named=usual | named)


def _as_they_are(special_tokens: SpecialTokens) -> SpecialTokens:
    """Found in texts as they came: once spaces are pieces, one stands before each part of a text."""

    def change(token: AddedToken) -> AddedToken:
        flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "special")}
        return AddedToken(token.content, normalized=False, **flags)

    return SpecialTokens(
        named={role: change(token) for role, token in special_tokens.named.items()},
        unnamed=[change(token) for token in special_tokens.unnamed],
        declared=[change(token) for token in special_tokens.declared],
        older=[change(token) for token in special_tokens.older],
    )


def _declared_ids(config: dict[str, Any]) -> dict[int, str]:
    """Checked by `read_special_tokens`."""
    declared: dict[str, Any] = config.get("added_tokens_decoder") or {}
    return {int(token_id): fields["content"] for token_id, fields in declared.items()}


def _rename(pieces: list[str], config: dict[str, Any]) -> list[str]:
    """Tokens that a config declares take the place of pieces that were kept for them."""
    pieces, known = list(pieces), set(pieces)
    for token_id, text in _declared_ids(config).items():
        if token_id < len(pieces) and text not in known:
            pieces[token_id] = text
    return pieces


def _finish(
    folder: Path, tokenizer: Tokenizer, config: dict[str, Any], special_tokens: SpecialTokens, *, adds_bos: bool
) -> None:
    add_special_tokens(tokenizer, special_tokens)
    source, ids = "tokenizer_config.json", _declared_ids(config)
    if "added_tokens_decoder" not in config:
        source, ids = OLDER, {token_id: text for text, token_id in older_ids(folder).items()}
    for token_id, text in ids.items():
        if (found := tokenizer.token_to_id(text)) != token_id:
            raise ModelFormatError(
                f"{folder}: {_JSON} is missing, and the token {shorten(text)} has the id {found} by the vocabulary but"
                f" {token_id} by {source}. {_PUT}."
            )
    texts = special_tokens.texts()
    bos, eos = (
        texts.get(f"{name}_token") if config.get(f"add_{name}_token", default) is True else None
        for name, default in (("bos", adds_bos), ("eos", False))
    )
    surround(tokenizer, bos, eos)
