"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: any size whose sides are whole numbers of merged patches, within limits of area.

pixels: [height, width, 3]; the tower makes patches of them, and repeats them along time.
grid: (1, rows, columns), in patches before they are merged.

Videos: [frames, height, width, 3], an odd one out repeated. grid: (moments, rows, columns), then the time of each
moment, as positions count it. Qwen3-VL has times in words instead, before each moment; its limits of area are those of
all frames together.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from PIL.Image import Image

from text_generation_inference.pictures.rule import PictureLayout, PictureRule
from text_generation_inference.pictures.rules.base import FamilyRule
from text_generation_inference.pictures.rules.settings import CLIP, ModelFiles, PictureSettings


@dataclass(frozen=True, kw_only=True)
class Qwen2VLRule(FamilyRule):
    start_token: str
    end_token: str
    video_token: str
    patch: int
    merge: int  # patches along a side that become one feature
    min_pixels: int
    max_pixels: int
    num_frames: int  # of a moment
    positions_per_second: int | None  # None: each moment counts one
    video_min_pixels: int  # of a frame, or of all where times are in words
    video_max_pixels: int
    times_in_words: bool = False
    frame_tokens: int | None = None  # that a frame may have, where times are in words; None: any number

    @property
    def reserved(self) -> frozenset[str]:
        return frozenset({self.image_token, self.start_token, self.end_token, self.video_token})

    def layout(self, width: int, height: int) -> PictureLayout:
        self.check_ratio(width, height)
        height, width = self._resized(width, height, self.min_pixels, self.max_pixels)
        rows, columns = height // self.patch, width // self.patch
        num_tokens = rows * columns // self.merge**2
        return PictureLayout((height, width, 3), (1, rows, columns), (self.start_token, num_tokens, self.end_token))

    def pixels(self, image: Image, layout: PictureLayout) -> np.ndarray:
        height, width = layout.shape[:2]
        return self.resize(image, width, height)

    def video_layout(self, width: int, height: int, num_frames: int, fps: float) -> PictureLayout:
        self.check_ratio(width, height)
        moments = -(-num_frames // self.num_frames)
        if self.times_in_words:
            return self._layout_in_words(width, height, num_frames, fps, moments)
        height, width = self._resized(width, height, self.video_min_pixels, self.video_max_pixels)
        rows, columns = height // self.patch, width // self.patch
        num_tokens = moments * rows * columns // self.merge**2
        each = 1.0 if self.positions_per_second is None else self.positions_per_second * (self.num_frames / fps)
        times = (np.arange(moments, dtype=np.float32) * np.float32(each)).astype(np.int64)  # rounded as a model was
        shape = (moments * self.num_frames, height, width, 3)
        grid = (moments, rows, columns, *(int(time) for time in times))
        return PictureLayout(shape, grid, (self.start_token, num_tokens, self.end_token))

    def _layout_in_words(self, width: int, height: int, num_frames: int, fps: float, moments: int) -> PictureLayout:
        height, width = self._resized_together(width, height, max(num_frames, self.num_frames))
        rows, columns = height // self.patch, width // self.patch
        each = rows * columns // self.merge**2
        expansion: list[str | int] = []
        for moment in range(moments):
            first = moment * self.num_frames
            last = min(first + self.num_frames, num_frames) - 1
            seconds = (first / fps + last / fps) / 2
            expansion += [f"<{seconds:.1f} seconds>{self.start_token}", each, self.end_token]
        shape = (moments * self.num_frames, height, width, 3)
        return PictureLayout(shape, (moments, rows, columns), tuple(expansion))

    def video_pixels(self, images: Iterable[Image], layout: PictureLayout) -> np.ndarray:
        found = np.empty(layout.shape, dtype=np.uint8)
        count, height, width, _ = layout.shape
        number = -1
        for number, image in enumerate(images):
            found[number] = self.resize(image, width, height)
        found[number + 1 : count] = found[number]
        return found

    def _resized_together(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        """Height and width of each frame; the limits are of all."""
        unit, most = self.patch * self.merge, self.video_max_pixels
        if self.frame_tokens is not None:
            share = min(self.frame_tokens * unit**2, most // num_frames)
            most = max(share, int(self.video_min_pixels * 1.05)) * num_frames
        if height < unit or width < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        counted = round(num_frames / self.num_frames) * self.num_frames
        rounded = round(height / unit) * unit, round(width / unit) * unit
        if counted * math.prod(rounded) > most:
            shrink = math.sqrt((num_frames * height * width) / most)
            rounded = (
                max(unit, math.floor(height / shrink / unit) * unit),
                max(unit, math.floor(width / shrink / unit) * unit),
            )
        elif counted * math.prod(rounded) < self.video_min_pixels:
            grow = math.sqrt(self.video_min_pixels / (num_frames * height * width))
            rounded = math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
        return rounded

    def _resized(self, width: int, height: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        unit = self.patch * self.merge
        rounded = round(height / unit) * unit, round(width / unit) * unit
        if math.prod(rounded) > max_pixels:
            shrink = math.sqrt((height * width) / max_pixels)
            rounded = (
                max(unit, math.floor(height / shrink / unit) * unit),
                max(unit, math.floor(width / shrink / unit) * unit),
            )
        elif math.prod(rounded) < min_pixels:
            grow = math.sqrt(min_pixels / (height * width))
            rounded = math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
        return rounded


def make(files: ModelFiles) -> PictureRule:
    settings = files.picture
    files.processor_type("Qwen2VL")
    settings.must_be("do_resize", True)
    patch, merge = settings.side("patch_size", 14), settings.integer("merge_size", 2, most=64)
    vision, sixteen = files.vision, files.config.get("model_type") in ("qwen3_vl", "qwen3_vl_moe")
    tower = vision.side("patch_size", 16 if sixteen else 14), vision.integer("spatial_merge_size", 2, most=64)
    if (patch, merge) != tower:
        raise settings.wrong(
            "patch_size", f"and `merge_size` are {patch} and {merge}, the tower's {tower[0]} and {tower[1]}"
        )
    start = files.token("vision_start_token", "<|vision_start|>", "vision_start_token_id")
    end = files.token("vision_end_token", "<|vision_end|>", "vision_end_token_id")
    token = files.token("image_token", "<|image_pad|>", "image_token_id")
    counts_seconds = files.config.get("model_type") == "qwen2_5_vl"
    least, most = _pixels_of(settings, 56 * 56, 28 * 28 * 1280)
    # As in `transformers`, what there is no file of for videos is as it is for pictures.
    video = (least, most) if files.video is None else _pixels_of(files.video, 128 * 28 * 28, 28 * 28 * 768)
    frame_tokens = None
    if sixteen:  # whose files always have them
        of_videos = files.video or settings.inner("video_processor")
        video = _pixels_of(of_videos, 128 * 32 * 32, 32 * 32 * 768)
        if of_videos.flag("cap_pixels_per_frame", False):
            frame_tokens = of_videos.integer("max_video_tokens", 768)
    return Qwen2VLRule(
        image_token=token,
        marker=start + token + end,
        normalisation=settings.normalisation(CLIP),
        resample=settings.resample(3),
        start_token=start,
        end_token=end,
        video_token=files.token("video_token", "<|video_pad|>", "video_token_id"),
        patch=patch,
        merge=merge,
        min_pixels=least,
        max_pixels=most,
        num_frames=vision.integer("temporal_patch_size", 2, most=16),
        positions_per_second=vision.integer("tokens_per_second", 4, most=1000) if counts_seconds else None,
        video_min_pixels=video[0],
        video_max_pixels=video[1],
        times_in_words=sixteen,
        frame_tokens=frame_tokens,
    )


def _pixels_of(settings: PictureSettings, least: int, most: int) -> tuple[int, int]:
    """Least and most of a picture's, in old files and new ones."""
    size = settings.inner("size")
    return (
        settings.integer("min_pixels", size.integer("shortest_edge", size.integer("min_pixels", least))),
        settings.integer("max_pixels", size.integer("longest_edge", size.integer("max_pixels", most))),
    )
