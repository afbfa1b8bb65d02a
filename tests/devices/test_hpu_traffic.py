"""What goes between host and card in a step, and what decode attention moves of the cache: counted by the stand-in.

And blocks that are read where they are, for which the cache is read once: where they can be, and that nothing else
follows from it.
"""

import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
from driving import make_request, make_tiny, random_prompts, run, start
from hpu_batches import HEADS, SIZE, Called, Made, close
from hypothesis import given, settings
from hypothesis import strategies as st
from served_pictures import PROMPTS, serve

from text_generation_inference.kernels import block_lists, fp8
from text_generation_inference.kernels.block_lists import BlockLists

LIMITS = {"max_batch_size": 2, "max_total_tokens": 400, "max_batch_total_tokens": 4096}
IN_PLACE = {"vllm_contiguous_pa": True}


def in_place(made: Made, more: int, stranger: int) -> BlockLists:
    """The same rows over the first blocks of the cache; `stranger` are blocks of nobody, who say that they are full."""
    lists = made.batch.meta
    real = lists.block_groups >= 0
    ids = lists.block_list[real].long()
    count = max(int(ids.max()) + 1, stranger) + more
    groups, usage, numbers = (torch.full((count,), value, dtype=torch.int32) for value in (-1, 1, 0))
    usage[:stranger] = SIZE
    groups[ids], usage[ids], numbers[ids] = (
        lists.block_groups[real],
        lists.block_usage[real],
        lists.numbers()[real].int(),
    )
    return BlockLists(None, groups, usage, None, numbers)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_blocks_in_place_are_those_of_the_list(hpu, data):
    """Whatever lies between them, even keys that are no numbers."""
    rows = data.draw(st.integers(1, 4))
    lens = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=rows))
    window, softcap = data.draw(st.none() | st.integers(1, 300)), data.draw(st.none() | st.just(3.0))
    made = Made(hpu, lens, rows, True, blocks=sum(-(-n // SIZE) for n in lens), **HEADS)
    expected = block_lists.decode_attention(made.q, made.k_cache, made.v_cache, made.batch, 0.25, window, softcap)
    others = torch.ones(made.k_cache.shape[0], dtype=torch.bool)
    others[made.batch.meta.block_list.long()] = False
    made.k_cache[others] = torch.nan
    spare = made.k_cache.shape[0] - int(made.batch.meta.block_list.max()) - 1
    made.batch = replace(made.batch, meta=in_place(made, data.draw(st.integers(0, spare)), 1))
    close(block_lists.decode_attention(made.q, made.k_cache, made.v_cache, made.batch, 0.25, window, softcap), expected)
    (q, k, v, _), batch, caches = made.on(hpu)
    close(hpu.ops.attention(q, k, v, *caches, batch, 0.25, window, softcap), expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return make_tiny("Llama", {"num_hidden_layers": 3}, tmp_path_factory.mktemp("llama")).folder


def count(engine, requests) -> dict[str, list]:
    """Counts of the steps of each kind, once what they need is captured."""
    from habana_frameworks.torch._traffic import Traffic

    runner, device, found = engine.rank.runner, engine.rank.device, {}
    traffic = Traffic(device.torch_device, [tensor for layer in runner.kv_cache for tensor in layer])
    queue = runner._queue

    def counted(plan, previous):
        traffic.take()
        finish = queue(plan, previous)  # which reads what came to the host
        found.setdefault("prompts" if plan.chunks else "decoding", []).append(traffic.take())
        return finish

    device.submit(traffic.start).result()
    runner._queue = counted
    try:
        run(engine, requests)
    finally:
        device.submit(traffic.stop).result()
        runner._queue = queue
    return found


def test_a_step_is_one_copy_in_and_one_out(hpu, start_hpu, folder):
    """And lists, masks and mappings are computed once for all layers, as many as there may be."""
    if not hpu.bridge.emulated or not hpu.bridge.lazy:
        pytest.skip("the stand-in counts")
    asked = [make_request(n, prompt, 6) for n, prompt in enumerate(random_prompts(320, [20, 150], seed=1))]
    engine = start_hpu(folder, warmup_enabled=False, **LIMITS, **IN_PLACE)
    found = count(engine, asked)
    for phase in ("decoding", "prompts"):
        assert {(step.sends, step.reads, step.waits) for step in found[phase][1:]} <= {(1, 1, 0)}, phase
    step = found["decoding"][2]
    layers, config = 3, engine.rank.runner.model.spec.layers[0].attention
    token = 2 * config.num_kv_heads * config.head_dim * 4  # bytes of a token's key and value
    assert step.cache_written == layers * 2 * token
    blocks = engine.rank.runner.steps.plan.decode[-1].length
    assert step.cache_copied == 0
    assert step.cache_read <= layers * blocks * SIZE * token
    shallow = make_tiny("Llama", {"num_hidden_layers": 1}, folder.parent / "shallow").folder
    fewer = count(start_hpu(shallow, warmup_enabled=False, **LIMITS, **IN_PLACE), asked)
    assert fewer["decoding"][2].list_ops == step.list_ops > 0
    assert fewer["prompts"][0].list_ops == found["prompts"][0].list_ops > 0


def test_what_is_read_of_pictures_is_part_of_that_copy(hpu, tmp_path):
    """Which rows of which pictures, by layers of cross-attention."""
    if not hpu.bridge.emulated or not hpu.bridge.lazy:
        pytest.skip("the stand-in counts")
    served = serve("mllama", tmp_path)
    sizes = {"max_total_tokens": 512, "max_batch_size": 2, "max_images_per_request": 5}
    engine = served.start(device="hpu", **sizes, warmup_enabled=False)
    found = count(engine, [served.request(place, PROMPTS[1 + 3 * (place % 2)]) for place in range(6)])
    engine.close()
    for phase, steps in found.items():  # of the last ones, when pictures and graphs are there
        assert {(step.sends, step.reads, step.waits) for step in steps[-2:]} == {(1, 1, 0)}, phase


ASKED = {"temperature": 0.8, "top_k": 7, "seed": 3}
COPIES = {  # to the card in a step, and back
    "draws": (ASKED, 2, 1),
    "penalties": ({"repetition_penalty": 1.2, "presence_penalty": 0.1}, 2, 1),
    "both": ({**ASKED, "frequency_penalty": 0.3}, 3, 1),
    "every part": ({**ASKED, "repetition_penalty": 1.2, "watermark": True, "logit_bias": {5: 3.0}}, 5, 1),
    "best ids": ({"top_n_tokens": 3}, 2, 2),
}


@pytest.mark.parametrize("name", COPIES)
def test_each_part_of_sampling_is_one_copy_more(hpu, start_hpu, folder, name):
    """With all that it reads, for those who have just come too."""
    if not hpu.bridge.emulated or not hpu.bridge.lazy:
        pytest.skip("the stand-in counts")
    sampling, sends, reads = COPIES[name]
    asked = [make_request(n, list(range(9 + n)), 5 + 3 * n, **sampling) for n in range(2)]
    found = count(start_hpu(folder, warmup_enabled=False, **LIMITS), asked)
    assert {(step.sends, step.reads) for step in found["decoding"]} == {(sends, reads)}
    assert {(step.sends, step.reads) for step in found["prompts"]} == {(sends, reads)}


class SlowCard:
    """Is past a step only when the next one was queued, where there will be one."""

    def __init__(self, engine, monkeypatch) -> None:
        from habana_frameworks.torch.hpu import Event

        self._changed, self._num_queued, self._is_last, self.waited = threading.Condition(), 0, False, []
        plan, record, synchronize = engine.loop.scheduler.plan, Event.record, Event.synchronize

        def plan_next():
            found = plan()
            with self._changed:
                self._is_last = found is None
                self._changed.notify_all()
            return found

        def note(event, stream=None):
            record(event, stream)
            with self._changed:
                self._num_queued += 1
                event.number = self._num_queued
                self._changed.notify_all()

        def wait(event):
            with self._changed:
                done = self._changed.wait_for(lambda: self._is_last or self._num_queued > event.number, timeout=20)
                assert done, "nothing was queued while the host waited for a step"
                self.waited.append(self._num_queued - event.number)
            synchronize(event)

        monkeypatch.setattr(engine.loop.scheduler, "plan", plan_next)
        monkeypatch.setattr(Event, "record", note)
        monkeypatch.setattr(Event, "synchronize", wait)


@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "top_n_tokens": 2}, {"typical_p": 0.8, "logit_bias": {5: 3.0}}]
)
def test_a_step_is_queued_before_the_host_has_read_the_one_before(hpu, start_hpu, folder, monkeypatch, sampling):
    """Its tokens are found on the card. With another step in between, when a request is through, too."""
    if not hpu.bridge.emulated or not hpu.bridge.lazy:
        pytest.skip("the stand-in can be made to wait")
    prompts = random_prompts(320, [20, 150, 7, 131], seed=1)
    asked = [make_request(n, prompt, 5 + 3 * n, seed=n, **sampling) for n, prompt in enumerate(prompts)]
    engine = start(folder, device="cpu", **LIMITS)
    expected = [output.token_ids for output in run(engine, asked)]
    engine.close()
    engine = start_hpu(folder, **LIMITS)
    card = SlowCard(engine, monkeypatch)
    assert [output.token_ids for output in run(engine, asked, arrivals=[0, 0, 3, 9])] == expected
    assert card.waited.count(1) > len(card.waited) - 3, "all but the last had another behind them"


def test_prefixes_that_are_shared_are_read_by_their_list(hpu, start_hpu, folder):
    """A block in place has one row that looks at it. The shapes of both ways are warm."""
    shared = random_prompts(320, [140], seed=2)[0]
    asked = [make_request(n, [*shared, 7 + n], 8) for n in range(2)]
    alone = [make_request(9, random_prompts(320, [300], seed=4)[0], 8)]
    engine = start(folder, device="cpu", **LIMITS)
    expected = [[output.token_ids for output in run(engine, some, arrivals)] for some, arrivals in ((asked, [0, 2]), (alone, [0]))]  # fmt: skip
    engine.close()
    few = {"vllm_prompt_seq_bucket_limit": 1, "vllm_prompt_bs_bucket_limit": 1}
    engine = start_hpu(folder, **LIMITS, **IN_PLACE, **few)
    met, passes = Counter(), engine.rank.runner.steps.passes
    find, compiled = passes.find_decode, hpu.bridge.count_compilations()
    passes.find_decode = lambda *about: [bucket := find(*about), met.update([(bucket.batch, bucket.contiguous)])][0]
    assert [output.token_ids for output in run(engine, asked, arrivals=[0, 2])] == expected[0]
    assert met[2, False] > 0 and met[2, True] == 0 and met[1, True] > 0
    met.clear()
    assert [output.token_ids for output in run(engine, alone)] == expected[1]
    assert set(met) == {(1, True)}
    assert hpu.bridge.count_compilations() == compiled and engine.rank.bucket_stats.num_unplanned == 0


def test_scales_that_are_known_are_constants_of_graphs(hpu):
    """Those of weights and measured ones of inputs; the cast of inputs takes its scale as a number."""
    if not hpu.bridge.emulated or not hpu.bridge.lazy or not hpu.supports_fp8:
        pytest.skip("the stand-in tells what is marked, where there is something to mark")
    data = torch.full((4, 8), 120.0).to(fp8.FP8)
    scales = torch.full((4,), 0.5), torch.tensor(0.25)
    weight = hpu.ops.pack_fp8(fp8.Fp8Weight(data, *scales, torch.float32, full_scale=hpu.fp8_max))
    hpu.wrap_graphs(lambda batch: batch.input_ids)
    assert weight.scale.is_const and weight.input_scale.is_const
    with Called() as called:
        found = hpu.ops.linear(torch.ones(3, 8).to(hpu.torch_device), weight)
    close(found, torch.full((3, 4), 8 * 60.0))
    assert "hpu.cast_to_fp8_v2.scalar" in called.names
    assert not {"aten.reciprocal.default", "aten.minimum.default"} & set(called.names)
