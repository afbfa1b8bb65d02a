"""What the user asked for, and what follows from it.

`settings`: `ServerConfig` is what was asked, the same struct for the server and for `LLM`; each field carries a
`Setting`, from which its flag, variable, help, range and reasons follow. `environment`: the only readers of the
environment, with `gaudi_software`: what is to be in it before torch is imported. `variables`, `effects`: TGI's
variables that are no settings, and what has no effect where. `derived`: `resolve` is a pure function from the
configuration, the model's size and the device's limits to every number the engine runs with, each with the reason it
has that value.
"""

from text_generation_inference.config.combinations import LoraAdapter, parse_lora_adapters
from text_generation_inference.config.derived import (
    LONGEST_PADDED,
    ModelSize,
    Resolved,
    choose_strategy,
    keeps_window,
    least_blocks,
    payload_limit,
    reads_in_place,
    resolve,
    uses_buckets,
)
from text_generation_inference.config.environment import (
    cache_folder,
    child_environment,
    decoder_environment,
    expand_home,
    failpoints_asked,
    hub_token,
    may_share_cards,
    parse_value,
    read_environment,
)
from text_generation_inference.config.gaudi_software import (
    choose_lazy_mode,
    is_loaded,
    lazy_mode_said,
    prepare_process,
)
from text_generation_inference.config.setting import Setting
from text_generation_inference.config.settings import (
    ALIASES,
    BUCKET_RANGES,
    CHOICES,
    DTYPES,
    ENGINE_SETTINGS,
    LINEAR_SIZES,
    SECRETS,
    SETTINGS,
    ServerConfig,
    flag_of,
    variable_of,
)

__all__ = [
    "ALIASES",
    "BUCKET_RANGES",
    "CHOICES",
    "DTYPES",
    "ENGINE_SETTINGS",
    "LINEAR_SIZES",
    "LONGEST_PADDED",
    "SECRETS",
    "SETTINGS",
    "LoraAdapter",
    "ModelSize",
    "Resolved",
    "ServerConfig",
    "Setting",
    "cache_folder",
    "child_environment",
    "choose_lazy_mode",
    "choose_strategy",
    "decoder_environment",
    "expand_home",
    "failpoints_asked",
    "flag_of",
    "hub_token",
    "is_loaded",
    "keeps_window",
    "lazy_mode_said",
    "least_blocks",
    "may_share_cards",
    "parse_lora_adapters",
    "parse_value",
    "payload_limit",
    "prepare_process",
    "read_environment",
    "reads_in_place",
    "resolve",
    "uses_buckets",
    "variable_of",
]
