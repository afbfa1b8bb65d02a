"""PictureSettings of preprocessing in a model folder's JSON files: typed, a wrong one is refused by name.

As in `transformers`, null is missing, and what is missing has the default of the family's class.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.files import read_json_object, shorten
from text_generation_inference.pictures.rule import Normalisation

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))  # means, deviations
HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

_MOST = 2**28  # pixels of a picture; sides are less
_TOWERS = {"clip_vision_model": (224, 32), "siglip_vision_model": (224, 16), "pixtral": (1024, 16)}  # their defaults
_RESAMPLES = range(6)  # Pillow's numbers: nearest, Lanczos, bilinear, bicubic, box, Hamming


class PictureSettings:
    def __init__(self, fields: Mapping[str, Any], source: str, within: str = "") -> None:
        self.fields = fields
        self.source = source
        self._within = within  # the object that these fields are in, with a dot

    def wrong(self, name: str, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self.source}: `{self._within}{name}` {what}")

    def get(self, name: str) -> Any:
        return self.fields.get(name)

    def has(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def inner(self, name: str) -> "PictureSettings":
        """The fields of an object in this one; none where it is missing."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, f"must be an object, it is {shorten(value)}")
        return PictureSettings(cast(Mapping[str, Any], value or {}), self.source, f"{self._within}{name}.")

    def integer(self, name: str, default: int, least: int = 1, most: int = _MOST) -> int:
        value = default if self.fields.get(name) is None else self.fields[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, f"must be an integer from {least} to {most}, it is {shorten(value)}")
        return value

    def number(self, name: str, default: float) -> float:
        """Above 0."""
        value = default if self.fields.get(name) is None else self.fields[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
            raise self.wrong(name, f"must be a number above 0, it is {shorten(value)}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = default if self.fields.get(name) is None else self.fields[name]
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, it is {shorten(value)}")
        return value

    def text(self, name: str, default: str) -> str:
        """The text of a token: a string, or an object with `content`."""
        value = default if self.fields.get(name) is None else self.fields[name]
        if isinstance(value, Mapping):
            value = cast(Mapping[str, Any], value).get("content")
        if not isinstance(value, str) or not value:
            raise self.wrong(name, f"must be a text, it is {shorten(value)}")
        return value

    def choice(self, name: str, known: Collection[str], default: str) -> str:
        value = default if self.fields.get(name) is None else self.fields[name]
        if not isinstance(value, str) or value not in known:
            raise self.wrong(name, f"is {shorten(value)}, which is not supported; known: {', '.join(known)}")
        return value

    def must_be(self, name: str, meant: object) -> None:
        """Raise for a setting that is there and changes what is computed here."""
        value = self.fields.get(name)
        if value is not None and value != meant:
            raise self.wrong(name, f"is {shorten(value)}; only {str(meant).lower()} is supported")

    def side(self, name: str, default: int) -> int:
        """Of squares: a number, a pair of equal ones, or an object with `height` and `width` or an edge."""
        value = self.fields.get(name)
        if isinstance(value, Mapping):
            fields = cast(Mapping[str, Any], value)
            inner = self.inner(name)
            names = [each for each in ("height", "width", "shortest_edge", "longest_edge") if inner.has(each)]
            if set(fields) - {"height", "width", "shortest_edge", "longest_edge"} or not names:
                raise self.wrong(name, f"must have a height and a width or one edge, it is {shorten(value)}")
            sides = {inner.integer(each, 0, most=2**14) for each in names}
        elif isinstance(value, Sequence) and not isinstance(value, str):
            pair = cast(Sequence[Any], value)
            sides = {
                PictureSettings({name: each}, self.source, self._within).integer(name, 0, most=2**14) for each in pair
            }
        else:
            sides = {self.integer(name, default, most=2**14)}
        if len(sides) != 1:
            raise self.wrong(name, f"must be a square, it is {shorten(value)}")
        return sides.pop()

    def resample(self, default: int) -> int:
        """How pixels are resampled, by Pillow's number."""
        return self.integer("resample", default, least=_RESAMPLES.start, most=_RESAMPLES.stop - 1)

    def normalisation(self, defaults: tuple[tuple[float, ...], tuple[float, ...]]) -> Normalisation:
        factor = self.number("rescale_factor", 1 / 255) if self.flag("do_rescale", True) else 1.0
        if not self.flag("do_normalize", True):
            return Normalisation(factor)
        return Normalisation(
            factor, self._channels("image_mean", defaults[0]), self._channels("image_std", defaults[1])
        )

    def _channels(self, name: str, default: tuple[float, ...]) -> tuple[float, float, float]:
        value = default if self.fields.get(name) is None else self.fields[name]
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = [value] * 3
        numbers = cast(Sequence[Any], value) if isinstance(value, Sequence) and not isinstance(value, str) else []
        good = [float(x) for x in numbers if isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < _MOST]
        if len(numbers) != 3 or len(good) != 3 or (name == "image_std" and min(good) <= 0):
            raise self.wrong(name, f"must be 3 numbers, one for each channel, it is {shorten(value)}")
        return good[0], good[1], good[2]


@dataclass(frozen=True)
class ModelFiles:
    """What a model folder says of pictures."""

    config: PictureSettings
    picture: PictureSettings  # of the image processor
    processor: PictureSettings
    tokenizer: PictureSettings
    video: PictureSettings | None = None  # of the video processor, where it has settings of its own

    @property
    def vision(self) -> PictureSettings:
        return self.config.inner("vision_config")

    def tower(self, kind: str, side: int, patch: int) -> tuple[str, int, int]:
        """(kind, side of its pictures, side of a patch); as given where the config says nothing of its tower."""
        vision = self.vision
        if not self.config.has("vision_config"):
            return kind, side, patch
        kind = vision.choice("model_type", _TOWERS, kind)
        side, patch = _TOWERS[kind]
        side, patch = vision.side("image_size", side), vision.side("patch_size", patch)
        if patch > side:
            raise vision.wrong("patch_size", f"must be at most `image_size`, {side}; it is {patch}")
        return kind, side, patch

    def processor_type(self, *known: str) -> str:
        """The class that the file names, without what tells backends apart; the first one where it names none."""
        named = self.picture.text("image_processor_type", known[0])
        name = named.removesuffix("Pil").removesuffix("Fast").removesuffix("ImageProcessor")
        if name not in known:
            words = ", ".join(f"{each}ImageProcessor" for each in known)
            raise self.picture.wrong("image_processor_type", f"is {shorten(named)}; this family is served with {words}")
        return name

    def token(self, name: str, default: str, *id_names: str) -> str:
        """The text of a token: of the id that the config names, else what the tokenizer or the processor calls it."""
        added = self.tokenizer.inner("added_tokens_decoder")
        for id_name in id_names:
            if self.config.has(id_name) and added.has(number := str(self.config.get(id_name))):
                return added.text(number, default)
        for settings in (self.tokenizer.inner("extra_special_tokens"), self.tokenizer, self.processor):
            if settings.has(name):
                return settings.text(name, default)
        return default


def read_files(folder: Path, config: Mapping[str, Any]) -> ModelFiles | None:
    """None where the folder has no settings of an image processor: its pictures cannot be served."""
    nothing = PictureSettings({}, str(folder))
    processor = _read(folder / "processor_config.json") or nothing
    tokenizer = _read(folder / "tokenizer_config.json") or nothing
    if isinstance(tokenizer.get("extra_special_tokens"), list):  # names nothing
        tokenizer = PictureSettings({**tokenizer.fields, "extra_special_tokens": None}, tokenizer.source)
    if processor.has("image_processor"):  # newer files are nested, and win
        picture = processor.inner("image_processor")
    elif (picture := _read(folder / "preprocessor_config.json")) is None:
        return None
    video = _read(folder / "video_preprocessor_config.json")
    if processor.has("video_processor"):
        video = processor.inner("video_processor")
    return ModelFiles(PictureSettings(config, str(folder / "config.json")), picture, processor, tokenizer, video)


def _read(path: Path) -> PictureSettings | None:
    try:
        return PictureSettings(read_json_object(path), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
