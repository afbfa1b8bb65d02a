"""Rules of pictures against the processors of transformers that need no torchvision: pixels, tokens, texts."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from text_generation_inference.errors import ModelFormatError, ValidationError
from text_generation_inference.pictures.rule import Normalisation, PictureLayout, PictureRule
from text_generation_inference.pictures.rules import FAMILIES, find_rule

# (width, height). Towers are small, so that these sizes are to them what photographs are to real ones.
SIZES = [
    *((1, 1), (1, 2), (7, 1), (3, 3), (2, 5), (20, 20), (29, 27), (28, 28), (42, 42), (14, 70), (13, 200)),
    *((64, 48), (99, 101), (150, 30), (56, 56), (57, 55), (98, 98), (97, 98), (196, 98), (98, 196), (84, 28)),
    *((28, 56), (56, 28), (56, 84), (84, 56), (40, 30), (64, 49), (48, 64), (51, 52), (300, 100), (81, 80)),
    *((39, 98), (101, 30), (128, 89), (112, 28), (30, 4000), (4000, 30), (336, 672), (640, 480), (1024, 899)),
]


class Family(NamedTuple):
    architecture: str
    processor: str  # module and class in transformers.models
    settings: Mapping[str, Any] = {}  # of preprocessor_config.json
    config: Mapping[str, Any] = {}


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def tower(kind: str, side: int, patch: int) -> dict[str, Any]:
    return {"vision_config": {"model_type": kind, "image_size": side, "patch_size": patch}}


def smol(side: int, patch: int, scale: int) -> dict[str, Any]:
    return {"vision_config": {"image_size": side, "patch_size": patch}, "scale_factor": scale}


LLAVA, GEMMA3 = "LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration"
IDEFICS2, SMOL = "Idefics2ForConditionalGeneration", "SmolVLMForConditionalGeneration"
SIGLIP = "SiglipImageProcessor"
CLIP_42, SIGLIP_56 = tower("clip_vision_model", 42, 14), tower("siglip_vision_model", 56, 14)
CLIP_SIZES = {"size": {"shortest_edge": 42}, "crop_size": square(42)}
EDGES = {"size": {"shortest_edge": 38, "longest_edge": 98}}
PANS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 24,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CASES = {
    "llava": Family(LLAVA, "llava.Llava", CLIP_SIZES, CLIP_42),
    "llava-pads": Family(LLAVA, "llava.Llava", {**CLIP_SIZES, "do_pad": True}, CLIP_42),
    "llava-clip": Family(LLAVA, "clip.CLIP", {"image_processor_type": "CLIPImageProcessorFast", **CLIP_SIZES}, CLIP_42),
    "llava-smaller": Family(LLAVA, "llava.Llava", {**CLIP_SIZES, "size": 33, "resample": 2}, CLIP_42),
    "llava-siglip": Family(LLAVA, "siglip.Siglip", {"image_processor_type": SIGLIP, "size": square(56)}, SIGLIP_56),
    "llava_next": Family(
        "LlavaNextForConditionalGeneration",
        "llava_next.LlavaNext",
        {**CLIP_SIZES, "image_grid_pinpoints": [[42, 84], [84, 42], [84, 84], [126, 42], [42, 126]]},
        CLIP_42,
    ),
    "qwen2_vl": Family("Qwen2VLForConditionalGeneration", "qwen2_vl.Qwen2VL", {"max_pixels": 200704}),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_vl.Qwen2VL", {"size": {"shortest_edge": 784, "longest_edge": 9999}}
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        "qwen2_vl.Qwen2VL",
        {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 65536}, **HALVES},
        {"model_type": "qwen3_vl"},
    ),
    "gemma3": Family(GEMMA3, "gemma3.Gemma3", {"size": square(56)}, SIGLIP_56),
    "gemma3-pans": Family(GEMMA3, "gemma3.Gemma3", {"size": square(56), **PANS}, SIGLIP_56),
    "idefics2": Family(IDEFICS2, "idefics2.Idefics2", EDGES),
    "idefics2-splits": Family(IDEFICS2, "idefics2.Idefics2", {**EDGES, "do_image_splitting": True}),
    "idefics3": Family(
        "Idefics3ForConditionalGeneration",
        "idefics3.Idefics3",
        {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 28}},
        smol(28, 14, 2),
    ),
    "smolvlm": Family(
        SMOL, "smolvlm.SmolVLM", {"size": {"longest_edge": 99}, "max_image_size": {"longest_edge": 48}}, smol(48, 16, 3)
    ),
    "smolvlm-whole": Family(
        SMOL,
        "smolvlm.SmolVLM",
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 42}, "do_image_splitting": False},
        smol(42, 14, 3),
    ),
    "paligemma": Family(
        "PaliGemmaForConditionalGeneration",
        "siglip.Siglip",
        {"image_processor_type": SIGLIP, "size": square(56)},
        SIGLIP_56,
    ),
    "mllama": Family(
        "MllamaForConditionalGeneration",
        "mllama.Mllama",
        {"size": square(56)},
        {"vision_config": {"image_size": 56}},
    ),
    "pixtral": Family(
        LLAVA,
        "pixtral.Pixtral",
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 200}},
        tower("pixtral", 208, 16),
    ),
    "mistral3": Family(
        "Mistral3ForConditionalGeneration",
        "pixtral.Pixtral",
        {"size": {"longest_edge": 196}, "patch_size": 28},
        {**tower("pixtral", 196, 14), "model_type": "mistral3"},
    ),
    "internvl": Family(
        "InternVLForConditionalGeneration",
        "got_ocr2.GotOcr2",
        {"size": square(56), "crop_to_patches": True, "max_patches": 7},
        {"vision_config": {"image_size": [56, 56], "patch_size": [14, 14]}},
    ),
}


def write(folder: Path, settings: Mapping[str, Any], **files: Any) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def rule_of(folder: Path, case: Family) -> PictureRule:
    write(folder, case.settings)
    rule = find_rule(folder, {"architectures": [case.architecture], **case.config})
    assert rule is not None
    return rule


def library_processor(case: Family) -> Any:
    package, name = case.processor.split(".")
    module = import_module(f"transformers.models.{package}.image_processing_pil_{package}")
    settings = {name: value for name, value in case.settings.items() if name != "image_processor_type"}
    return getattr(module, f"{name}ImageProcessorPil")(**settings)


@lru_cache
def draw(width: int, height: int) -> Image.Image:
    """Gradients and noise with a corner of another colour: a flip, a swap or a shift shows."""
    noise = np.random.default_rng(width * 10007 + height).integers(0, 64, (height, width, 3))
    across, down = np.arange(width) * 190 // width, np.arange(height) * 190 // height
    pixels = (
        np.stack([np.tile(across, (height, 1)), np.tile(down[:, None], (1, width)), across + down[:, None]], 2) // 2
    )
    pixels = (pixels + noise).astype(np.uint8)
    pixels[: (height + 2) // 3, : (width + 2) // 3] = (250, 20, 90)
    return Image.fromarray(pixels)


def normalise(pixels: np.ndarray, by: Normalisation) -> np.ndarray:
    scaled = pixels.astype(np.float32) * np.float32(by.factor)
    return (scaled - np.array(by.mean, np.float32)) / np.array(by.std, np.float32)


def as_library(pixels: np.ndarray, grid: tuple[int, ...], name: str, ours: Normalisation) -> np.ndarray:
    """Pixels as towers fill and order them, [..., 3, height, width] as the library has them."""
    values = normalise(pixels, ours)
    if name.startswith("idefics2"):
        for each, picture in enumerate(values):
            height, width = grid[2 * each : 2 * each + 2]
            picture[height:], picture[:, width:] = 0, 0
    if name == "mllama":
        values = np.concatenate([values, np.zeros((4 - len(values), *values.shape[1:]), np.float32)])
    if name.startswith("qwen"):
        _, rows, columns = grid
        patch = values.shape[0] // rows
        blocks = values.reshape(rows // 2, 2, patch, columns // 2, 2, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        return np.repeat(blocks.reshape(rows * columns, 3, 1, patch, patch), 2, 2).reshape(rows * columns, -1)
    return np.moveaxis(values, -1, -3)


@pytest.mark.parametrize("name", CASES)
def test_pixels(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    rule, library = rule_of(tmp_path, case), library_processor(case)
    assert len(SIZES) == len(set(SIZES)) == 40
    for width, height in SIZES:
        if name in ("idefics2-splits",) and min(width, height) == 1:  # the library fails
            with pytest.raises(ValidationError, match="quarters"):
                rule.layout(width, height)
            continue
        picture = draw(width, height)
        layout = rule.layout(width, height)
        pixels = rule.pixels(picture, layout)
        assert pixels.dtype == np.uint8
        assert pixels.shape == layout.shape
        ours = as_library(pixels, layout.grid, name, rule.normalisation)
        theirs = np.asarray(library(picture, return_tensors="np")["pixel_values"])
        theirs = theirs.reshape(ours.shape) if theirs.size == ours.size else theirs
        assert ours.shape == theirs.shape, (width, height)
        assert np.abs(ours - theirs).max() < 1e-6, (width, height)


PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
CLIP_336 = {"size": {"shortest_edge": 336}, "crop_size": square(336)}
REAL = {
    "llava_next": Family("LlavaNextForConditionalGeneration", "", {**CLIP_336, "image_grid_pinpoints": PINPOINTS}),
    "qwen": Family("Qwen2_5_VLForConditionalGeneration", ""),
    "qwen-hub": Family("Qwen2_5_VLForConditionalGeneration", "", {"min_pixels": 3136, "max_pixels": 12845056}),
    "idefics3": Family("Idefics3ForConditionalGeneration", "", {}, smol(364, 14, 2)),
    "smolvlm": Family(
        SMOL, "", {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}, smol(512, 16, 4)
    ),
    "mllama": Family(
        "MllamaForConditionalGeneration", "", {"size": square(560)}, {"vision_config": {"image_size": 560}}
    ),
}
# (height, width): tokens as each of the above has them, and Mllama's tiles
COUNTS: dict[tuple[int, int], tuple[int, int, int, int, int, tuple[int, int]]] = {
    (20, 20): (1176, 4, 4, 2912, 1127, (1, 1)),
    (336, 336): (1176, 144, 144, 2912, 1127, (1, 1)),
    (512, 512): (2928, 324, 324, 2912, 1127, (1, 1)),
    (480, 640): (2340, 391, 391, 2227, 862, (1, 2)),
    (640, 480): (2352, 391, 391, 2228, 863, (2, 1)),
    (899, 1024): (2634, 1184, 1184, 2912, 1127, (2, 2)),
    (1080, 1920): (1948, 1222, 2691, 2227, 862, (2, 2)),
    (336, 672): (1752, 288, 288, 1542, 597, (1, 2)),
    (672, 336): (1776, 288, 288, 1544, 599, (2, 1)),
    (500, 2000): (1890, 1278, 1278, 857, 332, (1, 4)),
    (1, 1000): (576, 0, 0, 857, 332, (1, 2)),
}


def count_tokens(parts: tuple[str | int, ...]) -> int:
    """With tokenizers that have a token for two newlines."""
    texts = [part for part in parts if isinstance(part, str)]
    return sum(part for part in parts if isinstance(part, int)) + sum(len(re.findall(r"<.+?>|\n+", t)) for t in texts)


def test_counts(tmp_path: Path) -> None:
    """Of the sizes that models are published with."""
    rules = {name: rule_of(tmp_path, case) for name, case in REAL.items()}
    for (height, width), (next_count, qwen, qwen_hub, idefics3, smolvlm, tiles) in COUNTS.items():
        assert rules["llava_next"].layout(width, height).num_features == next_count
        assert count_tokens(rules["idefics3"].layout(width, height).expansion) == idefics3
        assert count_tokens(rules["smolvlm"].layout(width, height).expansion) == smolvlm
        assert rules["mllama"].layout(width, height).grid[1:] == tiles
        assert rules["mllama"].layout(width, height).expansion == (1,)
        for name, count in (("qwen", qwen), ("qwen-hub", qwen_hub)):
            if count:
                layout = rules[name].layout(width, height)
                assert layout.expansion == ("<|vision_start|>", count, "<|vision_end|>")
                assert layout.grid[1] * layout.grid[2] == 4 * count
            else:
                with pytest.raises(ValidationError, match="too thin"):
                    rules[name].layout(width, height)


def test_defaults_of_empty_files(tmp_path: Path) -> None:
    """A setting that is missing or null has the default of the library's class; so have towers."""
    case = Family(LLAVA, "", {"crop_size": square(336), "image_mean": None, "do_pad": None})
    rule = rule_of(tmp_path, case)
    assert rule.layout(100, 60) == PictureLayout((1, 336, 336, 3), (), (576,))
    assert rule.normalisation.mean == (0.48145466, 0.4578275, 0.40821073)
    mllama = rule_of(tmp_path, CASES["mllama"])
    assert mllama.normalisation.mean == (0.5, 0.5, 0.5)
    assert "side=56" in mllama.identity
    full = {**CLIP_42, "vision_feature_select_strategy": "full"}
    assert rule_of(tmp_path, CASES["llava"]._replace(config=full)).layout(9, 9).expansion == (10,)


def test_newer_files_are_nested(tmp_path: Path) -> None:
    write(tmp_path, {"size": square(99)}, processor_config={"image_processor": CASES["gemma3"].settings})
    rule = find_rule(tmp_path, {"architectures": [GEMMA3], **SIGLIP_56})
    assert rule is not None
    assert rule.layout(5, 5).shape == (1, 56, 56, 3)


def test_models_that_see_nothing(tmp_path: Path) -> None:
    assert find_rule(tmp_path, {"architectures": [LLAVA]}) is None  # no settings
    write(tmp_path, {})
    assert find_rule(tmp_path, {"architectures": ["LlamaForCausalLM"]}) is None
    assert find_rule(tmp_path, {"architectures": None}) is None
    assert find_rule(tmp_path, {}) is None


def test_expansion_of_pixtral(tmp_path: Path) -> None:
    rule = rule_of(tmp_path, CASES["pixtral"])
    assert rule.layout(40, 20).expansion == (3, "[IMG_BREAK]", 3, "[IMG_END]")
    assert rule.layout(40, 20).grid == (2, 3)
    assert rule.reserved == {"[IMG]", "[IMG_BREAK]", "[IMG_END]"}
    merged = rule_of(tmp_path, CASES["mistral3"])
    assert merged.layout(40, 20).expansion == (2, "[IMG_END]")
    assert merged.layout(40, 20).grid == (2, 4)
    assert merged.layout(10000, 1).shape == (28, 196, 3)  # rounded down to nothing by the library


def test_expansion_of_gemma3(tmp_path: Path) -> None:
    whole = ("\n\n<start_of_image>", 256, "<end_of_image>\n\n")
    assert rule_of(tmp_path, CASES["gemma3"]).layout(200, 60).expansion == whole
    layout = rule_of(tmp_path, CASES["gemma3-pans"]).layout(120, 60)
    text = "".join(part if isinstance(part, str) else "@" for part in layout.expansion)
    one = "\n\n<start_of_image>@<end_of_image>\n\n"
    words = f"Here is the original image {one} and here are some crops to help you see better {one} {one}"
    assert text == words
    assert layout.num_features == 3 * 256


def test_token_texts(tmp_path: Path) -> None:
    """The id in the config decides which token it is, then the tokenizer's names, then the family's."""
    case = CASES["llava"]
    config = {"architectures": [LLAVA], "image_token_index": 7, **case.config}
    decoder = {"7": {"content": "<picture>"}}
    write(tmp_path, case.settings, tokenizer_config={"added_tokens_decoder": decoder, "image_token": "<other>"})
    rule = find_rule(tmp_path, config)
    assert rule is not None
    assert (rule.image_token, rule.marker, rule.reserved) == ("<picture>", "<picture>", {"<picture>"})
    write(tmp_path, case.settings, tokenizer_config={"image_token": {"content": "<other>"}})
    rule = find_rule(tmp_path, config)
    assert rule is not None
    assert rule.image_token == "<other>"
    write(tmp_path, case.settings, tokenizer_config={"extra_special_tokens": ["<a>"]})
    rule = find_rule(tmp_path, config)
    assert rule is not None
    assert rule.image_token == "<image>"


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("llava", {"crop_size": 0}, "`crop_size` must be an integer"),
    ("llava", {"crop_size": {"height": 42, "width": 40}}, "`crop_size` must be a square"),
    ("llava", {"crop_size": {"depth": 4}}, "`crop_size` must have a height"),
    ("llava", {"crop_size": 56}, "the tower's pictures have sides of 42"),
    ("llava", {"crop_size": True}, "`crop_size` must be"),
    ("llava", {"crop_size": "42"}, "`crop_size` must be"),
    ("llava", {"size": {"shortest_edge": 1e9}}, "`size.shortest_edge` must be"),
    ("llava", {"resample": 9}, "`resample` must be"),
    ("llava", {"image_mean": [0.1, 0.2]}, "`image_mean` must be 3 numbers"),
    ("llava", {"image_std": [0.1, 0.2, 0.0]}, "`image_std` must be 3 numbers"),
    ("llava", {"image_std": "0.5"}, "`image_std` must be 3 numbers"),
    ("llava", {"rescale_factor": -1}, "`rescale_factor` must be"),
    ("llava", {"do_resize": False}, "`do_resize` is False"),
    ("llava", {"do_normalize": 3}, "`do_normalize` must be true or false"),
    ("llava", {"image_processor_type": "ViTImageProcessor"}, "'ViTImageProcessor'"),
    ("llava", {"image_processor_type": ["a"]}, "`image_processor_type` must be a text"),
    ("llava_next", {"image_grid_pinpoints": [[42, 50]]}, "tiles of 42 do not fill"),
    ("llava_next", {"image_grid_pinpoints": [[42]]}, "must be a list of heights and widths"),
    ("llava_next", {"image_grid_pinpoints": []}, "at least one size"),
    ("llava_next", {"image_grid_pinpoints": 7}, "must be a list"),
    ("llava_next", {"image_grid_pinpoints": [[42, "84"]]}, "`image_grid_pinpoints` must be an integer"),
    ("qwen2_vl", {"patch_size": 16}, "the tower's 14 and 2"),
    ("qwen2_vl", {"min_pixels": 0}, "`min_pixels` must be"),
    ("qwen2_vl", {"size": 5}, "`size` must be an object"),
    ("gemma3-pans", {"pan_and_scan_min_ratio_to_activate": 0}, "`pan_and_scan_min_ratio_to_activate`"),
    ("idefics2", {"size": {"shortest_edge": 300, "longest_edge": 200}}, "`size.longest_edge` must be"),
    ("idefics3", {"max_image_size": {"longest_edge": 14}}, "cannot be merged by 2"),
    ("mllama", {"max_image_tiles": 6}, "`max_image_tiles` is 6"),
    ("mllama", {"size": {"height": 56, "width": 28}}, "`size` must be a square"),
    ("pixtral", {"size": {"longest_edge": None, "height": 10}}, "`size.width` must be"),
]


@pytest.mark.parametrize(("name", "changes", "said"), BAD)
def test_wrong_settings_are_named(name: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    case = CASES[name]
    with pytest.raises(ModelFormatError, match=re.escape(said)) as found:
        rule_of(tmp_path, case._replace(settings={**case.settings, **changes}))
    assert "preprocessor_config.json" in str(found.value)


@pytest.mark.parametrize("name", sorted({case.architecture for case in CASES.values()}))
def test_no_setting_breaks_anything_else(name: str, tmp_path: Path) -> None:
    """Whatever stands in a file, a model is refused or has a rule."""
    case = next(case for case in CASES.values() if case.architecture == name)
    odd = [None, True, 0, -1, 10**40, 0.5, float("nan"), "x", [], [1, [2]], {}, {"height": []}, {"longest_edge": "x"}]
    names = ["size", "crop_size", "patch_size", "max_image_size", "resample", "image_mean", "image_grid_pinpoints"]
    for place in (*case.settings, *names, "image_processor_type", "do_rescale", "rescale_factor", "max_patches"):
        for value in odd:
            write(tmp_path, {**case.settings, place: value})
            _try(tmp_path, {"architectures": [name], **case.config})
    write(tmp_path, case.settings)
    for place in (*case.config, "image_token_index", "scale_factor", "perceiver_config", "mm_tokens_per_image"):
        for value in odd:
            _try(tmp_path, {"architectures": [name], **case.config, place: value})


def _try(folder: Path, config: dict[str, Any]) -> None:
    try:
        rule = find_rule(folder, config)
    except ModelFormatError:
        return
    assert rule is not None
    layout = rule.layout(40, 30)
    assert layout.num_features > 0
    assert len(layout.shape) in (3, 4)


def test_internvl_always_cuts_tiles(tmp_path: Path) -> None:
    """Files say that it does not, which their own processor overrules."""
    case = CASES["internvl"]
    rule = rule_of(tmp_path, case._replace(settings={**case.settings, "crop_to_patches": False}))
    assert rule.layout(120, 60).shape == (3, 56, 56, 3)


def test_limits_of_qwen_in_either_place(tmp_path: Path) -> None:
    limits = {"min_pixels": 784, "max_pixels": 28 * 28 * 4}
    for settings in (limits, {"size": limits}, {"size": {"shortest_edge": 784, "longest_edge": 28 * 28 * 4}}):
        rule = rule_of(tmp_path, CASES["qwen2_vl"]._replace(settings=settings))
        assert rule.layout(500, 500).grid == (1, 4, 4)


def test_every_family_is_tested() -> None:
    assert {case.architecture for case in CASES.values()} == set(FAMILIES) - {"Qwen3VLMoeForConditionalGeneration"}


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_thin_pictures_are_refused(name: str, tmp_path: Path) -> None:
    """Scaled by its shorter side, one pixel by a million would be a thousand gigabytes."""
    rule = rule_of(tmp_path, CASES[name])
    rule.layout(200, 1)
    with pytest.raises(ValidationError, match="1x201 pixels is too thin"):
        rule.layout(1, 201)
