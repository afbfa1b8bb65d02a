"""A few layers of large models at their real widths with random weights: captured steps, steps queued op by op, requests
one by one and plain torch come to the same tokens, but for near-ties."""

import json
from pathlib import Path

import pytest
import torch
from driving import Output, make_request, random_prompts, run, start

from text_generation_inference.bench.shapes import config_of
from text_generation_inference.types import GenerationRequest

SHAPES = {
    "mixtral-8x7b": 3,
    "qwen3-30b-a3b": 4,
    "deepseek-v2-lite": 4,
}  # and how many layers; the first of DeepSeek's is dense
LENGTHS = [1, 5, 17, 64, 300, 900]
NEW = 24
TIE = 0.06  # two best tokens whose log-probabilities are this near may change places: sums are in bfloat16


def requests() -> list[GenerationRequest]:
    prompts = random_prompts(30_000, LENGTHS, seed=3)
    return [make_request(number, prompt, NEW, top_n_tokens=2) for number, prompt in enumerate(prompts)]


def answer(folder: Path, one_by_one: bool = False, **settings: object) -> list[Output]:
    limits = {"max_batch_size": 8, "max_total_tokens": 1024, "max_batch_prefill_tokens": 1024}
    engine = start(folder, device="cuda", dtype="bfloat16", load_format="dummy", **limits, **settings)
    asked = requests()
    batches = [[each] for each in asked] if one_by_one else [asked]
    outputs = [output for batch in batches for output in run(engine, batch)]
    engine.close()
    torch.cuda.empty_cache()
    return outputs


def same_but_for_ties(ours: list[Output], expected: list[Output]) -> None:
    """Up to the first token that differs; behind it both answer something else."""
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.error is None and theirs.error is None
        assert len(mine.token_ids) == len(theirs.token_ids) == NEW
        pairs = enumerate(zip(mine.token_ids, theirs.token_ids, strict=True))
        parted = next((at for at, (a, b) in pairs if a != b), NEW)
        assert mine.logprobs[:parted] == pytest.approx(theirs.logprobs[:parted], abs=TIE / 2)
        if parted < NEW:
            best, second = sorted(theirs.top_tokens[parted].values(), reverse=True)[:2]
            assert best - second < TIE, f"another token at {parted}"


@pytest.mark.parametrize("shape", list(SHAPES))
def test_shapes_of_large_models(shape: str, device_name: str, tmp_path: Path) -> None:
    if device_name != "cuda":
        pytest.skip("too many numbers without a GPU")
    config = {**config_of(shape), "num_hidden_layers": SHAPES[shape]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    captured = answer(tmp_path)
    same_but_for_ties(answer(tmp_path, cuda_graphs=[0]), captured)
    same_but_for_ties(answer(tmp_path, one_by_one=True), captured)
    same_but_for_ties(answer(tmp_path, custom_kernels=False), captured)
