"""What is known of a model without loading it: its config, the headers of its tensors, its tokenizer's words.

From a folder, a GGUF file or the hub. What reads them imports torch, so it is imported when a model is looked at.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from text_generation_inference.config import ServerConfig, expand_home
from text_generation_inference.launch.check_report import Report
from text_generation_inference.weights.headers import Headers


class Facts(msgspec.Struct, kw_only=True):
    """What is known of a model without loading it."""

    config: Mapping[str, Any]
    source: str  # where the config was read
    read_headers: Callable[[], Headers]  # of the weights: asked once the config is known to be served
    blocks: dict[str, str] = {}  # matrices in quantised blocks: their types
    has_tokenizer: bool
    lacks_tokenizer: str = ""  # why, and what to do
    finds_chat_template: Callable[[], bool]
    describe_text: Callable[[Report], None] = lambda _: None  # raises when the tokenizer cannot be used
    download_bytes: int = 0  # not yet in the cache


def look_at(config: ServerConfig) -> Facts:
    from text_generation_inference.weights import embedded
    from text_generation_inference.weights.source import find_gguf, may_be_hub_id, not_found

    model = config.model_id
    path = expand_home(model, "model_id")
    if model == embedded.NAME:
        return _look_at_gguf(embedded.find_embedded())
    if model and path.is_file():
        return _look_at_gguf(path)
    if model and path.is_dir():
        file = find_gguf(path)
        return _look_at_folder(config, path) if file is None else _look_at_gguf(file)
    if not may_be_hub_id(model):
        raise not_found(model)
    return _look_at_hub(config)


def _look_at_gguf(path: Path) -> Facts:
    from text_generation_inference.weights.convert import GGML_TYPES, describe_gguf
    from text_generation_inference.weights.gguf import GgufFile
    from text_generation_inference.weights.gguf_model import plan_tensors, read_config

    file = GgufFile.open(path)
    config = read_config(file)
    plans = plan_tensors(file, config)
    texts = describe_gguf(file, config)  # raises when there is no tokenizer that can be used

    def describe_text(report: Report) -> None:
        with TemporaryDirectory() as folder:
            for name, text in texts.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            _describe_text(report, Path(folder), config)

    return Facts(
        config=config,
        source=str(path),
        read_headers=lambda: Headers(
            {plan.name: plan.shape for plan in plans}, dict.fromkeys((plan.name for plan in plans), "F32")
        ),
        blocks={
            plan.name: plan.source.type_name
            for plan in plans
            if plan.keeps_blocks and plan.source is not None and plan.source.type_name in GGML_TYPES
        },
        has_tokenizer=True,
        finds_chat_template=lambda: bool(file.metadata.get("tokenizer.chat_template")),
        describe_text=describe_text,
    )


def _look_at_folder(config: ServerConfig, folder: Path) -> Facts:
    from text_generation_inference.weights.checkpoint import Checkpoint

    weights = expand_home(config.weights_cache_override or str(folder), "weights_cache_override")
    dummy = config.load_format == "dummy"
    names = [path.name for path in folder.iterdir()]
    return _describe(folder, lambda: Headers({}, {}) if dummy else Checkpoint.open(weights).headers, names)


def _look_at_hub(config: ServerConfig) -> Facts:
    from text_generation_inference.text.tokenizer_files import explain_missing, has_tokenizer
    from text_generation_inference.weights.download import (
        download_description,
        download_model,
        list_files,
        read_headers,
    )
    from text_generation_inference.weights.source import hub_access

    model, revision, access = config.model_id, config.revision, hub_access(config)
    elsewhere = config.load_format == "dummy" or config.weights_cache_override is not None
    if access.offline:
        return _look_at_folder(config, download_model(model, revision, access, weights=not elsewhere))
    folder = download_description(model, revision, access)
    files = list_files(model, revision, access)
    weights = [file.is_cached for file in files if file.name.endswith(".safetensors")]
    if elsewhere or (weights and all(weights)):
        facts = _look_at_folder(config, folder)
    else:
        facts = _describe(folder, lambda: read_headers(model, revision, access), ())
    names = [file.name for file in files]
    facts.has_tokenizer, facts.lacks_tokenizer = has_tokenizer(names), explain_missing(names)
    facts.download_bytes = sum(file.num_bytes for file in files if not file.is_cached)
    return facts


def _describe(folder: Path, read_headers: Callable[[], Headers], names: Collection[str]) -> Facts:
    from text_generation_inference.models.registry import read_config
    from text_generation_inference.text.chat_template import ChatTemplate
    from text_generation_inference.text.tokenizer_files import explain_missing, has_tokenizer

    config = read_config(folder)

    def describe_text(report: Report) -> None:
        if has_tokenizer(names):
            _describe_text(report, folder, config.fields)

    return Facts(
        config=config.fields,
        source=config.source,
        read_headers=read_headers,
        has_tokenizer=has_tokenizer(names),
        lacks_tokenizer=explain_missing(names),
        finds_chat_template=lambda: ChatTemplate.load(folder).found,
        describe_text=describe_text,
    )


def _describe_text(report: Report, folder: Path, fields: Mapping[str, Any]) -> None:
    """What tokenizer and chat template say: how texts end, calls are written, thoughts marked, pictures counted."""
    from text_generation_inference.api.pictures import picture_costs
    from text_generation_inference.pictures.rules import find_rule
    from text_generation_inference.text.chat_template import ChatTemplate
    from text_generation_inference.text.picture_prompt import PictureWords
    from text_generation_inference.text.reasoning import detect_reasoning_format
    from text_generation_inference.text.tokenizer import Tokenizer
    from text_generation_inference.text.tools import detect_tool_format

    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
    report.stop_tokens = [tokenizer.token_of(token_id) or str(token_id) for token_id in sorted(tokenizer.eos_ids)]
    if template.found:
        report.tool_calls = detect_tool_format(template, tokenizer).family
        thinking = detect_reasoning_format(template, tokenizer)
        report.thinking = None if thinking is None else thinking.name
    rule = find_rule(folder, fields)
    if rule is not None:
        report.picture_tokens = picture_costs(rule, PictureWords.of(rule, tokenizer), tokenizer)
