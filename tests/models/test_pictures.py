"""Models that see, whole: tokens and log-probabilities are those of `transformers`, whatever the engine does with steps."""

import hashlib
import math
import shutil
from pathlib import Path

import pytest
from driving import Output, collect, run, spoil_free_blocks, start
from queue_on_cpu import QueueOnCpu
from served_pictures import NUM_NEW, PROMPTS, Served, check, serve
from thread_runners import start_threads
from vision_oracle import FAMILIES, draw

from text_generation_inference.engine.ranks import Ranks
from text_generation_inference.errors import StartError
from text_generation_inference.models.registry import SEEING
from text_generation_inference.runner.pictures import SlotPictures
from text_generation_inference.scheduler.pace import StepPace
from text_generation_inference.types import PictureSpan

SERVED = [name for name, family in FAMILIES.items() if family.architecture in SEEING]


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(request.param, tmp_path_factory.mktemp(request.param))


def test_pictures_change_the_answer(served: Served) -> None:
    one, other = (served.expected[number].logprobs for number in (1, 4))
    assert max(abs(a - b) for a, b in zip(one, other, strict=False)) > 0.05


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_batches_of_texts_and_pictures(served: Served, prefix_caching: bool) -> None:
    engine = served.start(prefix_caching=prefix_caching)
    requests = [served.request(number, prompt) for number, prompt in enumerate(PROMPTS)]
    check(served, run(engine, requests))
    again = [served.request(10 + number, prompt) for number, prompt in enumerate(PROMPTS)]
    check(served, run(engine, again, arrivals=[0, 1, 1, 3, 4]))
    engine.close()


def test_layers_with_windows_give_back_what_is_behind(served: Served) -> None:
    """Tokens of pictures, which see each other both ways, and what follows: in blocks of their own."""
    if served.oracle.name != "gemma3":
        pytest.skip("all layers have the same blocks")
    longest = max(len(served.oracle.ids(prompt)) for prompt in PROMPTS)
    engine = served.start(max_batch_prefill_tokens=32, max_total_tokens=longest + NUM_NEW)
    pool = engine.loop.scheduler.pool
    assert pool.beside is not None and pool.beside.window == 24 and longest > 4 * 24
    spoil_free_blocks(engine)
    requests = [served.request(number, prompt) for number, prompt in enumerate(PROMPTS)]
    check(served, run(engine, requests, arrivals=[0, 1, 1, 3, 4]))
    check(served, run(engine, requests[3:4]), [3])
    assert engine.loop.scheduler.stats.num_cached_prompt_tokens > 0
    engine.close()


def test_chunks(served: Served) -> None:
    """Of a few tokens, or of as many as must be computed at once."""
    longest = max(len(served.oracle.ids(prompt)) for prompt in PROMPTS)
    whole = served.oracle.name in ("gemma3", "paligemma")
    engine = served.start(max_batch_prefill_tokens=longest if whole else 7, max_total_tokens=longest + NUM_NEW)
    requests = [served.request(number, prompt) for number, prompt in enumerate(PROMPTS)]
    check(served, run(engine, requests))
    engine.close()


def test_scored_prompts_and_penalties(served: Served) -> None:
    """Tokens that stand for pictures may have ids that no score belongs to."""
    engine = served.start()
    scored = [served.request(number, prompt, decoder_input_details=True) for number, prompt in enumerate(PROMPTS[:3])]
    outputs = run(engine, scored)
    check(served, outputs, range(3))
    for number, output in enumerate(outputs):
        expected = served.expected[number].prompt_logprobs
        found = {place: output.prompt_logprobs[place] for place in expected}
        assert found == pytest.approx(expected, abs=1e-4), f"prompt {number}"
        assert len(output.prompt_logprobs) == len(scored[number].token_ids) - 1
    penalised = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1, "top_n_tokens": 3}
    for output in run(engine, [served.request(10 + n, prompt, **penalised) for n, prompt in enumerate(PROMPTS[:3])]):
        assert output.error is None and len(output.token_ids) == NUM_NEW
    engine.close()


def test_preemption(served: Served) -> None:
    """Pictures are computed again, without being sent again."""
    numbers = [1, 4, 1, 4]
    blocks = [-(-(len(served.oracle.ids(PROMPTS[number])) + NUM_NEW - 1) // 16) for number in numbers]
    sizes = {"max_batch_total_tokens": 16 * (sum(blocks) - 1), "max_total_tokens": 16 * max(blocks) + 1}
    engine = served.start(prefix_caching=False, **sizes)
    requests = [served.request(place, PROMPTS[number]) for place, number in enumerate(numbers)]
    check(served, run(engine, requests), numbers)
    assert engine.loop.scheduler.stats.num_preemptions > 0
    engine.close()


def test_room_for_few_pictures(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who read pictures by cross-attention wait for it, and give it back however they end."""
    if served.oracle.name != "mllama":
        pytest.skip("features stand in the place of tokens, and are needed for the step that computes these")
    engine = served.start(max_images_per_request=5, max_batch_size=4, max_batch_prefill_tokens=11)
    numbers = [1, 3, 2, 0, 4, 3, 2]
    # The place of one whose caller goes, after which step, and how long steps compute pictures: the last one goes while
    # its own are under way.
    for ended, after, seconds in ((None, 0, math.inf), (0, 5, math.inf), (1, 5, math.inf), (1, 5, 1e-9), (0, 0, 1e-9)):
        monkeypatch.setattr(StepPace, "encoder_seconds", lambda *_, seconds=seconds: seconds)
        requests = [served.request(place, PROMPTS[number]) for place, number in enumerate(numbers)]
        outputs = {request.id: Output() for request in requests}
        for request in requests:
            engine.loop.add(request)
        for step in range(10_000):
            collect(engine.loop.step(), outputs)
            if step == after and ended is not None:
                assert engine.loop.abort(ended)
            engine.loop.scheduler.check()
            if not engine.loop.has_work:
                break
        engine.rank.runner.pictures.check()
        kept = [place for place in range(len(numbers)) if place != ended]
        check(served, [outputs[place] for place in kept], [numbers[place] for place in kept])
    check(served, run(engine, [served.request(1000, PROMPTS[0])]), [0])  # a step tells the runner who has left
    assert not any(engine.rank.runner.pictures.reads([slot]) for slot in range(4))
    engine.rank.runner.pictures.check()
    engine.close()


def test_captured_steps(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = QueueOnCpu(tmp_path)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    engine = served.start(max_batch_size=4)
    requests = [served.request(number, prompt) for number, prompt in enumerate(PROMPTS)]
    check(served, run(engine, requests, arrivals=[0, 0, 2, 3, 5]))
    assert device.num_replays > 0
    engine.close()


def test_captured_towers(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of shapes that come again, in parts between the steps of others too."""
    if served.oracle.name in ("mllama", "idefics2"):
        pytest.skip("what their towers read is not laid out before a pass")
    device = QueueOnCpu(tmp_path)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    engine = served.start(max_batch_size=2)
    for number, seconds in enumerate((math.inf, 1e-9, 1e-9, math.inf)):  # that steps spend on pictures
        monkeypatch.setattr(StepPace, "encoder_seconds", lambda *_, seconds=seconds: seconds)
        seeing = served.request(1, PROMPTS[2])
        for place, span in enumerate(seeing.pictures):  # the same pixels, but nobody knows them
            digest = hashlib.sha256(f"{span.digest} {number}".encode()).hexdigest()
            shutil.copy(served.folder / span.digest, served.folder / digest)
            seeing.pictures[place] = PictureSpan(digest, span.runs, span.grid, span.shape)
        check(served, run(engine, [served.request(0, PROMPTS[0]), seeing], arrivals=[0, 2]), [0, 2])
    assert engine.rank.runner.pictures.graphs.num_captured > 0
    engine.close()


def test_buckets(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = QueueOnCpu(tmp_path)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    longest = max(len(served.oracle.ids(prompt)) for prompt in PROMPTS)
    shapes = {"bucketing": True, "custom_kernels": False, "max_batch_size": 4, "max_total_tokens": longest + NUM_NEW}
    engine = served.start(**shapes, max_batch_prefill_tokens=2 * longest, max_input_tokens=longest)
    requests = [served.request(number, prompt) for number, prompt in enumerate(PROMPTS)]
    check(served, run(engine, requests, arrivals=[0, 0, 2, 3, 5]))
    again = [served.request(10 + number, prompt) for number, prompt in enumerate(PROMPTS)]  # behind cached prefixes
    check(served, run(engine, again))
    stats = engine.rank.bucket_stats
    assert stats is not None
    assert stats.num_unplanned == 0, engine.rank.take_news()
    engine.close()


@pytest.mark.parametrize("served", ["mllama"], indirect=True)
def test_neighbours_that_several_read(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them in all rows than any shape has room for: these decode in several passes, beside prompts too."""
    device = QueueOnCpu(tmp_path)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    longest = max(len(served.oracle.ids(prompt)) for prompt in PROMPTS)
    shapes = {"bucketing": True, "custom_kernels": False, "max_batch_size": 4, "max_total_tokens": longest + NUM_NEW}
    engine = served.start(**shapes, max_input_tokens=longest, max_images_per_request=5)
    passes, rows = engine.rank.runner.steps.passes, []
    find = passes.find_decode
    monkeypatch.setattr(passes, "find_decode", lambda count, *about: rows.append(count) or find(count, *about))
    numbers = [3, 3, 0, 3, 2, 3]
    requests = [served.request(place, PROMPTS[number]) for place, number in enumerate(numbers)]
    check(served, run(engine, requests, arrivals=[0, 0, 0, 0, 4, 6]), numbers)
    stats = engine.rank.bucket_stats
    assert stats is not None and stats.num_unplanned == 0, engine.rank.take_news()
    assert len(rows) > NUM_NEW and {1, 2} <= set(rows)
    engine.close()


def test_a_picture_is_computed_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = served.start()
    model, computed = engine.rank.runner.model, []
    encode = model.encode
    monkeypatch.setattr(model, "encode", lambda pixels, grids: computed.extend(pixels) or encode(pixels, grids))
    together = [served.request(number, PROMPTS[1]) for number in range(3)]
    check(served, run(engine, together), [1, 1, 1])
    assert len(computed) == 1
    work = engine.loop.scheduler.picture_work
    assert (
        work is not None and work.num_encoded == 1 and work.num_found in (0, 2)
    )  # in the prefix of one before, or not
    computed.clear()
    check(served, run(engine, [served.request(5, PROMPTS[1])]), [1])  # what is in a cached prefix is not even read
    assert not computed
    engine.close()


def test_pixels_that_are_gone_fail_their_request_alone(served: Served) -> None:
    engine = served.start()
    lost, kept = served.request(0, PROMPTS[1]), served.request(1, PROMPTS[4])
    (served.folder / lost.pictures[0].digest).unlink()
    outputs = run(engine, [lost, kept])
    assert outputs[0].error is not None and "not there any more" in outputs[0].error and not outputs[0].token_ids
    check(served, outputs[1:], [4])
    alone = served.request(3, PROMPTS[1])  # then no step of another tells the device to forget it
    (served.folder / alone.pictures[0].digest).unlink()
    assert run(engine, [alone])[0].error is not None
    served.spans(PROMPTS[1])  # there again
    check(served, run(engine, [served.request(2, PROMPTS[1])]), [1])
    engine.close()


def test_texts_go_on_while_a_picture_is_computed(served: Served) -> None:
    """Where a step may do no more than the least part of a picture."""
    engine = served.start(max_step_ms=1)
    policy = engine.facts.pictures
    assert policy is not None and policy.num_parts > 1
    scheduler, work = engine.loop.scheduler, []
    planned = scheduler.plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepPace, "encoder_seconds", lambda *_: 1e-9)
        patch.setattr(scheduler, "plan", lambda: work.append(planned()) or work[-1])
        outputs = run(engine, [served.request(0, PROMPTS[0]), served.request(1, PROMPTS[1])], arrivals=[0, 2])
    check(served, outputs, [0, 1])
    parts = [plan for plan in work if plan is not None and plan.encode_parts]
    assert sum(plan.encode_parts for plan in parts) == policy.num_parts and len(parts) > 1
    assert any(plan.decode and not plan.chunks for plan in parts)
    engine.close()


@pytest.mark.usefixtures("one_thread")
def test_two_ranks(served: Served) -> None:
    """Towers are whole on each, the decoder is split."""
    longest = max(len(served.oracle.ids(prompt)) for prompt in PROMPTS)
    sizes = {"max_total_tokens": longest + NUM_NEW, "max_batch_prefill_tokens": longest}
    with start_threads(served.oracle.folder, 2, picture_folder=str(served.folder), **sizes) as engine:
        check(served, run(engine, [served.request(number, prompt) for number, prompt in enumerate(PROMPTS)]))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("served", ["llava_next"], indirect=True)
def test_ranks_compute_what_the_first_has_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other machines there are no files; here they go as soon as they are read, and one is never there."""
    longest = max(len(served.oracle.ids(prompt)) for prompt in PROMPTS)
    sizes = {"max_total_tokens": longest + NUM_NEW, "max_batch_prefill_tokens": longest, "device": "cpu"}
    read, seen = SlotPictures.read, []

    def read_and_remove(self: SlotPictures, span: PictureSpan) -> bytes:
        found = read(self, span)
        seen.append(bool(found))
        (served.folder / span.digest).unlink(missing_ok=True)
        return found

    engine = served.start(num_shard=2, **sizes)
    try:
        assert isinstance(engine.rank, Ranks)
        monkeypatch.setattr(SlotPictures, "read", read_and_remove)
        requests = [served.request(number, prompt) for number, prompt in enumerate(PROMPTS)]
        check(served, run(engine, requests))
        lost, kept = served.request(10, [draw(31, 41, seed=77), "?"]), served.request(11, PROMPTS[0])
        (served.folder / lost.pictures[0].digest).unlink()
        outputs = run(engine, [lost, kept])
        assert outputs[0].error is not None and "not there any more" in outputs[0].error
        check(served, outputs[1:], [0])
        assert seen.count(True) == 5 and seen.count(False) == 1
    finally:
        engine.close()


def test_a_folder_that_does_not_say_how_pictures_are_prepared(served: Served, tmp_path: Path) -> None:
    """Texts are answered as ever, by a model for which that is the same."""
    folder = shutil.copytree(served.oracle.folder, tmp_path / "copy")
    (folder / "preprocessor_config.json").unlink()
    if served.oracle.name == "paligemma":
        with pytest.raises(StartError, match="cannot be served without pictures, and its folder does not say"):
            start(folder)
        return
    engine = start(folder)
    assert engine.facts.pictures is None and any("it sees no pictures" in note for note in engine.facts.notes)
    check(served, run(engine, [served.request(0, PROMPTS[0])]), [0])
    engine.close()
