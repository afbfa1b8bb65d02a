"""Programs that ask a Gaudi card the questions of `hpu_questions`: part of `make test-hpu`.

On the stand-in they run too, so that they work when a card is there; what they say is no answer then.

    hpu_probes.py NUMBER        in a process of its own; the last line is the answer
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.devices.lack_of_memory import is_out_of_memory
from text_generation_inference.devices.visible import card_bytes
from text_generation_inference.kernels.fp8 import FP8, AttentionScales
from text_generation_inference.kernels.hpu.bridge import Bridge, load_bridge
from text_generation_inference.kernels.hpu.fp8 import CardAttentionScales, Fp8Ops
from text_generation_inference.runner.warm.record import read_record


def started(folder: str, **settings: object) -> Any:
    from driving import make_tiny, start

    tiny = make_tiny("Mistral", {}, Path(folder) / "model").folder
    limits = {"max_batch_size": 2, "max_total_tokens": 160, "max_batch_total_tokens": 1024}
    return start(tiny, device="hpu", dtype=None, cache_dir=folder, **{**limits, **settings})


def answer_some(engine: Any, count: int) -> int:
    from driving import make_request, random_prompts, run

    prompts = random_prompts(320, [3, 17, 40, 90][:count], seed=3)
    return sum(len(output.token_ids) for output in run(engine, [make_request(n, p, 24) for n, p in enumerate(prompts)]))


def ask_fallback(bridge: Bridge) -> str:
    metrics = __import__("habana_frameworks.torch.hpu.metrics", fromlist=["metric_global"])
    with tempfile.TemporaryDirectory() as folder:
        engine = started(folder)
        answer_some(engine, 4)
        engine.close()
    return f"cpu_fallback: {dict(metrics.metric_global('cpu_fallback').stats())}"


def ask_graph_bytes(bridge: Bridge) -> str:
    with tempfile.TemporaryDirectory() as folder:
        started(folder).close()
        record = read_record(next((Path(folder) / "warmed").glob("*.json")))
    assert record is not None
    shown = [f"{each.bucket}: {each.num_bytes}{' graph' * each.captured}" for each in record.shapes]
    return f"bytes that a shape was seen to take, of a tiny model: {', '.join(shown)}"


def ask_lack_of_memory(bridge: Bridge) -> str:
    free, total = bridge.torch_hpu.mem_get_info()
    said = "no error came"
    try:
        much = 1 << 20 if bridge.emulated else total  # the stand-in's card is this machine's memory
        taken = [torch.zeros(much, dtype=torch.uint8, device=bridge.device) for _ in range(2)]
        bridge.synchronize()
        said = f"no error, and the last byte reads {int(taken[-1][-1])}"
    except Exception as error:
        said = f"{type(error).__name__}, known as a lack of memory: {is_out_of_memory(error)}: {str(error)[:300]!r}"
    taken = []
    after = (torch.ones(4, device=bridge.device) + 1).cpu().tolist()
    return f"{free} of {total} bytes free before; {said}; afterwards 1 + 1 = {after[0]}"


def ask_figures(bridge: Bridge) -> str:
    hpu = bridge.torch_hpu
    before = (hpu.mem_get_info(), hpu.memory_allocated(), hpu.max_memory_allocated())
    held = torch.zeros(1 << 26, dtype=torch.uint8, device=bridge.device)
    bridge.synchronize()
    after = (hpu.mem_get_info(), hpu.memory_allocated(), hpu.max_memory_allocated())
    return f"(free, total), allocated, most: {before}; with {held.numel()} bytes more: {after}"


def ask_softmax(bridge: Bridge) -> str:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn((2, 4, 256, 64), generator=generator).bfloat16().float() for _ in range(3))
    wide = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125)
    told: list[str] = []
    for mode in ("None", "fast"):
        there = [x.bfloat16().to(bridge.device) for x in (q, k, v)]
        found = bridge.kernels.FusedSDPA.apply(*there, None, 0.0, True, 0.125, mode, True).float().cpu()
        told.append(f"softmax {mode}: {float((found - wide).abs().max()):.3g}")
    if bridge.fp8_max:
        off = _attend_in_fp8(bridge, (q, k, v)) - wide
        told.append(f"in FP8: {float(off.abs().max()):.3g}, on average {float(off.abs().mean()):.3g}")
    return "largest difference from float32, in bfloat16: " + ", ".join(told)


def _attend_in_fp8(bridge: Bridge, given: Sequence[Tensor]) -> Tensor:
    """With scales by which the largest of each reaches half of the range."""
    ops = Fp8Ops(bridge)
    numbers = [float(x.abs().max()) * 2 / bridge.fp8_max for x in given]
    scales = ops.pack_attention_scales(AttentionScales(*numbers[:2], 2 / bridge.fp8_max, numbers[2]))
    assert isinstance(scales, CardAttentionScales)
    there = [ops.to_cache(x.bfloat16().to(bridge.device), n) for x, n in zip(given, numbers, strict=True)]
    found = bridge.kernels.fp8_fused_sdpa(
        *there,
        is_causal=True,
        scale=0.125,
        d_scale_q=scales.query_there,
        d_scale_k=scales.key_there,
        d_scale_v=scales.value_there,
        q_scale_s=scales.weight_inverse,
        d_scale_s=scales.weight_there,
    )
    return found[0].float().cpu()


def ask_casts(bridge: Bridge) -> str:
    if not bridge.fp8_max:
        return "this card has no FP8"
    given = [1.0, 1.0625, 1.125, 17.0, 232.0, 239.0, 240.0, 241.0, 256.0, 448.0, 500.0, 1e5, float("inf"), float("nan")]
    cast: Any = torch.ops.hpu.cast_to_fp8_v2
    there = torch.tensor(given, dtype=torch.bfloat16).to(bridge.device)
    found = cast(there, 1.0, False, False, FP8)[0].cpu().float().tolist()
    sent = torch.tensor(given[:7], dtype=torch.float32).to(FP8).to(bridge.device).cpu().float().tolist()
    return f"casts on the card: {list(zip(given, found, strict=True))}; sent there and back: {sent}"


def ask_sums(bridge: Bridge) -> str:
    generator = torch.Generator().manual_seed(2)
    x, w = (torch.rand((64, 8192), generator=generator).bfloat16() for _ in range(2))
    exact = x.double() @ w.double().T
    found = (x.to(bridge.device) @ w.to(bridge.device).T).cpu().double()
    error = float(((found - exact) / exact).abs().max())
    return f"largest relative error of sums of 8192 products in bfloat16: {error:.3g}"


def ask_index_reduce(bridge: Bridge) -> str:
    values = torch.tensor([1.0, 5.0, 3.0, -2.0])
    index = torch.tensor([0, 2, 0, 1])
    asked = torch.full((3,), -1e30)
    expected = asked.index_reduce(0, index, values, "amax").tolist()
    there = [x.to(bridge.device) for x in (asked, index, values)]
    found = there[0].index_reduce_(0, there[1], there[2], "amax").cpu().tolist()
    return f"index_reduce_ amax: {found}, as on the CPU: {found == expected}"


def ask_second_process(bridge: Bridge) -> str:
    """This process has used the card; the report starts another one after it, and so does every part of it."""
    return f"a process after others uses the card: {(torch.ones(2, device=bridge.device) * 2).cpu().tolist()}"


def ask_hl_smi(bridge: Bridge) -> str:
    return f"bytes of a card as read from hl-smi: {card_bytes('hpu')}"


def ask_numpy(bridge: Bridge) -> str:
    import numpy

    same = torch.from_numpy(numpy.arange(3)).to(bridge.device).cpu().tolist() == [0, 1, 2]
    return f"torch {torch.__version__}, NumPy {numpy.__version__}, arrays become tensors: {same}"


def ask_compressor(bridge: Bridge) -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in ("neural-compressor-pt", "neural-compressor", "neural_compressor_pt"):
        try:
            return f"{name} {version(name)} is installed; nothing here imports it"
        except PackageNotFoundError:
            continue
    return "it is not installed; nothing here imports it"


def ask_times(bridge: Bridge) -> str:
    if bridge.emulated:
        return "not timed"
    with tempfile.TemporaryDirectory() as folder:
        began, before = time.perf_counter(), bridge.count_compilations()
        engine = started(folder)
        warm, programs = time.perf_counter() - began, bridge.count_compilations() - before
        began = time.perf_counter()
        tokens = answer_some(engine, 2)
        took = time.perf_counter() - began
        engine.close()
    rate = tokens / took
    return f"a tiny model: start with warm-up {warm:.1f} s, {programs} programs; 2 requests at {rate:.1f} tokens/s"


PROBES: dict[int, Callable[[Bridge], str]] = {
    2: ask_fallback,
    3: ask_graph_bytes,
    4: ask_lack_of_memory,
    5: ask_figures,
    6: ask_softmax,
    7: ask_casts,
    8: ask_sums,
    9: ask_index_reduce,
    11: ask_second_process,
    12: ask_hl_smi,
    13: ask_numpy,
    16: ask_compressor,
    17: ask_times,
}


def main(number: int) -> None:
    print(PROBES[number](load_bridge()).replace("\n", " "), flush=True)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "models"))
    os.environ.setdefault("PT_HPU_LAZY_MODE", "1")
    main(int(sys.argv[1]))
