"""What Gaudi's software reads of the environment as it is loaded, which newer releases are with torch.

So it is set before torch is imported: for child processes by `child_environment`, in this process by `prepare_process`.
Where neither came in time, `lazy_mode_said` tells what the software was told.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping

from text_generation_inference.config.settings import ServerConfig

_PACKAGE = "habana_frameworks"
_LAZY_MODE = "PT_HPU_LAZY_MODE"
# Where matrices are in FP8, unless the user has set it.
_FP8 = {
    "ENABLE_EXPERIMENTAL_FLAGS": "true",
    "USE_DEFAULT_QUANT_PARAM": "true",
    "UPDATE_GRAPH_OUTPUT_MME": "false",
    "ENABLE_CALC_DYNAMIC_RANGE": "false",
    "UPDATE_MME_OUTPUT_PRECISION_FILTER": "v_proj,matmul_av",
    "EXPERIMENTAL_WEIGHT_SHARING": "FALSE",
}


def software_variables(config: ServerConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """What is to be set for a process with this configuration: nothing where it cannot run on a card."""
    if not (config.device == "hpu" or (config.device == "auto" and importlib.util.find_spec(_PACKAGE) is not None)):
        return {}
    wanted = {_LAZY_MODE: "1"}
    if config.quantize is not None or config.quant_config is not None:
        wanted |= _FP8
    if (config.num_shard or 1) > 1:
        wanted["PT_HPU_ENABLE_LAZY_COLLECTIVES"] = "1"  # graphs with sums in them need it
    found = {name: value for name, value in wanted.items() if name not in environment}
    if config.pt_hpu_lazy_mode is not None:
        found[_LAZY_MODE] = str(int(config.pt_hpu_lazy_mode))
    return found


def prepare_process(config: ServerConfig) -> None:
    """Before torch is imported, in a process that may compute."""
    found = software_variables(config, os.environ)
    if is_loaded():  # by a user's program: ranks, which inherit what is here, are to be in the mode that this one is in
        found.pop(_LAZY_MODE, None)
    os.environ.update(found)


def is_loaded() -> bool:
    return f"{_PACKAGE}.torch" in sys.modules


def lazy_mode_said() -> str | None:
    """The text of the variable; None: nobody has set it."""
    return os.environ.get(_LAZY_MODE)


def choose_lazy_mode(lazy: bool | None) -> None:
    """Before the software is loaded by a program that has not prepared itself. What is in the environment stays."""
    os.environ.setdefault(_LAZY_MODE, "0" if lazy is False else "1")
