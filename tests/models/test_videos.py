"""Videos as frames: tokens and log-probabilities are those of `transformers`, beside pictures and texts."""

import base64
import hashlib
import io
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from driving import Output, run, start
from PIL import Image
from torch import Tensor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
from vision_oracle import Oracle, draw, make_oracle

from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ValidationError
from text_generation_inference.llm import LLM
from text_generation_inference.models.vision.sight import place_pictures
from text_generation_inference.pictures.loader import PictureLoader
from text_generation_inference.pictures.rule import PictureLayout
from text_generation_inference.scheduler.features import FeatureBook
from text_generation_inference.types import GenerationRequest, PicturePolicy, PictureSpan, SamplingParams, VideoSource

NUM_NEW = 12
FRAMES = [draw(200, 45, seed=seed) for seed in range(20, 25)]  # an odd number of them
PICTURE = draw(40, 90, seed=3)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(request.param, tmp_path_factory.mktemp(request.param))


def lay_out(oracle: Oracle, frames: list[Image.Image], fps: float) -> tuple[PictureLayout, np.ndarray]:
    layout = oracle.rule.video_layout(*frames[0].size, len(frames), fps)
    return layout, oracle.rule.video_pixels(frames, layout)


def as_library_has_it(oracle: Oracle, layout: PictureLayout, pixels: np.ndarray) -> Tensor:
    """Patches of frames, two and two, as its video processor orders them (it wants torchvision)."""
    rule, (moments, rows, columns) = oracle.rule, layout.grid[:3]
    size = layout.shape[1] // rows
    mean, std = (torch.tensor(each) for each in (rule.normalisation.mean, rule.normalisation.std))
    values = (torch.from_numpy(pixels).float() * rule.normalisation.factor - mean) / std
    values = values.permute(0, 3, 1, 2).reshape(moments, 2, 3, rows // 2, 2, size, columns // 2, 2, size)
    return values.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(moments * rows * columns, -1)


class Asked:
    """A text, a video, a text, a picture and a text."""

    def __init__(
        self,
        oracle: Oracle,
        frames: list[Image.Image],
        fps: float,
        folder: Path,
        texts: tuple[str, str, str] = ("see ", " and ", " what?"),
    ) -> None:
        rule = oracle.rule
        video, pixels = lay_out(oracle, frames, fps)
        picture = rule.layout(*PICTURE.size)
        start_token, end_token = (oracle.tokenizer.token_to_id(f"<|vision_{each}|>") for each in ("start", "end"))
        image_id, video_id = (oracle.tokenizer.token_to_id(f"<|{each}_pad|>") for each in ("image", "video"))
        before, between, after = (oracle.tokenizer.encode(text).ids for text in texts)
        self.ids = [*before, start_token, *[video_id] * video.num_features, end_token, *between]
        self.ids += [start_token, *[image_id] * picture.num_features, end_token, *after]
        at = len(before) + 1
        picture_at = at + video.num_features + 1 + len(between) + 1
        self.spans = [
            _span(folder, video, pixels, at),
            _span(folder, picture, rule.pixels(PICTURE, picture), picture_at),
        ]
        ids = torch.tensor([self.ids])
        self.inputs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == image_id).long() + 2 * (ids == video_id).long(),
            "pixel_values_videos": as_library_has_it(oracle, video, pixels),
            "video_grid_thw": torch.tensor([video.grid[:3]]),
            **oracle.pixels([PICTURE]),
        }
        if oracle.name == "qwen2_5_vl":
            self.inputs["second_per_grid_ts"] = torch.tensor([2 / fps])

    def expected(self, oracle: Oracle) -> Output:
        settings = transformers.GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None)
        with torch.no_grad():
            found = oracle.model.generate(
                **self.inputs, generation_config=settings, output_logits=True, return_dict_in_generate=True
            )
        tokens = found.sequences[0, len(self.ids) :].tolist()
        scores = torch.log_softmax(torch.cat(found.logits), -1)
        return Output(token_ids=tokens, logprobs=[scores[place, token].item() for place, token in enumerate(tokens)])

    def request(self, number: int) -> GenerationRequest:
        sampling = SamplingParams()
        about = {"max_new_tokens": NUM_NEW, "stop_token_ids": [], "seed": 0}
        return GenerationRequest(id=number, token_ids=self.ids, sampling=sampling, pictures=self.spans, **about)


def _span(folder: Path, layout: PictureLayout, pixels: np.ndarray, at: int) -> PictureSpan:
    digest = hashlib.sha256(repr(layout).encode() + pixels.tobytes()).hexdigest()
    (folder / digest).write_bytes(pixels.tobytes())
    return PictureSpan(digest, [(at, layout.num_features)], list(layout.grid), list(layout.shape))


def test_videos_are_answered_as_the_library_answers(oracle: Oracle, tmp_path: Path) -> None:
    """Of several lengths and rates, whole and in chunks."""
    asked = [
        Asked(oracle, FRAMES, 4.0, tmp_path),
        Asked(oracle, FRAMES[:1], 1.0, tmp_path),
        Asked(oracle, [*FRAMES, *FRAMES[:3]], 13.0, tmp_path),
        Asked(oracle, FRAMES[::-1], 4.0, tmp_path),
    ]
    expected = [each.expected(oracle) for each in asked]
    firsts = [output.logprobs[0] for output in expected]
    assert len({round(first, 3) for first in firsts}) == len(asked)  # or nothing would be said of frames
    longest = max(len(each.ids) for each in asked)
    for tokens in (longest, 7):
        sizes = {"max_batch_prefill_tokens": tokens, "max_total_tokens": longest + NUM_NEW}
        engine = start(oracle.folder, picture_folder=str(tmp_path), **sizes)
        outputs = run(engine, [each.request(number) for number, each in enumerate(asked)])
        engine.close()
        for output, theirs in zip(outputs, expected, strict=True):
            count = len(theirs.token_ids)  # fewer where the library's model has said its last
            assert output.error is None and output.token_ids[:count] == theirs.token_ids
            assert output.logprobs[:count] == pytest.approx(theirs.logprobs, abs=1e-4)


def test_a_video_that_is_too_slow_is_refused(oracle: Oracle, tmp_path: Path) -> None:
    """Its times would be at positions that nothing is there for."""
    engine = start(oracle.folder, picture_folder=str(tmp_path), max_total_tokens=300)
    slow = Asked(oracle, FRAMES, 0.01, tmp_path).request(0)
    if oracle.name == "qwen2_5_vl":
        with pytest.raises(
            ValidationError, match=r"with the times of its videos the prompt has 1\d+ positions, .* must be <= 300"
        ):
            engine.loop.add(slow)
    else:  # its moments count one each
        assert run(engine, [slow])[0].error is None
    engine.close()


def test_positions_are_those_of_the_library(oracle: Oracle, tmp_path: Path) -> None:
    for fps, count in ((4.0, 5), (10.0, 9), (30.0, 2)):
        asked = Asked(oracle, (FRAMES * 2)[:count], fps, tmp_path)
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        given = {name: asked.inputs[name] for name in names if name in asked.inputs}
        positions, shift = oracle.model.model.get_rope_index(**given)
        ours, our_shift = place_pictures(len(asked.ids), asked.spans, 2)
        assert ours.tolist() == positions[:, 0].tolist() and our_shift == int(shift[0, 0])
        book = FeatureBook(PicturePolicy(1000, has_times=True))
        most = int(positions.max()) + 1 + NUM_NEW
        book.check(asked.request(0), 1000, most)
        with pytest.raises(ValidationError, match="times of its videos"):
            book.check(asked.request(0), 1000, most - 1)


def test_what_follows_a_long_video_comes_after_its_last_moment() -> None:
    """As the models' paper has it: a position more than the largest before."""
    span = PictureSpan("", [(2, 6)], [3, 2, 4, 0, 10, 20], [])  # 3 moments of 1 row and 2 columns
    positions, shift = place_pictures(10, [span], 2)
    assert positions.tolist() == [
        [0, 1, 2, 2, 12, 12, 22, 22, 23, 24],
        [0, 1, 2, 2, 2, 2, 2, 2, 23, 24],
        [0, 1, 2, 3, 2, 3, 2, 3, 23, 24],
    ]
    assert shift == 15


@pytest.fixture(scope="module")
def loader(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PictureLoader]:
    made = PictureLoader(ServerConfig(image_workers=1), oracle.folder, tmp_path_factory.mktemp("pixels"))
    yield made
    made.close()


def encoded(image: Image.Image, format: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **more)
    return file.getvalue()


def data_uri(data: bytes, mime: str) -> str:
    return f"data:{mime};base64," + base64.b64encode(data).decode()


def test_videos_are_loaded_from_all_that_holds_frames(oracle: Oracle, loader: PictureLoader) -> None:
    """A list of pictures of any kind, an animation, and frames in one text."""
    layout, pixels = lay_out(oracle, FRAMES, 2.0)
    pngs = [encoded(frame) for frame in FRAMES]
    animated = encoded(FRAMES[0], save_all=True, append_images=FRAMES[1:], duration=250)  # APNG
    webp = encoded(FRAMES[0], "WEBP", lossless=True, save_all=True, append_images=FRAMES[1:], duration=500)
    several = [
        (VideoSource(list(FRAMES)), 2.0),
        (VideoSource(pngs, fps=4.0), 4.0),
        (VideoSource([data_uri(png, "image/png") for png in pngs]), 2.0),
        (VideoSource([animated], is_animation=True), 4.0),
        (VideoSource([data_uri(animated, "image/png")], is_animation=True, fps=2.0), 2.0),
        (VideoSource([webp], is_animation=True), 2.0),
    ]
    found = loader.load_sync([source for source, _ in several])
    for picture, (_, fps) in zip(found, several, strict=True):
        assert picture.layout == oracle.rule.video_layout(*FRAMES[0].size, len(FRAMES), fps)
        assert (loader.store.folder / picture.digest).read_bytes() == pixels.tobytes()
    assert len({picture.digest for picture in found}) == (2 if oracle.name == "qwen2_5_vl" else 1)
    jpegs = [base64.b64encode(encoded(frame, "JPEG", quality=95)).decode() for frame in FRAMES]
    (joined,) = loader.load_sync([VideoSource(["data:video/jpeg;base64," + ",".join(jpegs)], is_animation=True)])
    assert joined.layout == layout
    loader.release([picture.digest for picture in (*found, joined)])


def test_frames_are_fetched(oracle: Oracle, tmp_path: Path) -> None:
    """In their order, beside frames that are there."""
    layout, pixels = lay_out(oracle, FRAMES, 2.0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + encoded(FRAMES[int(self.path[1:])]))

        def log_message(self, *_: Any) -> None:
            pass

    config = ServerConfig(image_workers=1, allow_private_media=True)
    loader = PictureLoader(config, oracle.folder, tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        frames: list[Any] = [f"http://127.0.0.1:{site.server_port}/{number}" for number in range(len(FRAMES))]
        frames[1], frames[3] = encoded(FRAMES[1]), FRAMES[3]
        (found,) = loader.load_sync([VideoSource(frames)])
        site.shutdown()
    assert found.layout == layout
    assert (tmp_path / found.digest).read_bytes() == pixels.tobytes()
    assert loader.counts.fetched == 3
    loader.close()


def test_what_is_wrong_with_a_video_is_said(loader: PictureLoader) -> None:
    png, other = encoded(FRAMES[0]), encoded(PICTURE)
    mp4 = b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + bytes(200)
    nothing = "invalid video: it is no animated GIF, WebP or PNG. Other formats are not decoded here"
    for video, words in (
        (VideoSource([mp4], is_animation=True), nothing),
        (VideoSource([data_uri(mp4, "video/mp4")], is_animation=True), nothing),
        (VideoSource([encoded(FRAMES[0], "JPEG")], is_animation=True), nothing),
        (VideoSource([]), "a video must have 1 to 512 frames. Given: 0"),
        (VideoSource([png] * 513), "a video must have 1 to 512 frames. Given: 513"),
        (VideoSource([png, other]), "frame 1 has 40x90, the first 200x45"),
        (VideoSource([png, b"no picture"]), "invalid image: it is not PNG"),
        (VideoSource([png], fps=0.0), "`fps` must be from 0.01 to 1000. Given: 0"),
        (VideoSource([png], fps=math.nan), "`fps` must be from 0.01 to 1000"),
    ):
        with pytest.raises(ValidationError) as error:
            loader.load_sync([video])
        assert words in str(error.value)
    assert loader.num_under_way == 0


def test_a_chat_with_a_video(oracle: Oracle, tmp_path: Path) -> None:
    asked = Asked(oracle, FRAMES, 4.0, tmp_path, ("<s>user: see ", " and ", " what?assistant:"))
    parts: list[dict[str, Any]] = [{"type": "text", "text": "see "}, {"type": "video", "video": FRAMES, "fps": 4}]
    parts += [
        {"type": "text", "text": " and "},
        {"type": "image", "image": PICTURE},
        {"type": "text", "text": " what?"},
    ]
    with LLM(str(oracle.folder), progress=False, device="cpu", dtype="float32", max_total_tokens=300) as llm:
        answer = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_new_tokens=5, ignore_eos=True))
    image_id, video_id = (oracle.tokenizer.token_to_id(f"<|{each}_pad|>") for each in ("image", "video"))
    assert answer.prompt_token_ids == [image_id if token == video_id else token for token in asked.ids]
    expected = asked.expected(oracle).token_ids[:5]
    assert answer.token_ids[: len(expected)] == expected


def test_other_families_take_none(tmp_path: Path) -> None:
    oracle = make_oracle("llava", tmp_path)
    with pytest.raises(ValidationError, match="this model takes no videos: send frames as pictures"):
        oracle.rule.video_layout(100, 100, 4, 2.0)


# -- Qwen3-VL: times in words --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    made = make_oracle("qwen3_vl", folder)
    video = {"size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 24 * 32 * 32}}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return made


@pytest.mark.parametrize("size", [(200, 45), (20, 90), (640, 480), (33, 32)])
def test_times_and_sizes_are_those_of_the_library(qwen3: Oracle, size: tuple[int, int]) -> None:
    """Of its processors, without what wants torchvision. Of one frame, which it refuses, ours are those of two."""
    theirs = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    theirs.video_token, theirs.vision_start_token = "<|video_pad|>", "<|vision_start|>"
    theirs.vision_end_token = "<|vision_end|>"
    theirs.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    for count, fps in ((2, 2.0), (5, 2.0), (9, 30.0), (16, 0.7), (1, 3.0)):
        layout = qwen3.rule.video_layout(*size, count, fps)
        height, width = smart_resize(max(2, count), size[1], size[0], 2, 32, 2 * 32 * 32, 24 * 32 * 32)
        moments = -(-count // 2)
        assert layout.shape == (2 * moments, height, width, 3)
        assert layout.grid == (moments, height // 16, width // 16)
        metadata = SimpleNamespace(fps=fps, frames_indices=list(range(count)))
        given = {"video_grid_thw": torch.tensor([layout.grid]), "video_metadata": [metadata]}
        text = "".join(each if isinstance(each, str) else theirs.video_token * each for each in layout.expansion)
        assert text == theirs.replace_video_token(given, 0)


def test_times_in_words_are_answered_as_the_library_answers(qwen3: Oracle, tmp_path: Path) -> None:
    """A chat with a video and a picture: ids, positions and tokens."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "see "}, {"type": "video", "video": FRAMES, "fps": 4}]
    parts += [{"type": "image", "image": PICTURE}, {"type": "text", "text": " what?"}]
    with LLM(str(qwen3.folder), progress=False, device="cpu", dtype="float32", max_total_tokens=400) as llm:
        answer = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_new_tokens=8, ignore_eos=True))
    layout, pixels = lay_out(qwen3, FRAMES, 4.0)
    assert len(layout.expansion) == 9 and layout.expansion[0] == "<0.1 seconds><|vision_start|>"
    image_id, video_id = (qwen3.tokenizer.token_to_id(f"<|{each}_pad|>") for each in ("image", "video"))
    video = "".join(each if isinstance(each, str) else "<|video_pad|>" * each for each in layout.expansion)
    picture = qwen3.rule.layout(*PICTURE.size)
    shown = f"<|vision_start|>{'<|image_pad|>' * picture.num_features}<|vision_end|>"
    ids = qwen3.tokenizer.encode(f"<s>user: see {video}{shown} what?assistant:").ids
    assert answer.prompt_token_ids == [image_id if token == video_id else token for token in ids]
    given = torch.tensor([ids])
    inputs = {
        "input_ids": given,
        "attention_mask": torch.ones_like(given),
        "mm_token_type_ids": (given == image_id).long() + 2 * (given == video_id).long(),
        "pixel_values_videos": as_library_has_it(qwen3, layout, pixels),
        "video_grid_thw": torch.tensor([layout.grid]),
        **qwen3.pixels([PICTURE]),
    }
    settings = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        found = qwen3.model.generate(**inputs, generation_config=settings)[0, len(ids) :].tolist()
    assert answer.token_ids[: len(found)] == found
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    positions, shift = qwen3.model.model.get_rope_index(**{name: inputs[name] for name in names})
    seen = [
        list(run) for kind, run in groupby(range(len(ids)), lambda place: ids[place] in (image_id, video_id)) if kind
    ]
    runs = [(run[0], len(run)) for run in seen]
    spans = [PictureSpan("", runs[:-1], list(layout.grid), list(layout.shape))]
    spans.append(PictureSpan("", runs[-1:], list(picture.grid), list(picture.shape)))
    ours, our_shift = place_pictures(len(ids), spans, 2)
    assert ours.tolist() == positions[:, 0].tolist() and our_shift == int(shift[0, 0])
