"""The stand-in for Intel's software keeps the rules of the real one, so that what runs on it has kept them too."""

import gc

import pytest
import torch
from gaudi import run_with_stand_in, use_stand_in

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module", autouse=True)
def habana(device_name: str):
    if device_name != "cpu":
        pytest.skip("the stand-in is not for a machine with cards")
    use_stand_in()
    import habana_frameworks.torch

    return habana_frameworks.torch


@pytest.fixture(autouse=True)
def _on_the_card(habana):
    """Tensors are made there unless a test says otherwise."""
    with torch.device("hpu"):
        yield


@pytest.fixture
def card(habana):
    from habana_frameworks.torch._card import card

    return card


@pytest.fixture
def books():
    from habana_frameworks.torch._emulation import books

    return books


class Doubles(torch.nn.Module):
    """Writes to a cache, and counts how often its Python runs."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(16)
        self.runs = 0

    def forward(self, x, index=None, factor=2):
        self.runs += 1
        if index is not None:
            self.cache.index_copy_(0, index, x.sum(1))
        return x * factor + 0 * self.runs


def wrap(module: torch.nn.Module, **options):
    from habana_frameworks.torch.hpu import wrap_in_hpu_graph

    return wrap_in_hpu_graph(module, **{"disable_tensor_cache": True, **options})


@torch.inference_mode()
def test_a_graph_is_replayed_and_overwrites_its_output():
    module = wrap(Doubles())
    first = module(torch.ones(2, 3), torch.tensor([1, 2]))
    assert first.tolist() == torch.full((2, 3), 2.0).tolist()
    second = module(torch.full((2, 3), 5.0), torch.tensor([7, 2]))
    assert second is first
    assert first[0, 0] == 10
    assert module.runs == 1, "a replay runs no Python"
    assert module.cache[[1, 2, 7]].tolist() == [3, 15, 15]


@torch.inference_mode()
def test_an_input_that_no_op_reads_is_copied_at_the_first_hit(books):
    module = torch.nn.Module()
    module.forward = lambda x, unread: x * unread.shape[0]
    wrap(module)
    before, unread, counted = books.compilations, torch.zeros(3), books.unread_inputs
    counts = []
    for _ in range(4):
        assert module(torch.ones(2), unread).tolist() == [3, 3]
        counts.append(books.compilations - before)
    assert counts == [1, 2, 2, 2], "captured, then the copy, then nothing new"
    assert books.unread_inputs == counted + 1


@torch.inference_mode()
def test_numbers_are_frozen_in_a_graph():
    class Counts(torch.nn.Module):
        def forward(self, x):
            return x + len(seen)

    seen = [1]
    module = wrap(Counts())
    assert module(torch.zeros(2)).tolist() == [1, 1]
    seen.append(2)
    assert module(torch.zeros(2)).tolist() == [1, 1]


def key(*arguments, **named):
    from habana_frameworks.torch.hpu.graphs import input_hash

    return input_hash((arguments, named))


def test_what_a_graph_is_found_by():
    x, other = torch.zeros(2, 3), torch.ones(2, 3)
    assert key(x) == key(other)
    assert key(x) == key(x.int()), "types do not count"
    assert key(x) != key(torch.zeros(3, 2))
    assert key(x) != key(torch.zeros(4, 3)[1:3]), "a view is another graph"
    assert key(x, 1) != key(x, 2), "a number counts by value"
    assert key(x, None) != key(x, other)
    assert key({"a": x, "b": x}) == key({"a": other, "b": x})
    assert key({"a": x, "b": x}) != key({"b": x, "a": x})
    assert key(Doubles()) != key(Doubles()), "an object counts by identity"


@torch.inference_mode()
def test_another_type_under_the_same_key_is_an_error():
    module = wrap(Doubles())
    module(torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="the key does not tell"):
        module(torch.zeros(2, 3, dtype=torch.bfloat16))


@torch.inference_mode()
def test_bypass_warm_up_and_limits(books):
    module = wrap(Doubles(), max_graphs=1)
    before = books.compilations
    module(torch.ones(1, 1))
    assert books.compilations == before + 1
    out = module(torch.full((1, 1), 9.0), warmup_mode=True)
    assert out.item() == 2, "what the graph left before"
    module(torch.ones(2, 2), bypass_hpu_graphs=True)
    module(torch.ones(2, 2))  # no room for a second graph
    assert module.runs == 3
    assert books.compilations == before + 2, "a shape outside graphs is compiled once"
    module.clear_cache()
    module(torch.ones(2, 2))
    assert books.compilations == before + 3


@torch.inference_mode()
@pytest.mark.parametrize(
    "work",
    [
        lambda x: x + x.max().item(),
        lambda x: x + 1 if x.sum() > 0 else x,
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x * len(x.tolist()),
        lambda x: torch.hpu.synchronize() or x,
    ],
)
def test_what_looks_at_values_cannot_be_captured(work):
    module = torch.nn.Module()
    module.forward = work
    with pytest.raises(RuntimeError, match="captured|graph"):
        wrap(module)(torch.ones(3))
    assert wrap(Doubles())(torch.ones(1, 1)).item() == 2, "the failed capture is over"


# -- another device --------------------------------------------------------------------------------------------------


def on_host(*shape, **options):
    return torch.ones(*shape, device="cpu", **options)


MIXED = {
    "a sum": lambda x, here: x + here,
    "a product": lambda x, here: x @ here.T,
    "a choice": lambda x, here: torch.where(here > 0, x, x),
    "rows": lambda x, here: x.index_select(0, here[0].long()),
    "an index": lambda x, here: x[here[0].long()],
    "a write": lambda x, here: x.index_copy_(0, torch.zeros(1, dtype=torch.int64), here[:1]),
    "one after the other": lambda x, here: torch.cat((x, here)),
    "into a result": lambda x, here: torch.mul(x, x, out=here),
    "an op of the card": lambda x, here: torch.ops.hpu.rms_norm(x, here[0], 1e-5),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_the_card_and_the_host_do_not_mix(name):
    x, here = torch.ones(2, 2), on_host(2, 2)
    assert (x.device.type, here.device.type) == ("hpu", "cpu")
    with pytest.raises(RuntimeError, match="same device|hpu:0"):
        MIXED[name](x, here)
    MIXED[name](x, here.to("hpu"))


def test_what_goes_between_the_card_and_the_host():
    x = torch.zeros(2, 3)
    with pytest.raises(TypeError, match="hpu:0 device type tensor to numpy"):
        x.numpy()
    x[:, 1].copy_(on_host(2))
    assert x.cpu().numpy().tolist() == [[0, 1, 0], [0, 1, 0]]
    assert (x * torch.tensor(2.0, device="cpu")).tolist() == [[0, 2, 0], [0, 2, 0]], "a number may be on the host"
    assert x.to("cpu").data_ptr() != x.data_ptr()


@torch.inference_mode()
@pytest.mark.parametrize("work", [lambda x: x + on_host(3).to("hpu"), lambda x: x * torch.tensor(2.0, device="cpu")])
def test_nothing_of_the_host_goes_into_a_graph(work):
    """It would be what it was when the graph was captured."""
    module = torch.nn.Module()
    module.forward = work
    with pytest.raises(RuntimeError, match="captured|same device"):
        wrap(module)(torch.ones(3))


# -- memory ----------------------------------------------------------------------------------------------------------


def test_a_lack_of_memory_is_told_by_the_next_look_at_a_value(card):
    x, cache = torch.ones(4), torch.zeros(4)
    card.set("fails_at", 1)
    lacking = x + x
    cache.copy_(lacking)
    more = lacking + 1
    with pytest.raises(RuntimeError, match="PT_DEVMEM Allocation failed for size::16"):
        more.tolist()
    assert cache.tolist() == [0, 0, 0, 0], "what was launched after it was not done"
    assert lacking.isnan().all() and more.isnan().all()
    assert (x + x).tolist() == [2, 2, 2, 2], "told once"
    card.set("fails_at", 1)
    x + x
    with pytest.raises(RuntimeError, match="PT_DEVMEM"):
        torch.hpu.synchronize()
    torch.hpu.synchronize()


def test_what_is_freed_stays_taken_until_ops_are_launched(habana):
    habana.core.mark_step()
    x = torch.zeros(1 << 10)
    before = torch.hpu.memory_allocated()
    torch.hpu.reset_peak_memory_stats()
    for _ in range(3):
        x + 1
    assert torch.hpu.memory_allocated() - before == 3 * x.nbytes
    habana.core.mark_step()
    assert torch.hpu.memory_allocated() == before
    assert torch.hpu.max_memory_allocated() - before == 3 * x.nbytes


@torch.inference_mode()
def test_memory_is_counted(books, monkeypatch):
    gc.collect()  # graphs of other tests
    torch.hpu.synchronize()
    free, total = torch.hpu.mem_get_info()
    held, _ = torch.zeros(1 << 20), torch.zeros(1 << 20, device="cpu")
    assert free - torch.hpu.mem_get_info()[0] == held.nbytes
    graphs = books.graph_bytes
    module = wrap(Doubles())
    module(torch.zeros(1 << 10, 4))
    assert books.graph_bytes - graphs >= 1 << 14
    stats = torch.hpu.memory_stats()
    assert (stats["Limit"], stats["Limit"] - stats["InUse"]) == (total, torch.hpu.mem_get_info()[0])
    module.clear_cache()
    assert books.graph_bytes == graphs
    monkeypatch.setattr(books, "limit", stats["InUse"] + (1 << 10))
    with pytest.raises(RuntimeError, match="PT_DEVMEM Allocation failed"):
        module(torch.zeros(1 << 12, 4))


def test_calls_that_are_wrong_fail(habana):
    from habana_frameworks.torch.hpex.kernels import FusedSDPA, RotaryPosEmbeddingMode, apply_rotary_pos_emb
    from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

    q, lengths, ops = torch.zeros(1, 2, 4, 8), torch.ones(1, dtype=torch.int32), torch.ops.hpu
    eight, scale = torch.zeros(4, 8).to(FP8), torch.ones(())
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    wrong = [
        lambda: FusedSDPA.apply(q, q, q, is_causal=True),  # by position only
        lambda: FusedSDPA.apply(q, q, q, None, False, 0.0, None),  # order
        lambda: FusedSDPA.apply(q, q, q, None, 0.0, True, None, "slow"),
        lambda: FusedSDPA.apply(q, q, q, mask, 0.0, True, None),
        lambda: FusedSDPA.apply(q, q, q, None, 0.0, False, None, "None", None, lengths),
        lambda: FusedSDPA.apply(q, q, q, None, 0.0, True, None, "None", None, lengths.long()),
        lambda: FusedSDPA.apply(q, q, q, None, 0.0, True, None, "None", None, lengths, "top"),
        lambda: FusedRMSNorm.apply(torch.zeros(4, 8), torch.zeros(8), 1e-5),
        lambda: FusedRMSNorm.apply(torch.zeros(1, 4, 8).bfloat16(), torch.zeros(8), 1e-5),
        lambda: apply_rotary_pos_emb(q, q[..., :4], q[..., :4]),
        lambda: apply_rotary_pos_emb(q, q, q, None, 0, 1),
        lambda: apply_rotary_pos_emb(q, q, q, None, 0, RotaryPosEmbeddingMode.BLOCKWISE, 1),
        lambda: ops.cast_to_fp8_v2(q, scale, FP8),
        lambda: ops.cast_to_fp8_v2(q, scale, False, False, torch.int8),
        lambda: ops.cast_from_fp8(eight, out_type=torch.float32),
        lambda: ops.fp8_gemm_v2(eight, eight, False, True, None, torch.float32),
        lambda: ops.fp8_gemm_v2(eight.float(), False, eight, True, None, torch.float32),
        lambda: ops.fp8_gemm_v2(eight, False, eight, True, None, torch.float32, torch.ones(3), scale),
        lambda: ops.rms_norm(torch.zeros(4, 8), torch.zeros(8)),
        lambda: ops.block_softmax_adjustment(scale, scale, lengths, batch=3),
        lambda: ops.fast_softmax(q),
        lambda: habana.core.mark_step(sync=1),
        lambda: habana.hpu.wrap_in_hpu_graph(Doubles(), disable_tensorcache=True),
        lambda: habana.hpu.metrics.metric_localcontext("graph_compilations").__enter__(),
        lambda: habana.hpu.empty_cache(),
        lambda: habana.hpu.get_device_name(1),
    ]
    for number, call in enumerate(wrong):
        with pytest.raises((TypeError, RuntimeError, AssertionError, AttributeError, KeyError)):  # noqa: PT012
            call()
            print(f"call {number} was accepted")


def cast_large_numbers() -> tuple[list[float], list[float]]:
    stored = torch.tensor([300.0, 448.0], device="cpu").to(FP8).to("hpu")
    made = torch.ops.hpu.cast_to_fp8_v2(torch.tensor([240.0, 300.0, -5000.0]), None, False, False, FP8)[0]
    return made.float().tolist(), torch.ops.hpu.cast_from_fp8(stored, None, torch.float32).tolist()


@pytest.mark.parametrize(
    ("card", "expected"),
    [("Gaudi2", "([240.0, nan, nan], [nan, nan])"), ("Gaudi3", "([240.0, 288.0, nan], [288.0, 448.0])")],
)
def test_fp8_of_each_card(card: str, expected: str):
    program = """if True:
        import habana_frameworks.torch, torch, test_hpu_stand_in
        torch.set_default_device("hpu")
        print(test_hpu_stand_in.cast_large_numbers())"""
    assert run_with_stand_in(program, EMULATED_GAUDI=card).strip() == expected


def cast_plainly() -> list[list[float]]:
    """By torch's own casts: made on the card, widened there, from the host and to it in one, and as a graph does it."""
    large = [239.0, 300.0, 448.0, -500.0]
    x = torch.tensor(large)
    stored = torch.tensor(large, device="cpu").to(FP8)
    found = [x.to(FP8), stored.to("hpu").float(), torch.tensor(large, device="cpu").to("hpu", FP8)]
    found += [stored.to("hpu", torch.float32), torch.zeros(4, 2, dtype=FP8)[:, 1].copy_(x)]
    found += [torch.zeros(4, device="cpu").copy_(stored.to("hpu"))]
    return [each.cpu().float().tolist() for each in found]


def test_bytes_that_are_moved_stay_what_they_are():
    moved = torch.tensor([300.0, -448.0], device="cpu").to(FP8).to("hpu")
    for same in (moved, moved.clone(), torch.zeros(2, dtype=FP8).copy_(moved), torch.cat((moved, moved))[:2]):
        assert same.cpu().float().tolist() == [288.0, -448.0]


@pytest.mark.parametrize(
    ("card", "expected"), [("Gaudi2", [240.0, *[torch.nan] * 2]), ("Gaudi3", [240.0, 288.0, 448.0])]
)
def test_plain_casts_of_each_card(card: str, expected: list[float]):
    program = """if True:
        import habana_frameworks.torch, torch, test_hpu_stand_in
        torch.set_default_device("hpu")
        print([each[:3] for each in test_hpu_stand_in.cast_plainly()])"""
    assert run_with_stand_in(program, EMULATED_GAUDI=card).strip() == str([expected] * 6)


# -- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [True, False])
@torch.inference_mode()
def test_what_is_compiled_went_through_aotautograd(monkeypatch, books, keeps):
    """No op but one that writes an input as a whole changes anything, and that is in the program only if it is asked for."""
    try:
        from habana_frameworks.torch import _compile
    except ImportError as error:
        if "triton" not in str(error):
            raise
        pytest.skip(f"this torch cannot compile with this triton: {error}")
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(_compile, "_compile", keep)

    def step(cache, index, x):
        cache.view(4, 2)[:, 0].index_copy_(0, index, x)
        return cache.sum() + x.relu_().sum()

    program = torch.compile(step, backend="hpu_backend", dynamic=False, options={"keep_input_mutations": keeps})
    cache, x = torch.zeros(8), torch.tensor([3.0, -2.0])
    assert program(cache, torch.tensor([1, 3]), x).item() == 4
    assert cache.tolist() == [0, 0, 3, 0, 0, 0, -2, 0]
    assert x.tolist() == [3, 0]
    (graph,) = graphs
    ops = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert all(isinstance(op, type(torch.ops.aten.add.Tensor)) for op in ops), "nothing of Python is left"
    changing = [str(op) for op in ops if str(op).split(".")[1].endswith("_")]
    assert changing == (["aten.copy_.default"] * 2 if keeps else [])
