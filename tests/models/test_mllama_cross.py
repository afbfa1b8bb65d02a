"""Which rows of which pictures each token of Llama 3.2 Vision reads. What comes of it is in `test_pictures.py`."""

from pathlib import Path

import pytest
import torch
from vision_oracle import make_oracle

from text_generation_inference.errors import ModelFormatError, StartError
from text_generation_inference.make_quantized.passes import open_model
from text_generation_inference.models.config import Config
from text_generation_inference.models.registry import build, read_config
from text_generation_inference.runner.cross_pictures import Reading, find_readings
from text_generation_inference.types import PictureSpan, group_neighbours, name_group
from text_generation_inference.weights.checkpoint import Checkpoint


def test_a_token_reads_the_last_picture_and_its_neighbours() -> None:
    assert find_readings([2, 3, 6], [10, 20, 5]) == [
        Reading(0, 2, None),
        Reading(2, 3, 0, 10),
        Reading(3, 6, 0, 30),
        Reading(6, None, 1, 5),
    ]
    assert find_readings([0], [4]) == [Reading(0, None, 0, 4)]
    assert find_readings([], []) == []


def test_neighbours_are_kept_together() -> None:
    spans = [PictureSpan(digest, [(place, 1)], [], []) for digest, place in zip("abcd", (0, 1, 3, 5), strict=True)]
    groups = group_neighbours(spans)
    assert groups == [spans[:2], spans[2:3], spans[3:]]
    assert [name_group(group) for group in groups] == ["a+b", "c", "d"]


def test_what_is_refused(tmp_path: Path) -> None:
    config = read_config(make_oracle("mllama", tmp_path).folder)
    with pytest.raises(StartError, match="cross-attention cannot be quantised: no text reaches them"):
        open_model(config, Checkpoint.open(tmp_path), torch.device("cpu"))
    for numbers, said in (([0, 2], "has layer 0"), ([1, 9], "must be numbers of 4 layers")):
        text = {**config.fields["text_config"], "cross_attention_layers": numbers}
        with pytest.raises(ModelFormatError, match=f"cross_attention_layers.*{said}"):
            build(Config({**config.fields, "text_config": text}, "here"))
