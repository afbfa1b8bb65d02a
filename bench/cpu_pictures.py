"""A model that sees on a CPU: seconds until the first token of a prompt with a picture, and tokens/s after it.

    python bench/cpu_pictures.py [--rounds 3] [--tokens 64] [--size 512x512]

SmolVLM-256M's shapes with random weights, through the whole engine: the tower, the prompt, then decoding; the same with
the picture's features known (another text before it, so that no prefix is shared), and without a picture but as many
tokens. Ratios are of one run.
"""

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from pathlib import Path

from PIL import Image

from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine, start_engine
from text_generation_inference.pictures.rules import find_rule
from text_generation_inference.types import GenerationRequest, PictureSpan, SamplingParams

IMAGE_ID = 49190
CONFIG = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "model_type": "idefics3",
    "image_token_id": IMAGE_ID,
    "scale_factor": 4,
    "text_config": {
        "model_type": "llama",
        "vocab_size": 49280,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
    },
    "vision_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
}
SETTINGS = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 2048},
    "max_image_size": {"longest_edge": 512},
}


def make_span(folder: Path, size: tuple[int, int], seed: int) -> PictureSpan:
    """A picture's features in one run: what stands between its tiles is left out."""
    rule = find_rule(folder, CONFIG)
    assert rule is not None
    picture = Image.effect_noise(size, 40 + seed).convert("RGB")
    layout = rule.layout(*picture.size)
    pixels = rule.pixels(picture, layout).tobytes()
    digest = hashlib.sha256(pixels).hexdigest()
    (folder / "pixels" / digest).write_bytes(pixels)
    return PictureSpan(digest, [(4, layout.num_features)], list(layout.grid), list(layout.shape))


def run(engine: Engine, number: int, span: PictureSpan | None, count: int, tokens: int) -> tuple[float, float]:
    """Seconds until the first token, and tokens/s after it."""
    before = [number % 1000 + 10, 5, 6, 7]
    ids = before + [IMAGE_ID if span is not None else 8 + place % 5000 for place in range(count)] + [9] * 16
    params = SamplingParams(ignore_eos=True)
    pictures = [] if span is None else [span]
    engine.loop.add(
        GenerationRequest(
            id=number,
            token_ids=ids,
            sampling=params,
            max_new_tokens=tokens,
            stop_token_ids=[],
            seed=0,
            pictures=pictures,
        )
    )
    start = time.perf_counter()
    first = None
    while engine.loop.has_work:
        out = engine.loop.step()
        if first is None and out is not None and out.token_ids:
            first = time.perf_counter()
    assert first is not None
    return first - start, (tokens - 1) / (time.perf_counter() - first)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--size", default="512x512")
    parser.add_argument("--dtype", default=None)
    given = parser.parse_args()
    width, height = map(int, given.size.split("x"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pixels").mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
        engine = start_engine(
            ServerConfig(
                model_id=name,
                device="cpu",
                load_format="dummy",
                max_batch_total_tokens=8192,
                max_total_tokens=4096,
                max_input_tokens=3072,
                dtype=given.dtype,
                picture_folder=str(folder / "pixels"),
            )
        )
        found: dict[str, list[tuple[float, float]]] = {"a picture": [], "features known": [], "text alone": []}
        count = make_span(folder, (width, height), 0).num_features
        for number in range(given.rounds):
            span = make_span(folder, (width, height), number)
            found["a picture"].append(run(engine, 3 * number, span, count, given.tokens))
            found["features known"].append(run(engine, 3 * number + 1, span, count, given.tokens))
            found["text alone"].append(run(engine, 3 * number + 2, None, count, given.tokens))
        engine.close()
    print(f"{width}x{height}: {count} features of {span.shape[0]} tiles, medians of {given.rounds} rounds")
    print("| | first token, s | tokens/s after it |\n|---|---|---|")
    for what, rows in found.items():
        seconds, rate = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {what} | {seconds:.2f} | {rate:.1f} |")


if __name__ == "__main__":
    main()
