"""Modelling code that comes with a model, for operators who trust it (`--trust-remote-code`).

The class that `auto_map` of a config.json names is imported from the model's own folder, as a package of its own;
nothing is fetched or copied, and code of another repository is not looked for. It may do whatever the engine's process
may.
"""

import hashlib
import importlib
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from text_generation_inference.errors import ModelFormatError, StartError
from text_generation_inference.files import check_plain_file, shorten
from text_generation_inference.models.config import Config
from text_generation_inference.models.transformers_hook import NotServed

FLAG = "--trust-remote-code"
_REFERENCE = re.compile(r"([A-Za-z_]\w*)\.([A-Za-z_]\w*)")  # module and class
_MAX_BYTES = 16 << 20  # of a file of code


def names_code(config: Config) -> bool:
    """Whether a config names a causal language model among the files of its folder."""
    return _reference(config) is not None


def import_class(config: Config) -> Any:
    """The class that a config names. Raises `ModelFormatError` for what is no such class, or cannot be imported."""
    value = _reference(config)
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        hint = ". Code of other repositories is not fetched: copy it into the model's folder" * ("--" in f"{value}")
        raise config.wrong("auto_map", f"names {shorten(value)}, which is no `module.Class`{hint}")
    module_name, class_name = match.groups()
    folder = Path(config.source).parent
    path = folder / f"{module_name}.py"
    if not path.is_file():
        raise ModelFormatError(f"{config.source}: `auto_map` names {value}, and {path} is missing")
    check_plain_file(path, _MAX_BYTES)
    try:
        found = getattr(_import(folder, module_name), class_name)
    except (Exception, SystemExit) as error:  # it is a program: it may fail as it likes
        raise ModelFormatError(f"{path} cannot be run: {type(error).__name__}: {str(error)[:200]}") from error
    if not isinstance(found, type) or not hasattr(found, "is_backend_compatible"):
        raise ModelFormatError(f"{path}: {class_name} is no model of transformers")
    return cast(Any, found)


def came_along(found: Any) -> bool:
    """Whether a class is not one of `transformers`."""
    return not str(found.__module__).startswith("transformers.")


@contextmanager
def refused(found: Any, *handled: type[Exception]) -> Generator[None]:
    """Where code of a class is run while a model is loaded: what it raises is a fault of the model if it came with it.

    `handled` is what the caller has words for.
    """
    try:
        yield
    except (StartError, NotServed, torch.OutOfMemoryError, *handled):
        raise
    except (Exception, SystemExit) as error:
        if not came_along(found):
            raise
        place = f"{str(found.__module__).rpartition('.')[2]}.py"
        raise ModelFormatError(
            f"the code that came with the model fails: {found.__name__} of {place}:"
            f" {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _reference(config: Config) -> object:
    given: object = config.get("auto_map")
    return cast(dict[str, object], given).get("AutoModelForCausalLM") if isinstance(given, dict) else None


def _import(folder: Path, module_name: str) -> ModuleType:
    """A module of a folder that is one package: its files may import each other."""
    package_name = "model_code_" + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    if package_name not in sys.modules:
        package = ModuleType(package_name)
        package.__path__ = [str(folder)]
        sys.modules[package_name] = package
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # the folder may be shared
    try:
        return importlib.import_module(f"{package_name}.{module_name}")
    finally:
        sys.dont_write_bytecode = writes
