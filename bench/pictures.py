"""What preparing a picture costs: milliseconds of one core per megapixel of the picture, for each rule.

    python bench/pictures.py

From an upright RGB picture in memory to uint8 pixels for the tower, with the settings that models are published with;
beside it the same picture through the processor of `transformers` that needs no torchvision, which also normalises, and
decoding the picture from a JPEG. Time of the process, not of the clock: other processes do not count.
"""

import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from text_generation_inference.pictures.rules import find_rule

SIZES = [(640, 480), (1024, 1024), (1920, 1080), (4000, 3000)]


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def tower(kind: str, side: int, patch: int) -> dict[str, Any]:
    return {"vision_config": {"model_type": kind, "image_size": side, "patch_size": patch}}


CLIP = {"size": {"shortest_edge": 336}, "crop_size": square(336)}
SIGLIP = {"image_processor_type": "SiglipImageProcessor"}
# name: (architecture, processor in transformers.models, settings, config)
RULES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llava 1.5": ("Llava", "llava.Llava", CLIP, {}),
    "llava_next": ("LlavaNext", "llava_next.LlavaNext", CLIP, {}),
    "qwen2_vl, at most 1 MP": ("Qwen2VL", "qwen2_vl.Qwen2VL", {}, {}),
    "qwen2_vl, at most 12.8 MP": ("Qwen2VL", "qwen2_vl.Qwen2VL", {"min_pixels": 3136, "max_pixels": 12845056}, {}),
    "gemma3": ("Gemma3", "gemma3.Gemma3", {"size": square(896)}, tower("siglip_vision_model", 896, 14)),
    "idefics2": ("Idefics2", "idefics2.Idefics2", {}, {}),
    "idefics2, split": ("Idefics2", "idefics2.Idefics2", {"do_image_splitting": True}, {}),
    "idefics3": ("Idefics3", "idefics3.Idefics3", {}, {"vision_config": {"patch_size": 14}, "scale_factor": 2}),
    "smolvlm 512": (
        "SmolVLM",
        "smolvlm.SmolVLM",
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        {"vision_config": {"patch_size": 16}, "scale_factor": 4},
    ),
    "paligemma 448": (
        "PaliGemma",
        "siglip.Siglip",
        {**SIGLIP, "size": square(448)},
        tower("siglip_vision_model", 448, 14),
    ),
    "mllama 560": ("Mllama", "mllama.Mllama", {"size": square(560)}, {"vision_config": {"image_size": 560}}),
    "pixtral": (
        "Llava",
        "pixtral.Pixtral",
        {"image_processor_type": "PixtralImageProcessor"},
        tower("pixtral", 1024, 16),
    ),
    "internvl": (
        "InternVL",
        "got_ocr2.GotOcr2",
        {"size": square(448), "crop_to_patches": True},
        {"vision_config": {"image_size": 448, "patch_size": 14}},
    ),
}


def measure(work: Callable[[], object], least_s: float = 0.4) -> float:
    """Seconds of the process, the median of at least three runs."""
    work()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < least_s and len(times) < 50):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def draw(width: int, height: int) -> Image.Image:
    """Soft shapes with a little noise, as photographs have."""
    rng = np.random.default_rng(0)
    soft = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((width, height), 3)
    pixels = np.asarray(soft).astype(np.int16) + rng.integers(-6, 7, (height, width, 3), dtype=np.int16)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def decode(width: int, height: int) -> Callable[[], object]:
    stored = io.BytesIO()
    draw(width, height).save(stored, "JPEG", quality=90)
    return lambda: Image.open(io.BytesIO(stored.getvalue())).convert("RGB")


def rules(name: str, image: Image.Image) -> tuple[Callable[[], object], Callable[[], object]]:
    """Ours and the library's."""
    architecture, processor, settings, config = RULES[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(settings))
        rule = find_rule(Path(folder), {"architectures": [f"{architecture}ForConditionalGeneration"], **config})
    assert rule is not None
    layout = rule.layout(*image.size)
    package, prefix = processor.split(".")
    module = import_module(f"transformers.models.{package}.image_processing_pil_{package}")
    theirs = getattr(module, f"{prefix}ImageProcessorPil")(
        **{key: value for key, value in settings.items() if key != "image_processor_type"}
    )
    return lambda: rule.pixels(image, layout), lambda: theirs(image, return_tensors="np")


def main() -> None:
    heads = [f"{width}x{height}" for width, height in SIZES]
    print(f"| ms per megapixel (transformers) | {' | '.join(heads)} |\n|---|{'---|' * len(SIZES)}")
    rows: dict[str, list[str]] = {"decoding a JPEG": []}
    for width, height in SIZES:
        million = width * height / 1e6
        image = draw(width, height)
        rows["decoding a JPEG"].append(f"{measure(decode(width, height)) * 1e3 / million:.1f}")
        for name in RULES:
            ours, theirs = (measure(work) * 1e3 / million for work in rules(name, image))
            rows.setdefault(name, []).append(f"{ours:.1f} ({theirs:.0f})")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
