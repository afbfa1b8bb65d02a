"""A model folder whose pictures are small squares, and pictures for it."""

import base64
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 28


def write_model(folder: Path, side: int = SIDE) -> Path:
    """What `find_rule` reads of a Gemma 3."""
    folder.mkdir(parents=True, exist_ok=True)
    vision = {"model_type": "siglip_vision_model", "image_size": side, "patch_size": 14}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 4, "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(config))
    processor = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": side, "width": side}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def noise(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def as_uri(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"
