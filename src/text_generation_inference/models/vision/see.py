"""A text model and a tower become a model that sees."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from text_generation_inference.models import registry
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.model import Context
from text_generation_inference.models.vision.sight import Sight
from text_generation_inference.models.vision.tower import Tower


def see(
    config: Config,
    context: Context,
    text: dict[str, Any],  # fields of the text model's config
    tower: Tower,
    decoders: Sequence[str],  # what checkpoints call the text model
    heads: Sequence[str],
    sight: Sight | None = None,  # None: a picture's features are as tokens are
) -> CausalLM:
    model = registry.build(Config(text, config.source), context)
    assert isinstance(model, CausalLM)
    model.rename(replace(model.spec.names, decoder=tuple(decoders), head=tuple(heads)))
    model.tower = tower
    model.sight = replace(sight or Sight(tower.width), num_parts=tower.num_parts)
    return model


def axes_in_order(sections: Sequence[int]) -> tuple[int, ...]:
    """`Sight.rope_axes`: frequencies of time first, then of rows, then of columns."""
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def axes_in_turns(sections: Sequence[int]) -> tuple[int, ...]:
    """`Sight.rope_axes`: time, row, column, time ... for as long as rows and columns have some left."""
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for place in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[place] = axis
    return tuple(axes)
