"""Models that are served through `transformers`, on a device, against plain torch on the CPU."""

import importlib.util
from pathlib import Path

import pytest
from driving import make_request, random_prompts, run, start
from engine_cases import on_cpu, requests, same
from queue_on_cpu import QueueOnCpu
from transformers_models import make

from text_generation_inference.kernels.ops import Ops


@pytest.mark.parametrize("family", ["Olmo3", "NanoChat"])
def test_greedy(family: str, tmp_path: Path, device_name: str) -> None:
    if device_name == "hpu":
        pytest.skip("runs op by op, which a Gaudi card does not")
    folder = make(family, tmp_path).folder
    asked = requests([{}])
    expected = on_cpu(folder, asked)
    engine = start(folder, device=device_name, max_batch_size=11, max_total_tokens=160, max_batch_prefill_tokens=33)
    same(run(engine, asked), expected)
    same(run(engine, asked, arrivals=[0, 1, 3, 3, 10, 12, 12, 30]), expected)
    engine.close()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_ops(tmp_path: Path, device_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device_name != "cpu":
        pytest.skip("done by the other test")
    from text_generation_inference.kernels.triton.ops import load_ops

    loaded = load_ops(4, "Triton through its interpreter")
    assert isinstance(loaded, Ops)
    layers = ["sliding_attention", "full_attention"]
    folder = make("Olmo3", tmp_path, num_hidden_layers=2, layer_types=layers).folder
    asked = [make_request(n, prompt, 3) for n, prompt in enumerate(random_prompts(320, [3, 19], 5))]
    expected = on_cpu(folder, asked)
    device = QueueOnCpu(tmp_path / "cache", loaded)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    engine = start(folder, max_batch_size=2, max_total_tokens=160)
    same(run(engine, asked), expected)
    engine.close()
