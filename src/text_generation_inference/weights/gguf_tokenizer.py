"""The tokenizer stored in a GGUF file, as `tokenizer.json` and `tokenizer_config.json`.

Between `gguf` (format) and `convert` (writing). Two kinds exist in the supported architectures: byte-level BPE with
merges (`gpt2`), and SentencePiece BPE with scores (`llama`). How text is cut before the merges is not in the file,
only the name of the cut (`tokenizer.ggml.pre`): an unknown name is refused, and so is none where the architecture does
not tell, because a guess would silently give wrong tokens.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.text.sentencepiece import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Spaces,
    build_sentencepiece,
)
from text_generation_inference.text.tokenizer_files import surround
from text_generation_inference.weights.gguf import UNSUPPORTED, GgufFile

_TEMPLATE = "tokenizer.chat_template"
_TEMPLATES = re.compile(rf"{re.escape(_TEMPLATE)}(\.\w+)?")
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_FALCON_SPLITS = (r"[\p{P}$+<=>^~|`]+", _GPT2_SPLIT, "[0-9][0-9][0-9]")
_BLOOM_SPLIT = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# What the expressions of DeepSeek's first models take for letters: those that had two cases in Unicode at the time.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_BREAKS, _DEEPSEEK_ASIAN = "[\r\n]", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_SPLITS = (
    _DEEPSEEK_BREAKS,
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER_SPLITS = (_DEEPSEEK_BREAKS, r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_ASIAN, r"\p{N}")
_DEEPSEEK3_SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class _Cut:
    """How byte-level text is cut into the pieces within which merges apply."""

    splits: tuple[str, ...] = (_GPT2_SPLIT,)  # expressions, each of which cuts what the one before it has left
    single_digits: bool = False  # every digit on its own, before the splits
    ignore_merges: bool = False  # a piece that is a token as a whole is taken as it is
    adds_bos: bool = False  # unless the file says otherwise
    composes: bool = False  # Unicode NFC first


_LLAMA3 = _Cut((_LLAMA3_SPLIT,), ignore_merges=True, adds_bos=True)
_CUTS = (
    dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "jais", "granite-docling"), _Cut())
    | dict.fromkeys(("olmo", "mpt"), _Cut(composes=True))  # GPT-NeoX's vocabulary
    | dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), _Cut(single_digits=True))
    | {"command-r": _Cut(single_digits=True, composes=True)}
    | dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3)
    | dict.fromkeys(("dbrx", "smaug-bpe"), _Cut((_LLAMA3_SPLIT,)))
    | {"tekken": _Cut((_TEKKEN_SPLIT,), ignore_merges=True, adds_bos=True)}
    | {"gpt-4o": _Cut((_GPT4O_SPLIT,)), "stablelm2": _Cut((_QWEN2_SPLIT,))}
    | {"qwen2": _Cut((_QWEN2_SPLIT,), composes=True), "deepseek-r1-qwen": _Cut((_QWEN2_SPLIT,))}
    | {"deepseek-llm": _Cut(_DEEPSEEK_SPLITS), "deepseek-coder": _Cut(_DEEPSEEK_CODER_SPLITS)}
    | {"deepseek-v3": _Cut(_DEEPSEEK3_SPLITS), "falcon": _Cut(_FALCON_SPLITS)}
    | dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _Cut((_BLOOM_SPLIT,)))
    | {"viking": _Cut((_BLOOM_SPLIT, r"\p{N}"))}
)
# Of architectures all of whose models have one: files from before May 2024 do not name it.
_USUAL_CUT = {
    "bloom": "bloom",
    "command-r": "command-r",
    "falcon": "falcon",
    "gpt2": "gpt-2",
    "gptneox": "olmo",
    "phi2": "phi-2",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "starcoder": "starcoder",
    "starcoder2": "starcoder",
}


def read_tokenizer(file: GgufFile, vocab_size: int) -> Tokenizer:
    """Build the tokenizer; raises `ModelFormatError` for an unknown kind or an inconsistent vocabulary."""
    tokens = file.texts("tokenizer.ggml.tokens")
    if not 0 < len(tokens) <= vocab_size:
        file.fail(f"the tokenizer has {len(tokens)} tokens, the embedding {vocab_size} rows")
    kinds = file.numbers("tokenizer.ggml.token_type", len(tokens))
    kinds = np.full(len(tokens), NORMAL) if kinds is None else kinds
    kind = file.text("tokenizer.ggml.model")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(file, tokens)
        elif kind == "llama":
            tokenizer = _sentencepiece(file, tokens, kinds)
        else:
            file.fail(f"tokenizer kind {kind[:40]!r} is not supported (only gpt2 and llama)", UNSUPPORTED)
        _add_tokens(file, tokenizer, tokens, kinds)
        bos, eos = (_named_token(file, name, tokens) if _adds(file, name) else None for name in ("bos", "eos"))
        surround(tokenizer, bos, eos)
    except ModelFormatError:
        raise
    except Exception as error:  # the library raises bare exceptions
        file.fail(f"the tokenizer cannot be built: {error}")
    return tokenizer


def read_tokenizer_config(file: GgufFile, context_length: int) -> dict[str, Any]:
    """The `tokenizer_config.json`."""
    tokens = file.texts("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "add_bos_token": _adds(file, "bos"),
        "add_eos_token": _adds(file, "eos"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := _named_token(file, key, tokens)) is not None:
            config[f"{name}_token"] = token
    if templates := _chat_templates(file):
        config["chat_template"] = templates
    return config


def _chat_templates(file: GgufFile) -> str | list[dict[str, str]] | None:
    """One template, or several by name: that for tools, as of Command R, has a key of its own."""
    named = {key.removeprefix(_TEMPLATE).lstrip("."): key for key in file.metadata if _TEMPLATES.fullmatch(key)}
    if named.keys() <= {""}:
        return file.text(_TEMPLATE) if named else None
    return [{"name": name or "default", "template": file.text(key)} for name, key in sorted(named.items())]


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    cut = _cut(file)
    merges = [_split_merge(file, merge) for merge in file.texts("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab=_vocabulary(tokens), merges=_known(file, merges, tokens), ignore_merges=cut.ignore_merges)
    )
    if cut.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if cut.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    prefix = file.flag("tokenizer.ggml.add_space_prefix", False)
    by_itself = cut.splits == (_GPT2_SPLIT,)  # which the library knows, and finds faster
    if not by_itself:
        steps += [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in cut.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=by_itself))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, tokens: list[str], kinds: np.ndarray) -> Tokenizer:
    scores = file.numbers("tokenizer.ggml.scores", len(tokens))
    if scores is None:
        file.fail("metadata key `tokenizer.ggml.scores` is missing")
    unknown = _named_token(file, "unknown", tokens) or tokens[0]
    spaces = Spaces(adds_prefix=file.flag("tokenizer.ggml.add_space_prefix", True))
    return build_sentencepiece(tokens, scores.tolist(), kinds.tolist(), unknown, spaces)


def _cut(file: GgufFile) -> _Cut:
    name = file.text("tokenizer.ggml.pre", "")
    if name in ("", "default"):
        name = _USUAL_CUT.get(file.text("general.architecture"), name)
    if not name:
        file.fail("does not say how text is cut (`tokenizer.ggml.pre`), as files from before May 2024", UNSUPPORTED)
    if name not in _CUTS:
        file.fail(f"text splitting {name[:40]!r} (`tokenizer.ggml.pre`) is not known", UNSUPPORTED)
    return _CUTS[name]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _split_merge(file: GgufFile, merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    if at < 0:
        file.fail(f"the merge {merge[:40]!r} is not two tokens: the header is damaged")
    return merge[:at], merge[at + 1 :]


def _known(file: GgufFile, merges: list[tuple[str, str]], tokens: list[str]) -> list[tuple[str, str]]:
    """Check here, because the tokenizer library refuses with a text that does not say what is wrong."""
    vocabulary = set(tokens)
    for left, right in merges:
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            file.fail(f"the merge {left[:40]!r} {right[:40]!r} is not about tokens of the vocabulary")
    return merges


def _add_tokens(file: GgufFile, tokenizer: Tokenizer, tokens: list[str], kinds: np.ndarray) -> None:
    """Tokens matched in the text as a whole: control tokens are special, user-defined ones are plain text."""
    named = {_named_token(file, name, tokens) for name in ("bos", "eos", "unknown", "padding", "eot", "eom")}
    # Not in the file: a space or line break after what Phi-3 puts between turns is not part of the text.
    eats_space = file.text("general.architecture") == "phi3" and file.text("tokenizer.ggml.model") == "llama"
    added: list[AddedToken] = []
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        special = kind in (UNKNOWN, CONTROL) or token in named
        if token and (special or kind == USER_DEFINED):
            if tokenizer.token_to_id(token) != index:
                file.fail(f"the token {token[:40]!r} appears twice in the vocabulary")
            rstrip = eats_space and special and token not in _KEEP_SPACE
            added.append(AddedToken(token, normalized=False, special=special, rstrip=rstrip))
    tokenizer.add_tokens(added)


def _adds(file: GgufFile, name: str) -> bool:
    """Whether encoding adds this token. Without a key in the file, what llama.cpp does for the kind of tokenizer."""
    default = False
    if name == "bos":
        default = file.text("tokenizer.ggml.model") == "llama" or _cut(file).adds_bos
    return file.flag(f"tokenizer.ggml.add_{name}_token", default)


def _named_token(file: GgufFile, name: str, tokens: list[str]) -> str | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    if (index := file.integer(key)) >= len(tokens):
        if name == "padding":
            return None  # as in the config
        file.fail(f"`{key}` is {index}, but the tokenizer has {len(tokens)} tokens")
    return tokens[index]
