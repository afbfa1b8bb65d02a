"""Whole engines with quantised models: tokens are those of plain torch, on the GPU in bfloat16 too.

What is compared with is an engine that computes op by op what ops are defined as, on the CPU in float32: with few bits
as they are, since matrices whose inputs are rounded (W8A8) mean something else once they are widened.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import compressed_writing
import gguf_writing
import gptq_writing
import mxfp4_writing
import pytest
from driving import Output, make_request, make_tiny, random_prompts, run, start
from queue_on_cpu import QueueOnCpu
from torch import Tensor

from text_generation_inference.kernels.ops import Ops

LENGTHS, NEW = [1, 5, 17, 40, 90], 12
VOCABULARY = 60  # of the smallest of these models
Scores = Callable[..., list[list[tuple[float, float]]]]
SETTINGS = {"max_batch_size": 8, "max_total_tokens": 160}


def integers(folder: Path, is_awq: bool) -> tuple[Path, dict[str, Any]]:
    """Wide enough for every kernel: groups of 128, of which `down_proj` has several."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    tiny = make_tiny("Llama", sizes, folder / "plain")
    said = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    if not is_awq:
        said = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}

    def quantize(name: str, weight: Tensor) -> tuple[gptq_writing.Codes, dict[str, Tensor]] | None:
        if name == "lm_head.weight":
            return None
        made = gptq_writing.encode(weight, 4, 128, symmetric=not is_awq)
        return made, gptq_writing.awq_tensors(made) if is_awq else gptq_writing.gptq_tensors(made)

    return gptq_writing.write(tiny.folder, folder / "few", said, quantize).folder, {}


def nf4(folder: Path) -> tuple[Path, dict[str, Any]]:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    return make_tiny("Llama", sizes, folder).folder, {"quantize": "bitsandbytes-nf4"}


def mxfp4(folder: Path) -> tuple[Path, dict[str, Any]]:
    (folder / "few").mkdir()
    return mxfp4_writing.write(folder / "plain", folder / "few").folder, {}


FORMS: dict[str, Callable[[Path], tuple[Path, dict[str, Any]]]] = {
    "gptq": lambda folder: integers(folder, is_awq=False),
    "awq": lambda folder: integers(folder, is_awq=True),
    "nf4": nf4,
    "mxfp4": mxfp4,
    "gguf": lambda folder: (gguf_writing.write_mix("Q4_K_M", folder), {}),
    "w8a8": lambda folder: (compressed_writing.write("w8a8", folder / "few"), {}),
    "nvfp4": lambda folder: (compressed_writing.write("nvfp4", folder / "few"), {}),
}


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return FORMS[request.param](tmp_path_factory.mktemp(request.param))


def answers(folder: Path, **settings: Any) -> tuple[list[list[int]], list[Output]]:
    """Greedy ones: several prompts at once, and one alone. -> prompts, outputs."""
    prompts = random_prompts(VOCABULARY, LENGTHS, seed=3)
    asked = [make_request(n, prompt, NEW) for n, prompt in enumerate(prompts)]
    engine = start(folder, **SETTINGS, **settings)
    found = [*run(engine, asked, arrivals=[0, 0, 1, 4, 7]), *run(engine, asked[2:3])]
    engine.close()
    return [*prompts, prompts[2]], found


@pytest.fixture
def scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scores:
    """What plain torch says of each token: its log-probability, and that of the likeliest. Those of prompts too."""

    def score(folder: Path, texts: list[list[int]], **settings: Any) -> list[list[tuple[float, float]]]:
        asked = [
            make_request(n, text, 1, decoder_input_details=True, prompt_top_n_tokens=1) for n, text in enumerate(texts)
        ]
        with monkeypatch.context() as patched:
            device = QueueOnCpu(tmp_path, Ops())
            patched.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
            engine = start(folder, device="cpu", **SETTINGS, **settings)
        outputs = run(engine, asked)
        engine.close()
        return [
            [(each.prompt_logprobs[place], max(each.prompt_tops[place].values())) for place in range(1, len(text))]
            for each, text in zip(outputs, texts, strict=True)
        ]

    return score


def check(
    prompts: list[list[int]], outputs: list[Output], plain: list[list[tuple[float, float]]], bound: float
) -> None:
    for prompt, output, places in zip(prompts, outputs, plain, strict=True):
        assert len(output.token_ids) == NEW
        for mine, (token, best) in zip(output.logprobs, places[len(prompt) - 1 :], strict=True):
            assert best - token <= bound
            assert abs(mine - token) <= bound


def test_tokens_of_plain_torch(model: tuple[Path, dict[str, Any]], device_name: str, scores: Scores) -> None:
    folder, settings = model
    prompts, outputs = answers(folder, device=device_name, **settings)
    texts = [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)]
    check(prompts, outputs, scores(folder, texts, **settings), 2e-4)
    if device_name == "cpu":
        return
    # In bfloat16 an engine may be as far off as plain torch in it is, and half as much again.
    prompts, outputs = answers(folder, device=device_name, dtype="bfloat16", **settings)
    texts = [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)]
    plain, rounded = scores(folder, texts, **settings), scores(folder, texts, dtype="bfloat16", **settings)
    pairs = [pair for one, other in zip(plain, rounded, strict=True) for pair in zip(one, other, strict=True)]
    noise = max(abs(one - other) for (one, _), (other, _) in pairs)
    check(prompts, outputs, plain, 1.5 * noise)
