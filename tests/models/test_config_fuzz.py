"""Configs that are wrong in any way are refused with the name of a field, whatever the family, and nothing else happens."""

import copy
import re
from typing import Any, cast

import torch
import transformers
from driving import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.layers.rotary import build_table
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.registry import ARCHITECTURES, build

MISSING = object()
WRONG = [
    MISSING,
    None,
    True,
    False,
    0,
    -1,
    3,
    7,
    10**40,
    1e-40,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "words",
    [],
    [1],
    {},
    {"a": 1},
]
ROPES = [
    {"rope_type": "spiral"},
    {"type": ["x"]},
    {"rope_type": "longrope"},
    {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [1.0] * 8,
        "original_max_position_embeddings": 1,
    },
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1},
    {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-320},
    {"rope_type": "linear", "factor": 1e-40},
    {"rope_type": "llama3", "factor": None},
    {"full_attention": {"rope_type": "linear"}},
]


def whole_config(architecture: str) -> dict[str, Any]:
    """As `transformers` writes it, with every field; of others what their file has."""
    fields = tiny_config(architecture)
    if hasattr(transformers, architecture):
        fields = getattr(transformers, architecture).config_class(**copy.deepcopy(fields)).to_dict()
    unread = ("id2label", "label2id", "vision_config")
    return {**{name: value for name, value in fields.items() if name not in unread}, "architectures": [architecture]}


CONFIGS = {architecture: whole_config(architecture) for architecture in ARCHITECTURES}


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_refused_by_name_or_built(data: st.DataObject) -> None:
    fields = copy.deepcopy(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))])
    for _ in range(data.draw(st.integers(1, 3))):
        inner = [
            fields,
            *(value for name, value in fields.items() if isinstance(value, dict) and name != "vision_config"),
        ]
        place = data.draw(st.sampled_from(inner))
        names = sorted(name for name in place if name != "architectures")
        name = data.draw(st.sampled_from([*names, "rope_scaling", "layer_types", "head_dim"]))
        value = data.draw(st.sampled_from([*WRONG, *ROPES] if name.startswith("rope") else WRONG))
        if value is MISSING:
            place.pop(name, None)
        else:
            place[name] = copy.deepcopy(value)
    try:
        model = build(Config(fields, "config.json"))
    except ModelFormatError as error:
        assert re.match(r"config.json: .*(`|heads)", str(error)), error
    else:
        assert model.vocab_size > 0 and model.max_positions > 0
        for rope in {layer.attention.rope for layer in cast(CausalLM, model).spec.layers}:
            for length in (1, 64):
                assert build_table(rope, length, torch.device("cpu")).isfinite().all()
