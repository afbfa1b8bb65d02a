"""What the user asked for, and what follows from it.

`settings`: `ServerConfig` is what was asked, the same struct for the server and for `LLM`. `environment`: the
only readers of the environment. `derived`: `resolve` is a pure function from the configuration, the model's size and
the device's limits to every number the engine runs with, each with the reason it has that value.
"""

from text_generation_inference.config.derived import (
    LONGEST_PADDED,
    ModelSize,
    Resolved,
    choose_strategy,
    resolve,
    uses_buckets,
)
from text_generation_inference.config.environment import (
    ALIASES,
    ENGINE_SETTINGS,
    cache_folder,
    child_environment,
    expand_home,
    failpoints_asked,
    hub_token,
    parse_value,
    read_environment,
    variable_of,
)
from text_generation_inference.config.settings import (
    BUCKET_RANGES,
    CHOICES,
    DTYPES,
    LINEAR_SIZES,
    SECRETS,
    LoraAdapter,
    ServerConfig,
    parse_lora_adapters,
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
    "LoraAdapter",
    "ModelSize",
    "Resolved",
    "ServerConfig",
    "cache_folder",
    "child_environment",
    "choose_strategy",
    "expand_home",
    "failpoints_asked",
    "hub_token",
    "parse_lora_adapters",
    "parse_value",
    "read_environment",
    "resolve",
    "uses_buckets",
    "variable_of",
]
