"""The oracle of models that see: what it says depends on every picture, so that tests against it can fail."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from vision_oracle import BOS, EOS, FAMILIES, draw, make_oracle

from text_generation_inference.models.model import Context
from text_generation_inference.models.registry import read_config
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.load import load_checkpoint


@pytest.mark.parametrize("name", FAMILIES)
def test_pictures_matter(name: str, tmp_path: Path) -> None:
    oracle = make_oracle(name, tmp_path)
    first, second, third = draw(50, 40), draw(90, 31, 1), draw(90, 31, 2)
    said = [oracle.generate(["ab", first, " and ", other, "what?"], 6) for other in (second, third)]
    assert len(said[0].token_ids) == 6
    places = said[0].prompt_logprobs.keys()
    assert max(abs(said[0].prompt_logprobs[place] - said[1].prompt_logprobs[place]) for place in places) > 1e-2
    alone = oracle.features([first])[0]
    together = oracle.features([first, second])
    assert torch.allclose(alone, together[0], atol=1e-4)
    if name != "mllama":
        assert [len(each) for each in together] == [oracle.rule.layout(*x.size).num_features for x in (first, second)]
    assert len(oracle.generate(["no picture"], 4).token_ids) == 4


PROMPTS = (["", 0, "What is this?"], ["ab ", 1, 2, "\nand", 3, " that\n"], [0, 4])
PICTURES = [draw(50, 40), draw(90, 31), draw(28, 28), draw(20, 75), draw(400, 9)]
GEMMA3 = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
WITHOUT_VIDEOS = ("llava", "llava_next", "gemma3", "idefics2", "idefics3", "paligemma", "mllama")


@pytest.mark.parametrize("name", WITHOUT_VIDEOS)
def test_prompts(name: str, tmp_path: Path) -> None:
    """Ids of prompts with pictures are those of the family's processor."""
    oracle = make_oracle(name, tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=oracle.tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=GEMMA3 if name == "gemma3" else {},
    )
    made = getattr(transformers, FAMILIES[name].architecture.replace("ForConditionalGeneration", "Processor"))
    settings = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    counts = {"image_seq_length": 4, "image_seq_len": 5 if name == "idefics2" else 4}
    known = inspect.signature(made).parameters
    oracle.image_processor.image_seq_length = 16  # of PaliGemma
    processor = made(
        image_processor=oracle.image_processor,
        tokenizer=tokenizer,
        **{key: value for key, value in {**settings, **counts}.items() if key in known},
    )
    for prompt in PROMPTS:
        pictures = [PICTURES[part] for part in prompt if isinstance(part, int)]
        ours = oracle.ids([PICTURES[part] if isinstance(part, int) else part for part in prompt])
        text = "".join(part if isinstance(part, str) else oracle.rule.marker for part in prompt)
        nested = name not in ("llava", "llava_next")
        found = processor(text=[text], images=[pictures] if nested else pictures)
        assert ours == found["input_ids"][0]


SEQUENCES = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "image_seq_len": 4}
WITH_VIDEOS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("qwen2_vl.Qwen2VL", {"image_token": "<|image_pad|>"}),
    "qwen2_5_vl": ("qwen2_5_vl.Qwen2_5_VL", {"image_token": "<|image_pad|>"}),
    "qwen3_vl": ("qwen3_vl.Qwen3VL", {"image_token": "<|image_pad|>"}),
    "smolvlm": ("smolvlm.SmolVLM", {**SEQUENCES, "global_image_token": "<global-img>"}),
    "internvl": (
        "internvl.InternVL",
        {
            "image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "image_seq_length": 4,
        },
    ),
}


@pytest.mark.parametrize("name", WITH_VIDEOS)
def test_expansions(name: str, tmp_path: Path) -> None:
    """Processors with a part for videos cannot be made without torchvision, but they can be asked for a text."""
    oracle = make_oracle(name, tmp_path)
    (package, prefix), attributes = WITH_VIDEOS[name][0].split("."), WITH_VIDEOS[name][1]
    made = getattr(import_module(f"transformers.models.{package}.processing_{package}"), f"{prefix}Processor")
    processor = object.__new__(made)
    for key, value in {**attributes, "image_processor": oracle.image_processor}.items():
        setattr(processor, key, value)
    more = {"return_row_col_info": True} if name == "smolvlm" else {}
    found = oracle.image_processor([PICTURES] if more else PICTURES, **more)
    for number, picture in enumerate(PICTURES):
        parts = oracle.rule.layout(*picture.size).expansion
        ours = "".join(part if isinstance(part, str) else oracle.rule.image_token * part for part in parts)
        theirs = processor.replace_image_token(found, image_idx=number)
        assert ours == oracle.rule.marker.replace(oracle.rule.image_token, theirs)


MODULES = {"smolvlm": "idefics3", "pixtral": "llava", "mistral3": "pixtral"}  # others have a tower of their name


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_pixels_of_rules_suit_towers(name: str, tmp_path: Path) -> None:
    """From pictures to features by rule and tower: what a grid means is the same to both."""
    oracle = make_oracle(name, tmp_path)
    config, checkpoint = read_config(tmp_path), Checkpoint.open(tmp_path)
    tower = import_module(f"text_generation_inference.models.vision.{MODULES.get(name, name)}").tower(config, Context())
    tower.normalisation = oracle.rule.normalisation
    tower.adapt(checkpoint.names())
    load_checkpoint(tower, checkpoint, torch.float32, torch.device("cpu"), checkpoint.names())
    layouts = [oracle.rule.layout(*picture.size) for picture in PICTURES]
    pixels = [
        torch.from_numpy(np.array(oracle.rule.pixels(picture, layout)))
        for picture, layout in zip(PICTURES, layouts, strict=True)
    ]
    found = tower.encode(pixels, [layout.grid for layout in layouts])
    for ours, theirs in zip(found, oracle.features(PICTURES), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
