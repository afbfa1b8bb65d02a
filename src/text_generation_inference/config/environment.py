"""Settings from environment variables, and the environment of child processes.

Second of `config`. The only readers of the environment are here, and how the text of a value is read, which flags
share.
"""

import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from text_generation_inference.config.gaudi_software import software_variables
from text_generation_inference.config.setting import check_port
from text_generation_inference.config.settings import ALIASES, SETTINGS, TYPES, ServerConfig, variable_of
from text_generation_inference.errors import StartError

_SAGEMAKER = {
    "HF_MODEL_ID": "MODEL_ID",
    "HF_MODEL_REVISION": "REVISION",
    "SM_NUM_GPUS": "NUM_SHARD",
    "HF_MODEL_QUANTIZE": "QUANTIZE",
    "HF_MODEL_TRUST_REMOTE_CODE": "TRUST_REMOTE_CODE",
}
_SHARE_A_CARD = ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "NCCL_MULTI_RANK_GPU_ENABLE")
_OF_ANY_PROGRAM = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "TGI_FAILPOINTS")
_OF_PYTHON = ("PYTHON", "COVERAGE")
_TOKENS = ("HF_API_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def read_environment(
    environment: Mapping[str, str] | None = None, only: Collection[str] | None = None
) -> dict[str, Any]:
    """`ServerConfig` fields (or only some) given by environment variables. An empty variable counts as not set."""
    environment = _rename_aliases(_map_sagemaker(os.environ if environment is None else environment))
    given: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        variable = variable_of(name) if only is None or name in only else None
        text = environment.get(variable) if variable else None
        # Kubernetes sets PROMETHEUS_PORT=tcp://... for a service called prometheus: not meant for us.
        if text and variable and not (setting.check is check_port and text.startswith("tcp://")):
            shown = "***" if setting.secret else repr(text)
            value = parse_value(name, text, f"environment variable {variable}={shown}")
            given[name] = not value if setting.negated else value
    return given


def _map_sagemaker(environment: Mapping[str, str]) -> Mapping[str, str]:
    """On SageMaker the model is named `HF_MODEL_ID` and the server is expected on port 8080."""
    if not environment.get("HF_MODEL_ID") or environment.get("MODEL_ID"):
        return environment
    mapped = {new: environment[old] for old, new in _SAGEMAKER.items() if environment.get(old)}
    if mapped.get("NUM_SHARD") == "0":  # a machine without accelerators
        del mapped["NUM_SHARD"]
    return {**environment, "PORT": "8080", **mapped}


def _rename_aliases(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Variables by the names this program uses. Raises `StartError` when two names of one have different values."""
    renamed = dict(environment)
    for alias, name in ALIASES.items():
        text = environment.get(alias)
        if not text:
            continue
        if environment.get(name, text) not in (text, ""):
            raise StartError(f"{alias}={text!r} and {name}={environment[name]!r} mean the same setting: leave one out")
        renamed[name] = text
    return renamed


def hub_token(environment: Mapping[str, str] | None = None) -> str | None:
    """The access token for the hub; None leaves it to the hub's library to find one on disk."""
    environment = os.environ if environment is None else environment
    return next((environment[name] for name in _TOKENS if environment.get(name)), None)


def failpoints_asked() -> str | None:
    """Faults that a test wants, see `failpoints`."""
    return os.environ.get("TGI_FAILPOINTS")


def may_share_cards(environment: Mapping[str, str] | None = None) -> bool:
    """Whether several ranks may compute on one card, for tests: the libraries that bring them together ask the same."""
    asked = os.environ if environment is None else environment
    return any(asked.get(name) == "1" for name in _SHARE_A_CARD)


def child_environment(config: ServerConfig, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for the processes of a server: the hub's settings as its library reads them, and no API key."""
    child = dict(os.environ if environment is None else environment)
    child.pop("API_KEY", None)
    child.pop("ADMIN_API_KEY", None)
    child.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    child |= software_variables(config, child)
    token = hub_token(child)
    if token:
        child["HF_TOKEN"] = token
    if config.offline:
        child["HF_HUB_OFFLINE"] = "1"
    if config.huggingface_hub_cache:
        child["HF_HUB_CACHE"] = child["HUGGINGFACE_HUB_CACHE"] = config.huggingface_hub_cache
    return child


def decoder_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """For processes that decode strangers' bytes: what Python needs to start, no token, key or name of ours."""
    environment = os.environ if environment is None else environment
    kept = {name: text for name, text in environment.items() if name in _OF_ANY_PROGRAM or name.startswith(_OF_PYTHON)}
    return kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def parse_value(field: str, text: str, origin: str) -> Any:
    """The value of a field from text. `origin` says in the error where the text came from."""
    kind = TYPES[field]
    if field == "ignore_eos_token":
        return text == "true"  # TGI's rule, which everybody who sets it relies on
    text = SETTINGS[field].spellings.get(text, text)
    try:
        return _PARSERS[kind](text)
    except ValueError:
        raise StartError(f"{origin} is not valid: it must be {_EXPECTED[kind]}") from None


def _parse_bool(text: str) -> bool:
    if text.strip().lower() in ("true", "1", "yes", "on"):
        return True
    if text.strip().lower() in ("false", "0", "no", "off"):
        return False
    raise ValueError(text)


def _parse_int(text: str) -> int:
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text):  # 18 digits: what fits a message
        raise ValueError(text)
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _parse_str(text: str) -> str:
    text.encode()  # an argument that is not UTF-8 cannot be passed on
    return text


def _parse_list(text: str) -> list[str]:
    return [item.strip() for item in _parse_str(text).split(",") if item.strip()]


_PARSERS: dict[Any, Callable[[str], Any]] = {
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    str: _parse_str,
    list[str]: _parse_list,
    list[int]: lambda text: [_parse_int(item) for item in _parse_list(text)],
}
_EXPECTED: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "UTF-8 text",
    list[str]: "UTF-8 text",
    list[int]: "whole numbers separated by commas",
}


def cache_folder(config: ServerConfig, environment: Mapping[str, str] | None = None) -> Path:
    """Where converted models and compiled kernels are kept."""
    environment = os.environ if environment is None else environment
    if config.cache_dir:
        return expand_home(config.cache_dir, "cache_dir")
    base = environment.get("XDG_CACHE_HOME") or expand_home("~/.cache", "cache_dir")
    return Path(base) / "tgi"


def expand_home(path: str, setting: str) -> Path:
    """A path that may begin with `~`. Raises `StartError` where nobody knows what that is, as in bare containers."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise StartError(
            f"`{setting}`: {path} cannot be found: nothing says where that home folder is (neither HOME nor an entry in"
            f" passwd). Set HOME, or give `{setting}` as a path from the root."
        ) from None
