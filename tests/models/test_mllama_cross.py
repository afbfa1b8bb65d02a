"""Layers of Llama 3.2 Vision that read pictures, against those of `transformers` in a whole prompt."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import as_ranks
from vision_oracle import Prompt, draw, make_oracle, pictures_of

from text_generation_inference.models.model import Context
from text_generation_inference.models.registry import read_config
from text_generation_inference.models.vision import mllama
from text_generation_inference.models.vision.mllama_cross import Reading, find_readings, join_features
from text_generation_inference.parallel import Parallel
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.declare import Module
from text_generation_inference.weights.load import load_checkpoint

PROMPTS: dict[str, Prompt] = {
    "one": ["ab", draw(50, 40), "what?"],
    "first": [draw(20, 75), "what is it?"],
    "neighbours": ["see ", draw(50, 40), draw(28, 28), draw(90, 31), " then ", draw(20, 75), "and?"],
}


class Layers(Module):
    def __init__(self, config: Any, context: Context) -> None:
        self.name = mllama.DECODERS[0]
        self.layers = mllama.make_cross_layers(config, context)


def test_a_token_reads_the_last_picture_and_its_neighbours() -> None:
    found = find_readings([2, 3, 6], [10, 20, 5], 60, 9)
    assert found == [
        Reading(0, 2, 0, 60, False),
        Reading(2, 3, 0, 10, True),
        Reading(3, 6, 0, 30, True),
        Reading(6, 9, 30, 35, True),
    ]
    assert find_readings([], [], 0, 9) == []


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", PROMPTS)
@torch.no_grad()
def test_layers_read_what_those_of_transformers_read(case: str, world: int, tmp_path: Path) -> None:
    oracle, prompt = make_oracle("mllama", tmp_path), PROMPTS[case]
    config, checkpoint = read_config(oracle.folder), Checkpoint.open(oracle.folder)
    tower = mllama.tower(config, Context())
    tower.normalisation = oracle.rule.normalisation
    tower.adapt(checkpoint.names())
    cpu = torch.device("cpu")
    load_checkpoint(tower, checkpoint, torch.float32, cpu, ["language_model.*"])
    pictures = pictures_of(prompt)
    layouts = [oracle.rule.layout(*picture.size) for picture in pictures]
    pixels = [torch.tensor(oracle.rule.pixels(*pair)) for pair in zip(pictures, layouts, strict=True)]
    features = tower.encode(pixels, [layout.grid for layout in layouts])
    counts = [len(tiles) * features[0].shape[0] // 4 for tiles in pixels]
    inputs = oracle.inputs(prompt)
    ids = inputs["input_ids"][0].tolist()
    places = [place for place, token in enumerate(ids) if token == oracle.tokenizer.token_to_id("<|image|>")]
    readings = find_readings(places, counts, sum(map(len, features)), len(ids))
    expected = _streams(oracle.model, inputs, mllama.cross_layers(config))

    @torch.no_grad()
    def compute(parallel: Parallel) -> None:
        found = Layers(config, replace(Context(), parallel=parallel))
        load_checkpoint(found, checkpoint, torch.float32, cpu, ["*"])
        for layer, (before, behind) in zip(found.layers, expected, strict=True):
            k, v = layer.keys_values(join_features(features, counts))
            ours = layer.forward(before, k, v, readings)
            torch.testing.assert_close(ours, behind, atol=1e-4, rtol=1e-4)
            cut = len(ids) // 2
            parts = [layer.forward(before[:cut], k, v, readings), layer.forward(before[cut:], k, v, readings, cut)]
            torch.testing.assert_close(torch.cat(parts), behind, atol=1e-4, rtol=1e-4)
            assert (behind - before).abs().max() > 0.05

    as_ranks(world, compute)


def _streams(model: Any, inputs: dict[str, Any], numbers: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What goes into these layers and comes out of them."""
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def watch(number: int) -> Any:
        def note(_module: Any, args: Any, output: Any) -> None:
            found[number] = args[0][0], output[0]

        return model.model.language_model.layers[number].register_forward_hook(note)

    hooks = [watch(number) for number in numbers]
    model(**inputs)
    for hook in hooks:
        hook.remove()
    return [found[number] for number in numbers]
