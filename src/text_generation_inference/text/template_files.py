"""Where a model's folder keeps its chat templates.

Used by `chat_template` when it loads. A text that cannot be read is a fault of the model, and its file is named.
"""

from pathlib import Path
from typing import cast

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.text.model_folder import read_json

TemplateTexts = dict[str, tuple[str, Path]]  # templates by name, each with the file that it is from


def read_templates(folder: Path) -> TemplateTexts:
    """The templates of a folder. Separate files come before the entry in the tokenizer's settings."""
    files = {"default": folder / "chat_template.jinja"}
    files.update({path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))})
    from_files = {name: (_read_text(path), path) for name, path in files.items() if path.is_file()}
    if from_files:
        return from_files
    for name in ("chat_template.json", "tokenizer_config.json", "processor_config.json"):
        value: object = read_json(folder, name).get("chat_template")
        if value is not None:
            return parse_templates(value, folder / name)
    return {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{path} cannot be read as text: {error}. Download the model again.") from error


def parse_templates(value: object, path: Path) -> TemplateTexts:
    """One template, or several as a list of `{"name", "template"}` or as an object by name."""
    if isinstance(value, str):
        return _check({"default": (value, path)}, path)
    named: dict[object, object] = {}
    if isinstance(value, dict):
        named = cast(dict[object, object], value)
    elif isinstance(value, list):
        entries = [cast(dict[str, object], entry) for entry in cast(list[object], value) if isinstance(entry, dict)]
        names = [entry.get("name") for entry in entries]
        if all(isinstance(name, str) for name in names):
            named = {name: entry.get("template") for name, entry in zip(names, entries, strict=True)}
    templates = {name: (text, path) for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
    if not templates or len(templates) != len(named):
        raise ModelFormatError(f"{path}: `chat_template` must be a text or a list of named ones.")
    return _check(templates, path)


def _check(templates: TemplateTexts, path: Path) -> TemplateTexts:
    """JSON can write half of a character, which no text has."""
    try:
        for name, (text, _) in templates.items():
            (name + text).encode()
    except UnicodeEncodeError as error:
        raise ModelFormatError(f"{path}: `chat_template` is no text: {error.reason}.") from error
    return templates
