"""A tiny model that sees, prompts with pictures for it, and what `transformers` answers to them."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Output, start
from PIL import Image
from vision_oracle import Oracle, Prompt, draw, make_oracle, pictures_of

from text_generation_inference.engine.build import Engine
from text_generation_inference.layers.cache import CrossCacheSpec
from text_generation_inference.types import GenerationRequest, PictureSpan, SamplingParams

NUM_NEW = 18
PICTURES = [draw(*size, seed=seed) for seed, size in enumerate([(30, 40), (90, 31), (33, 97), (56, 56), (29, 29)])]
PROMPTS: list[Prompt] = [
    ["nothing to see here"],
    ["what is ", PICTURES[0], " in it?"],
    [PICTURES[1], "and", PICTURES[2], "differ by"],
    ["five: ", *PICTURES, " are many pictures, and a text that is somewhat longer than the others"],
    ["what is ", PICTURES[3], " in it?"],  # the text of another
]


@dataclass
class Served:
    oracle: Oracle
    folder: Path  # of pixels
    expected: list[Output]

    def start(self, **settings: object) -> Engine:
        engine = start(self.oracle.folder, picture_folder=str(self.folder), **settings)
        runner = engine.rank.runner
        for spec, cache in zip(runner.model.caches(torch.float32), runner.kv_cache, strict=True):
            if isinstance(spec, CrossCacheSpec):  # what nobody has written there may be anything, but for block 0
                for tensor in cache:
                    tensor[1:] = math.nan
        return engine

    def request(self, number: int, prompt: Prompt, **params: object) -> GenerationRequest:
        return GenerationRequest(
            id=number,
            token_ids=self.oracle.ids(prompt),
            sampling=SamplingParams(**params),
            max_new_tokens=NUM_NEW,
            stop_token_ids=[],
            seed=0,
            pictures=self.spans(prompt),
        )

    def spans(self, prompt: Prompt) -> list[PictureSpan]:
        """As the front end makes them: runs of the token that stands for features, in order."""
        rule, ids = self.oracle.rule, self.oracle.ids(prompt)
        image_id = self.oracle.tokenizer.token_to_id(rule.image_token)
        places = [place for place, token in enumerate(ids) if token == image_id]
        return [self._span(picture, places) for picture in pictures_of(prompt)]

    def _span(self, picture: Image.Image, places: list[int]) -> PictureSpan:
        """Takes the first of `places`, which belong to it."""
        layout = self.oracle.rule.layout(*picture.size)
        pixels = self.oracle.rule.pixels(picture, layout)
        digest = hashlib.sha256(repr((layout, self.oracle.rule.identity)).encode() + pixels.tobytes()).hexdigest()
        (self.folder / digest).write_bytes(pixels.tobytes())
        runs: list[tuple[int, int]] = []
        for place in places[: layout.num_features]:
            if runs and sum(runs[-1]) == place:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((place, 1))
        del places[: layout.num_features]
        return PictureSpan(digest, runs, list(layout.grid), list(layout.shape))


def serve(
    family: str, folder: Path, prompts: Sequence[Prompt] = PROMPTS, settings: Mapping[str, Any] | None = None
) -> Served:
    """settings: of preprocessing, in place of the family's."""
    oracle = make_oracle(family, folder, settings=settings)
    pixels = folder / "pixels"
    pixels.mkdir()
    return Served(oracle, pixels, [oracle.generate(prompt, NUM_NEW) for prompt in prompts])


def check(served: Served, outputs: Sequence[Output], numbers: Sequence[int] = range(len(PROMPTS))) -> None:
    for number, output in zip(numbers, outputs, strict=True):
        expected = served.expected[number]
        assert output.error is None
        count = len(expected.token_ids)  # fewer where the library's model has said its last
        assert output.token_ids[:count] == expected.token_ids, f"prompt {number}"
        assert output.logprobs[:count] == pytest.approx(expected.logprobs, abs=1e-4)
