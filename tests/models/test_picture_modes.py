"""What becomes of modes and transparency is what `transformers` makes of them."""

import io

import numpy as np
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from text_generation_inference.pictures.decode import decode


def test_as_transformers_does() -> None:
    rng = np.random.default_rng(0)
    rgba = Image.fromarray(rng.integers(0, 256, (8, 12, 4), dtype=np.uint8))
    rgb = rgba.convert("RGB")
    one_index = rgb.quantize(8)
    one_index.info["transparency"] = 3
    images = [rgba, rgba.convert("LA"), rgba.quantize(16), one_index, Image.new("RGBA", (3, 3), (9, 9, 9, 0))]
    for image in [*images, *(rgb.convert(mode) for mode in ("L", "1", "P", "RGB"))]:
        file = io.BytesIO()
        image.save(file, "PNG")
        expected = convert_to_rgb(Image.open(file), return_numpy=True)
        assert np.array_equal(np.asarray(decode(file.getvalue(), None, 1000)), expected), image.mode
    inks = io.BytesIO()
    rgb.convert("CMYK").save(inks, "JPEG")
    expected = convert_to_rgb(Image.open(inks), return_numpy=True)
    assert np.array_equal(np.asarray(decode(inks.getvalue(), None, 1000)), expected)
