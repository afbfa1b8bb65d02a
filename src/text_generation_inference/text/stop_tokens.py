"""Which tokens end a text, from all the places where a model's folder says so.

Read once when a tokenizer is loaded. Ids come from files, never from what a family's class would default to. A list in
`generation_config.json` is the whole answer of the model's files, as in TGI; a single id there, and without such a
file those of `config.json`, join the EOS of the tokenizer. Chat models often end a turn with a token that none of them
names: the one that the chat template writes behind the assistant's words joins in every case.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.files import shorten
from text_generation_inference.text.model_folder import read_json
from text_generation_inference.text.template_files import read_templates

# Tokens that end a turn wherever a template writes them.
_TURN_ENDS = (
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",  # Llama 3.1, behind a call
    "<|eot|>",  # Llama 4
    "<|eom|>",
    "<end_of_turn>",  # Gemma
    "<turn|>",  # Gemma 4
    "<|end|>",  # Phi-3, StarChat
    "<|im_end|>",  # ChatML: Qwen, Yi, InternLM, SmolLM and many fine-tunes
    "<|END_OF_TURN_TOKEN|>",  # Cohere
    "<|end_of_turn|>",  # OpenChat
    "<|return|>",  # GPT-OSS
    "<|call|>",  # GPT-OSS, behind a call
    "[|endofturn|]",  # EXAONE
    "<|endofturn|>",  # HyperCLOVA X
    "<end_of_utterance>",  # Idefics, SmolVLM
    "<extra_id_1>",  # Nemotron 4 and Minitron, before a user's turn
    "<|assistant_end|>",  # Apertus
)
# Where a template writes the second text, the first ends a message of a turn that goes on: GPT-OSS.
_MESSAGE_ENDS = {"<|end|>": "<|channel|>"}


def read_stop_ids(folder: Path, named: frozenset[int], id_of: Callable[[str], int | None]) -> frozenset[int]:
    """The ids that end a text. `named` is the tokenizer's EOS, `id_of` its vocabulary.

    An id that the model lacks may be among them; nothing ever ends with it.
    """
    ids = read_ids(folder, "generation_config.json", "eos_token_id")
    if not (ids and isinstance(_read_value(folder, "generation_config.json", "eos_token_id"), list)):
        ids |= named
    if not ids or not (folder / "generation_config.json").is_file():
        ids |= read_ids(folder, "config.json", "eos_token_id")
    return ids | _read_turn_ends(folder, id_of)


def _read_turn_ends(folder: Path, id_of: Callable[[str], int | None]) -> frozenset[int]:
    try:
        source = "\n".join(text for text, _ in read_templates(folder).values())
    except ModelFormatError:  # who renders it is told
        return frozenset()
    written = [text for text in _TURN_ENDS if text in source]
    written = [text for text in written if text not in _MESSAGE_ENDS or _MESSAGE_ENDS[text] not in source]
    return frozenset(token_id for text in written if (token_id := id_of(text)) is not None)


def read_ids(folder: Path, file: str, key: str) -> frozenset[int]:
    """The token ids that a file of the model names: one, several or none."""
    value = _read_value(folder, file, key)
    if value is None:
        return frozenset()
    values = cast(list[object], value) if isinstance(value, list) else [value]
    ids: set[int] = set()
    for item in values:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < 2**31:
            shown = shorten(cast(object, value))
            raise ModelFormatError(f"{folder / file}: `{key}` must be a token id or a list of them, found {shown}.")
        ids.add(item)
    return frozenset(ids)


def _read_value(folder: Path, file: str, key: str) -> object:
    """Models with several parts may name their ids in the object of the part that writes text."""
    fields = read_json(folder, file)
    inner: object = fields.get("text_config")
    value: object = fields.get(key)
    if value is None and isinstance(inner, dict):
        value = cast(dict[str, Any], inner).get(key)
    return value
