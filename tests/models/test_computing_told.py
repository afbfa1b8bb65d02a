"""A step on a CPU tells before its first layer that it computes, whatever computes it: whoever plans waits for that."""

from pathlib import Path
from typing import Any

import pytest
from driving import make_request, make_tiny, random_prompts, start
from transformers_models import make

from text_generation_inference.kernels.cpu.ops import NativeOps

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = {"num_hidden_layers": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all layers at once": ("Llama", {}),
    "bfloat16": ("Llama", {"dtype": "bfloat16"}),
    "FP8": ("Llama", {"dtype": None, "quantize": "fp8", "kv_cache_dtype": "fp8_e4m3fn"}),
    "latents": ("DeepseekV2", {}),
    "transformers": ("Olmo", {"dtype": "bfloat16"}),
    "buckets": ("Llama", {"bucketing": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_told_before_the_first_layer(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    tiny = make(family, tmp_path) if family == "Olmo" else make_tiny(family, LAYERS, tmp_path)
    engine = start(tiny.folder, **settings)
    device: Any = engine.rank.device  # pyright: ignore
    native = getattr(device.ops.linear, "__self__", None)
    if not isinstance(native, NativeOps):
        engine.close()
        pytest.skip("there are no native kernels here")
    model, entered, told = engine.rank.runner.model, [0], list[int]()  # pyright: ignore
    first: Any = model.logits

    def logits(*given: Any) -> Any:
        entered[0] += 1  # the output head comes after all layers
        return first(*given)

    model.logits = logits  # type: ignore[method-assign]
    native.note_computing = lambda: told.append(entered[0])
    for number, prompt in enumerate(random_prompts(200, [5, 9], seed=1)):
        engine.loop.add(make_request(number, prompt, 6))
    while engine.loop.has_work:
        engine.loop.step()
    assert entered[0] >= 6
    assert set(range(entered[0])) <= set(told)  # in every step, before its output head
    engine.close()
