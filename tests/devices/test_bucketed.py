"""Steps padded to the shapes of a bucket plan give the tokens of steps that are not padded."""

import importlib.util
import json
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from driving import Tiny, make_request, make_tiny, random_prompts, run, start
from engine_cases import MIN_TOKENS, PARAMS, ends_in_time, on_cpu, requests, same, wait_for_device
from queue_on_cpu import KeepsTokensOnCpu, QueueOnCpu
from torch import Tensor

from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine, start_engine
from text_generation_inference.errors import ValidationError
from text_generation_inference.kernels import block_lists, reference
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.block_lists import (
    BlockLists,
    PromptParts,
    WholePrompts,
    put_together,
    take_apart,
)
from text_generation_inference.kernels.fp8 import FP8
from text_generation_inference.runner.padded_inputs import describe_decode, describe_prefill
from text_generation_inference.runner.shapes.buckets import Bucket
from text_generation_inference.runner.slots import HostTables
from text_generation_inference.types import Chunk, Grammar

Start = Callable[..., Engine]
LIMITS: dict[str, object] = {
    "bucketing": True,
    "max_batch_size": 8,
    "max_input_tokens": 96,
    "max_total_tokens": 160,
    "max_batch_prefill_tokens": 256,
}
LINEAR: dict[str, object] = {
    "batch_bucket_size": 3,
    "prefill_batch_bucket_size": 2,
    "pad_sequence_to_multiple_of": 32,
}


@pytest.fixture(params=["at once", "ahead", "tokens kept"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def start_bucketed(way: str, device_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts engines on the device of the suite; on the CPU also in the roles of those that run ahead."""
    engines: list[Engine] = []
    if device_name != "cpu" and way != "ahead":
        pytest.skip("the CPU's way")
    roles = {"ahead": QueueOnCpu, "tokens kept": KeepsTokensOnCpu}

    def start_engine(folder: Path, **settings: object) -> Engine:
        if device_name == "cpu" and way in roles:
            device = roles[way](tmp_path)
            monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
        engine = start(folder, **{"device": device_name, **LIMITS, **settings})
        monkeypatch.undo()
        engines.append(engine)
        return engine

    yield start_engine
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("Llama", {}, tmp_path_factory.mktemp("llama"))


def check_shapes(engine: Engine) -> None:
    """Everything had a shape that warming up has met."""
    assert engine.rank.runner.steps is not None
    stats = engine.rank.bucket_stats
    assert stats.num_unplanned == 0
    assert engine.rank.runner.steps.passes.shape_stats.news == []
    assert stats.prefill_computed >= stats.prefill_needed > 0
    assert stats.decode_computed >= stats.decode_needed > 0


@pytest.mark.parametrize("settings", [{}, LINEAR], ids=["exponential", "linear"])
def test_every_way_to_choose(tiny_llama: Tiny, start_bucketed: Start, settings: dict[str, object]) -> None:
    asked = requests(PARAMS, [3 + n % 29 for n in range(30)])
    expected = on_cpu(tiny_llama.folder, asked)
    engine = start_bucketed(tiny_llama.folder, **settings)
    same(run(engine, asked), expected)
    same(run(engine, asked, arrivals=[n // 2 for n in range(30)]), expected)
    check_shapes(engine)


def test_no_end_before_its_time(tiny_llama: Tiny, start_bucketed: Start) -> None:
    asked = requests(MIN_TOKENS)
    expected = on_cpu(tiny_llama.folder, asked)
    ends_in_time(asked, expected)
    engine = start_bucketed(tiny_llama.folder)
    same(run(engine, asked, arrivals=[n // 2 for n in range(len(asked))]), expected)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_greedy(family: str, start_bucketed: Start, tmp_path: Path) -> None:
    """Mistral's layers see a window that is shorter than the prompts."""
    overrides = {"attention_bias": True, "mlp_bias": True, "head_dim": 24} if family == "Llama" else {}
    tiny = make_tiny(family, overrides, tmp_path / "model")
    asked = requests([{}], [1, 2, 5, 17, 40, 90, 33, 16])
    expected = on_cpu(tiny.folder, asked)
    engine = start_bucketed(tiny.folder, **LINEAR)
    same(run(engine, asked), expected)
    same(run(engine, asked, arrivals=[0, 1, 3, 3, 10, 12, 12, 30]), expected)
    check_shapes(engine)


@pytest.mark.parametrize(
    "settings",
    [
        {"vllm_exponential_bucketing": False},
        {"pad_sequence_to_multiple_of": 0, "max_batch_size": 1},
        {"vllm_decode_block_bucket_step": 4, "vllm_decode_block_bucket_min": 1, "bucket_strategy": "linear"},
        {"vllm_prompt_bs_bucket_limit": 2, "vllm_decode_block_bucket_limit": 4},
        {"warmup_enabled": False},
        {"overlap": False, "max_batch_total_tokens": 512},
        {"kv_cache_dtype": "fp8_e4m3fn"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_change_nothing(tiny_llama: Tiny, start_bucketed: Start, settings: dict, device_name: str) -> None:
    if device_name != "cpu" and "kv_cache_dtype" in settings:
        pytest.skip("values on the edge of two of the cache's may be rounded to either")
    asked = requests([{}, {"do_sample": True}], [1, 2, 5, 17, 40, 90, 33, 16, 96])
    plain = {name: value for name, value in settings.items() if name == "kv_cache_dtype"}
    unpadded = start(tiny_llama.folder, device="cpu", custom_kernels=False, **plain)
    expected = run(unpadded, asked)
    unpadded.close()
    engine = start_bucketed(tiny_llama.folder, **settings)
    same(run(engine, asked), expected)
    same(run(engine, asked, arrivals=list(range(9))), expected)
    if settings.get("warmup_enabled") is False:  # every shape was a miss, once
        assert engine.rank.runner.steps is not None
        stats, news = engine.rank.bucket_stats, engine.rank.runner.steps.passes.shape_stats.news
        assert 0 < stats.num_unplanned == len(news) <= stats.num_planned and stats.num_warmed == 0
        assert "was not warmed up" in news[0]
    else:
        check_shapes(engine)


def test_padding_rows_and_filler_blocks_may_hold_anything(
    tiny_llama: Tiny, start_bucketed: Start, device_name: str
) -> None:
    """Block 0 takes the writes of padding; nobody's answer depends on what is in it."""
    asked = requests([{}], [1, 17, 40])
    expected = on_cpu(tiny_llama.folder, asked)
    engine = start_bucketed(tiny_llama.folder)
    runner = engine.rank.runner.steps
    assert runner is not None
    for round_number in range(2):
        for k_cache, v_cache in runner.passes._kv_cache:
            k_cache[0], v_cache[0] = 1e30 * (-1) ** round_number, -3e4
        wait_for_device(device_name)
        same(run(engine, asked), expected)


def test_aborts_leave_nothing(tiny_llama: Tiny, start_bucketed: Start) -> None:
    engine = start_bucketed(tiny_llama.folder)
    asked = requests([{}, {"do_sample": True}])
    for round_number in range(6):
        for request in asked:
            engine.loop.add(request)
        for _ in range(round_number):
            engine.loop.step()
        for request in asked:
            engine.loop.abort(request.id)
    while engine.loop.has_work:
        engine.loop.step()
    same(run(engine, asked), on_cpu(tiny_llama.folder, asked))
    check_shapes(engine)


def test_a_step_without_memory_is_taken_back(
    tiny_llama: Tiny, start_bucketed: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come back with their tokens: one of them with more than any shape is made for."""
    asked = requests([{}, {"do_sample": True}, {"decoder_input_details": True}], [90, 5, 96, 17])
    expected = on_cpu(tiny_llama.folder, asked)
    engine = start_bucketed(tiny_llama.folder, max_step_ms=0)
    runner = engine.rank.runner.steps
    assert runner is not None
    compute, calls = runner.passes._graphs, iter(range(1000))

    def compute_or_not(batch: Batch, bypass: bool = False) -> Tensor:
        if next(calls) in (0, 14, 30):
            raise torch.OutOfMemoryError("no memory")
        return compute(batch, bypass)

    compute_or_not.num_captured = 0  # pyright: ignore
    monkeypatch.setattr(runner.passes, "_graphs", compute_or_not)
    same(run(engine, asked, arrivals=[0, 0, 2, 3]), expected)
    assert engine.loop.scheduler.stats.num_rollbacks >= 2
    assert any("not in the bucket plan" in news for news in runner.passes.shape_stats.take_news())


def test_a_request_that_never_fits_ends(
    tiny_llama: Tiny, start_bucketed: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_bucketed(tiny_llama.folder)
    runner = engine.rank.runner.steps
    assert runner is not None
    compute = runner.passes._graphs

    def refuse_long(batch: Batch, bypass: bool = False) -> Tensor:
        if not isinstance(batch.meta, BlockLists) and int(batch.seq_lens.max()) > 50:
            raise torch.OutOfMemoryError("no memory")
        return compute(batch, bypass)

    refuse_long.num_captured = 0  # pyright: ignore
    monkeypatch.setattr(runner.passes, "_graphs", refuse_long)
    asked = requests([{}], [5, 90, 17])
    outputs = run(engine, asked)
    assert outputs[1].reason == "error" and "this request alone" in (outputs[1].error or "")
    same([outputs[0], outputs[2]], [on_cpu(tiny_llama.folder, asked)[n] for n in (0, 2)])


def test_a_chat_costs_its_new_tokens(tiny_llama: Tiny, start_bucketed: Start) -> None:
    """Each turn is the one before, its answer and a new question; two chats with one system prompt."""
    limits = {"max_input_tokens": 180, "max_total_tokens": 200, "max_batch_prefill_tokens": 192}
    engine = start_bucketed(tiny_llama.folder, **limits)
    plain = start(tiny_llama.folder, device="cpu", custom_kernels=False)
    system, *questions = random_prompts(320, [40, 20, 31, 7, 12, 25, 9], seed=11)
    stats, size = engine.loop.scheduler.stats, engine.resolved.block_size
    chats, number = [list(system), list(system)], 0
    for turn in range(3):
        asked = []
        for chat in (0, 1):
            chats[chat] += questions[2 * turn + chat]
            params = {"decoder_input_details": True} if turn == 2 and chat else {"do_sample": chat == 1}
            asked.append(make_request(number, chats[chat], 9, seed=number, **params))
            number += 1
        before, needed = stats.num_cached_prompt_tokens, engine.rank.bucket_stats.prefill_needed
        outputs = run(engine, asked, arrivals=[0, 2])
        same(outputs, run(plain, asked))
        prompts = sum(len(request.token_ids) for request in asked)
        cached = stats.num_cached_prompt_tokens - before
        assert engine.rank.bucket_stats.prefill_needed - needed == prompts - cached, "what is cached is not computed"
        reusable = [len(request.token_ids) - len(questions[2 * turn + chat]) for chat, request in enumerate(asked)]
        if turn:
            scored = turn == 2  # nothing of a prompt whose tokens are scored comes from the cache
            assert cached >= sum((length - 1) // size * size for length in reusable[: 2 - scored])
        else:
            assert cached == len(system) // size * size, "the second one finds the system prompt"
        for chat, output in enumerate(outputs):
            chats[chat] += output.token_ids
    plain.close()
    check_shapes(engine)


def test_equal_prompts_of_a_step_are_computed_once(tiny_llama: Tiny, start_bucketed: Start) -> None:
    """Who would find blocks that the very step fills, in a pass that may come later, waits for the next one."""
    prompt = random_prompts(320, [80], seed=12)[0]
    asked = [make_request(n, prompt, 8) for n in range(4)]
    expected = on_cpu(tiny_llama.folder, asked)
    engine = start_bucketed(tiny_llama.folder)
    same(run(engine, asked), expected)
    size = engine.resolved.block_size
    assert engine.loop.scheduler.stats.num_cached_prompt_tokens == 3 * (79 // size * size)
    check_shapes(engine)


@pytest.mark.parametrize("settings", [{}, LINEAR, {"max_step_ms": 1}], ids=["exponential", "linear", "short steps"])
def test_prompts_in_parts(tiny_llama: Tiny, start_bucketed: Start, settings: dict[str, object]) -> None:
    """Longer ones than a step; those that are scored, too."""
    limits = {"max_input_tokens": 180, "max_total_tokens": 200, "max_batch_prefill_tokens": 48}
    scored = {"decoder_input_details": True, "prompt_top_n_tokens": 3}
    asked = requests([{}, scored, {"repetition_penalty": 1.4}], [150, 49, 3, 180, 48, 97, 130])
    expected = on_cpu(tiny_llama.folder, asked)
    engine = start_bucketed(tiny_llama.folder, **limits, **settings)
    same(run(engine, asked), expected)
    same(run(engine, asked, arrivals=[0, 1, 3, 3, 5, 8, 30]), expected)
    check_shapes(engine)
    with pytest.raises(ValidationError, match="max_input_tokens"):
        engine.loop.add(make_request(100, [5] * 181, 4))


def test_more_best_ids_in_a_prompt_than_were_met(tiny_llama: Tiny, start_bucketed: Start) -> None:
    """As many as a request may ask for; the others of a batch have what they asked for."""
    scored = {"decoder_input_details": True}
    asked = requests(
        [{**scored, "prompt_top_n_tokens": 100}, scored, {**scored, "prompt_top_n_tokens": 8}], [20, 9, 50]
    )
    engine = start_bucketed(tiny_llama.folder)
    found = run(engine, asked)
    same(found, on_cpu(tiny_llama.folder, asked))
    assert [{len(tops) for tops in output.prompt_tops.values()} for output in found] == [{100}, set(), {8}]


def test_whole_prompts_for_who_wants_them(tiny_llama: Tiny, start_bucketed: Start) -> None:
    engine = start_bucketed(tiny_llama.folder, prefix_caching=False)
    assert not engine.rank.runner.steps.plan.in_parts
    asked = requests([{}], [90, 40])
    for _ in range(2):
        same(run(engine, asked), on_cpu(tiny_llama.folder, asked))
    assert engine.loop.scheduler.stats.num_cached_prompt_tokens == 0
    check_shapes(engine)


def test_a_broken_model_fails_its_requests(tiny_llama: Tiny, start_bucketed: Start, device_name: str) -> None:
    engine = start_bucketed(tiny_llama.folder)
    assert engine.rank.runner.steps is not None
    engine.rank.runner.model.model.norm.weight.fill_(math.nan)
    wait_for_device(device_name)
    output = run(engine, requests([{}], [5]))[0]
    assert output.reason == "error"
    assert "not finite" in (output.error or "")


def test_a_prompt_that_no_shape_holds_is_refused(tiny_llama: Tiny, start_bucketed: Start) -> None:
    engine = start_bucketed(tiny_llama.folder)
    with pytest.raises(ValidationError, match="max_input_tokens"):
        engine.loop.add(make_request(0, [5] * 97, 4))


def test_the_embedded_model(start_bucketed: Start, device_name: str, way: str) -> None:
    """Grammars too, whose masks depend on the tokens before."""
    if device_name == "cpu" and way == "ahead":
        pytest.skip("takes long on the CPU; the parts are tested with smaller models")
    limits = {"max_batch_size": 4, "max_input_tokens": 48, "max_total_tokens": 64, "max_batch_prefill_tokens": 96}
    prompts = random_prompts(40_000, [3, 20, 41, 9], seed=8)
    asked = [make_request(n, prompt, 6, seed=n, do_sample=n == 1) for n, prompt in enumerate(prompts)]
    asked[3] = msgspec.structs.replace(asked[3], grammar=Grammar("regex", "[0-9]{3}-[a-c]+x"), stop_token_ids=[0, 2])
    unpadded = start(Path("embedded"), device="cpu", max_batch_size=4, max_total_tokens=64)
    expected = run(unpadded, asked)
    unpadded.close()
    engine = start_bucketed(Path("embedded"), **limits)
    same(run(engine, asked, arrivals=[0, 0, 2, 3]), expected, 2e-3)
    assert expected[3].error is None
    check_shapes(engine)


# -- before the first request --------------------------------------------------------------------------------------


class Measured(QueueOnCpu):
    """A device whose memory is measured: a token of a step takes 1000 bytes, for a while."""

    free, compiled, largest = 10**9, 0, 0

    def __init__(self, cache_dir: Path) -> None:
        super().__init__(cache_dir)
        self.limits = msgspec.structs.replace(self.limits, measures_steps=True, meters_memory=True)
        embedding = self.ops.embedding

        def look_up(ids: Tensor, weight: Tensor) -> Tensor:
            self.largest = max(self.largest, ids.shape[0])
            return embedding(ids, weight)

        self.ops.embedding = look_up
        self.pool: weakref.WeakSet[Callable[[], None]] | None = None

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Refuses what torch refuses: a capture into a pool whose graphs are all gone."""
        assert self.pool is None or len(self.pool), "a pool without graphs"
        replay, result = super().capture(work)
        self.pool = self.pool or weakref.WeakSet()
        self.pool.add(replay)
        return replay, result

    def forget_captures(self) -> None:
        assert not self.pool, "somebody still has a graph"
        self.pool = None

    def free_bytes(self) -> int:
        return self.free

    def compiling(self) -> AbstractContextManager[None]:
        self.compiled += 1
        return nullcontext()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        self.largest = 0
        work()
        return 1000 * self.largest


def test_a_measured_device_meets_every_shape(
    tiny_llama: Tiny, device_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device_name != "cpu":
        pytest.skip("with a device double")
    device = Measured(tmp_path)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    told: list[tuple[str, int, int]] = []
    config = ServerConfig(model_id=str(tiny_llama.folder), dtype="float32", cache_dir=str(tmp_path), **LIMITS)
    engine = start_engine(config, lambda *progress: told.append(progress))
    assert device.compiled == 1
    assert engine.rank.runner.steps is not None
    stats = engine.rank.bucket_stats
    assert stats.num_captured == stats.num_planned, "every shape is small enough for a graph"
    assert any("bucket plan, exponential" in note for note in engine.notes)
    assert told[-1] == ("warm up shapes", stats.num_planned, stats.num_planned)
    asked = requests(PARAMS, [3 + n % 29 for n in range(20)])
    same(run(engine, asked), on_cpu(tiny_llama.folder, asked))
    check_shapes(engine)
    assert engine.rank.bucket_stats.num_captured == stats.num_planned
    engine.close()
    record = next((tmp_path / "warmed").glob("*.json"))
    assert len(json.loads(record.read_text())["shapes"]) == stats.num_planned
    told.clear()
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: Measured(tmp_path))
    start_engine(config, lambda *progress: told.append(progress)).close()
    assert told[-1][1] == told[-1][2] > stats.num_planned, "the next start knows how many milliseconds each shape takes"


# -- the ops -------------------------------------------------------------------------------------------------------


def padded_case(seed: int, lengths: list[int], bucket: Bucket, dtype: torch.dtype) -> tuple[HostTables, list[Tensor]]:
    """Rows of these lengths in random blocks of a cache full of random values, and that cache."""
    rng = np.random.default_rng(seed)
    books = HostTables(np.zeros(len(lengths), dtype=np.int64), np.zeros((len(lengths), 20), dtype=np.int32), 8)
    books.lengths[:] = lengths
    blocks = iter(rng.permutation(np.arange(1, 50)))
    for row, length in enumerate(lengths):
        books.tables[row, : -(-length // 8)] = [next(blocks) for _ in range(-(-length // 8))]
    generator = torch.Generator().manual_seed(seed)
    caches = [torch.randn((50, 8, 2, 16), generator=generator) for _ in range(2)]
    for cache in caches:
        cache[0] = math.nan
    return books, [cache.to(dtype) for cache in caches]


def places(books: HostTables, slots: np.ndarray, positions: np.ndarray) -> Tensor:
    """Where the keys of tokens are; those of no slot are in block 0."""
    size = books.block_size
    found = books.tables[slots, positions // size].astype(np.int64) * size + positions % size
    return torch.from_numpy(np.where(slots < 0, 0, found))


def decode_batch(bucket: Bucket, books: HostTables) -> Batch:
    arrays = describe_decode(bucket, range(len(books.lengths)), books)
    seq_lens = np.where(arrays.slots < 0, 0, books.lengths[arrays.slots])
    lists = {name: torch.from_numpy(array.astype(np.int32)) for name, array in arrays.lists.items()}
    lengths = torch.from_numpy(seq_lens.astype(np.int32))
    ids = torch.zeros(bucket.batch, dtype=torch.int64)
    meta = BlockLists(**{"block_list": None, "row_starts": None, **lists})
    return Batch(ids, ids, places(books, arrays.slots, np.maximum(seq_lens - 1, 0)), lengths, meta)


def prefill_batch(bucket: Bucket, books: HostTables) -> Batch:
    arrays = describe_prefill(bucket, [Chunk(n, 0, int(length), True) for n, length in enumerate(books.lengths)], books)
    index, last = places(books, arrays.token_slots, arrays.positions), torch.from_numpy(arrays.last_tokens)
    ids = torch.zeros(bucket.num_tokens, dtype=torch.int64)
    return Batch(ids, ids, index, torch.from_numpy(arrays.seq_lens).int(), WholePrompts(), last)


def as_unpadded(books: HostTables, lengths: list[int], num_decode: int) -> Batch:
    prompts = lengths[num_decode:]
    return Batch(
        input_ids=torch.zeros(0),
        positions=torch.zeros(0),
        kv_index=torch.zeros(0),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        meta=PagedMeta(
            block_tables=torch.from_numpy(books.tables),
            num_decode=num_decode,
            chunk_starts_cpu=[0] * len(prompts),
            chunk_ends_cpu=prompts,
            max_seq_len=max(lengths),
        ),
    )


HOW = {"plain": {}, "window": {"window": 5}, "softcap": {"softcap": 2.0}, "fp8": {"kv_scales": (0.5, 2.0)}}


@pytest.mark.parametrize("how", list(HOW))
def test_decode_attention(how: str) -> None:
    lengths = [1, 8, 9, 40, 17]
    bucket = Bucket("decode", 8, 20)
    dtype = FP8 if how == "fp8" else torch.float32
    books, (k_cache, v_cache) = padded_case(1, lengths, bucket, dtype)
    batch = decode_batch(bucket, books)
    q = torch.randn((8, 6, 16), generator=torch.Generator().manual_seed(2))
    ours = reference.attention(q, None, None, k_cache, v_cache, batch, 0.3, **HOW[how])
    expected = reference.attention(q[:5], None, None, k_cache, v_cache, as_unpadded(books, lengths, 5), 0.3, **HOW[how])
    torch.testing.assert_close(ours[:5], expected, atol=2e-6, rtol=1e-5)
    assert (ours[5:] == 0).all()
    in_place = decode_batch(Bucket("decode", 8, 50, contiguous=True), books)  # all of the cache, as it lies
    assert in_place.meta.block_list is None
    torch.testing.assert_close(
        reference.attention(q, None, None, k_cache, v_cache, in_place, 0.3, **HOW[how]), ours, atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize("how", list(HOW))
def test_prefill_attention(how: str) -> None:
    lengths = [1, 8, 23]
    bucket = Bucket("prefill", 4, 24)
    dtype = FP8 if how == "fp8" else torch.float32
    books, (k_cache, v_cache) = padded_case(3, lengths, bucket, dtype)
    for cache in (k_cache, v_cache):
        cache[0] = 0.0  # padding has written there
    batch = prefill_batch(bucket, books)
    q = torch.randn((96, 6, 16), generator=torch.Generator().manual_seed(4))
    real = (torch.arange(24) < batch.seq_lens[:, None]).flatten()
    ours = reference.attention(q, q, q, k_cache, v_cache, batch, 0.3, **HOW[how])
    expected = reference.attention(
        q[real], None, None, k_cache, v_cache, as_unpadded(books, lengths, 0), 0.3, **HOW[how]
    )
    torch.testing.assert_close(ours[real], expected, atol=2e-6, rtol=1e-5)
    assert ours.isfinite().all()
    assert batch.logit_tokens is not None
    assert batch.logit_tokens.tolist() == [0, 24 + 7, 48 + 22, 72]


def parts_batch(bucket: Bucket, books: HostTables, starts: list[int]) -> Batch:
    chunks = [Chunk(n, start, int(end), True) for n, (start, end) in enumerate(zip(starts, books.lengths, strict=True))]
    arrays = describe_prefill(bucket, chunks, books)
    assert arrays.tables is not None
    ids, last = torch.zeros(bucket.num_tokens, dtype=torch.int64), torch.from_numpy(arrays.last_tokens)
    parts = PromptParts(*(torch.from_numpy(array).int() for array in (arrays.tables, arrays.starts)))
    index = places(books, arrays.token_slots, arrays.positions)
    return Batch(ids, ids, index, torch.from_numpy(arrays.seq_lens).int(), parts, last)


@pytest.mark.parametrize("how", [*HOW, "sinks", "slopes", "chunked"])
def test_attention_of_parts(how: str) -> None:
    """Whatever is behind a row's tokens in the cache, and in blocks of others, is not looked at."""
    more = {
        "sinks": {"sinks": torch.linspace(-1, 1, 6)},
        "slopes": {"slopes": torch.linspace(0.1, 0.6, 6)},
        "chunked": {"attention_chunk": 12},
    }
    how_to = {**HOW, **more}[how]
    lengths, starts, bucket = [3, 30, 41, 16], [0, 8, 21, 15], Bucket("prefill", 5, 24, 32)
    dtype = FP8 if how == "fp8" else torch.float32
    books, (k_cache, v_cache) = padded_case(9, lengths, bucket, dtype)
    batch = parts_batch(bucket, books, starts)
    for cache in (k_cache, v_cache):
        cache[0] = 0.0  # padding has written there
        for row, length in enumerate(lengths):
            cache[books.tables[row, (length - 1) // 8], (length - 1) % 8 + 1 :] = math.nan
    q = torch.randn((bucket.num_tokens, 6, 16), generator=torch.Generator().manual_seed(4))
    counts = torch.tensor([*(end - start for start, end in zip(starts, lengths, strict=True)), 0])
    real = (torch.arange(24) < counts[:, None]).flatten()
    ours = reference.attention(q, None, None, k_cache, v_cache, batch, 0.3, **how_to)
    unpadded = as_unpadded(books, lengths, 0)
    unpadded.meta.chunk_starts_cpu = starts
    expected = reference.attention(q[real], None, None, k_cache, v_cache, unpadded, 0.3, **how_to)
    torch.testing.assert_close(ours[real], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("phase", ["prefill", "parts", "decode"])
def test_kernels_that_read_tables_and_tiles(phase: str, device_name: str) -> None:
    """They take a padded pass as `as_paged` puts it."""
    from text_generation_inference.kernels.triton.ops import load_ops

    loaded = load_ops(4)
    assert not isinstance(loaded, str)
    where = torch.device("cuda" if device_name == "cuda" else "cpu")
    generator = torch.Generator().manual_seed(5)
    if phase == "decode":
        lengths, bucket = [1, 9, 40], Bucket("decode", 4, 12)
        books, caches = padded_case(6, lengths, bucket, torch.float32)
        batch = decode_batch(bucket, books)
    elif phase == "parts":
        lengths, bucket = [1, 150, 23], Bucket("prefill", 4, 136, 32)
        books, caches = padded_case(7, lengths, bucket, torch.float32)
        batch = parts_batch(bucket, books, [0, 19, 16])
    else:
        lengths, bucket = [1, 130, 23], Bucket("prefill", 4, 160)
        books, caches = padded_case(7, lengths, bucket, torch.float32)
        batch = prefill_batch(bucket, books)
    k_cache, v_cache = (cache.nan_to_num(0.0).to(where) for cache in caches)
    batch = put_together({name: tensor.to(where) for name, tensor in take_apart(batch).items()})
    tokens = batch.input_ids.shape[0]
    q = torch.randn((tokens, 4, 16), generator=generator).to(where)
    block, place = batch.kv_index // 8, batch.kv_index % 8
    k, v = k_cache[block, place].contiguous(), v_cache[block, place].contiguous()
    found = loaded.attention(q, k, v, k_cache, v_cache, block_lists.as_paged(batch), 0.3)
    expected = reference.attention(q, k, v, k_cache, v_cache, batch, 0.3)
    if phase == "decode":
        real = batch.seq_lens >= 0  # padding gets 0 from both
    else:
        counts = batch.seq_lens - (batch.meta.starts if phase == "parts" else 0)
        real = (torch.arange(bucket.length, device=where) < counts[:, None]).flatten()
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-4)
