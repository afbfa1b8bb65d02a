"""Towers of every family against `transformers`: features of several pictures, and all spellings of tensor names.

Tiny random models, every parameter random (gates too: at zero, where they start, pictures would change nothing).
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from text_generation_inference.config import ServerConfig, cache_folder
from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context
from text_generation_inference.models.registry import SEEING as KNOWN
from text_generation_inference.models.registry import build, read_config
from text_generation_inference.models.vision.blocks import TowerLinear
from text_generation_inference.models.vision.families import find_family
from text_generation_inference.models.vision.padded import PaddedTower
from text_generation_inference.models.vision.tower import Tower
from text_generation_inference.pictures.rule import Normalisation
from text_generation_inference.quant.method import Matrix
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.load import load_checkpoint, load_dummy

NORMALISATION = Normalisation(mean=(0.48, 0.45, 0.4), std=(0.26, 0.27, 0.28))
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
PIXTRAL = {**CLIP, "model_type": "pixtral", "image_size": 56, "head_dim": 8}
INTERN = {**CLIP, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [7, 7]}
QWEN = {"depth": 3, "num_heads": 2, "patch_size": 7}
QWEN_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
Pictures = list[tuple[tuple[int, ...], tuple[int, ...]]]  # shapes of pixels, grids


@dataclass
class Family:
    architecture: str
    config: dict[str, Any]
    pictures: Pictures
    features: Callable[[Any, list[Tensor], Sequence[tuple[int, ...]]], list[Tensor]]  # of `transformers`
    spellings: list[dict[str, str]] = field(default_factory=list)  # patterns of names as they are saved -> others


def pooled(found: Any) -> list[Tensor]:
    return list(found.pooler_output)


def channels_first(pixels: Tensor) -> Tensor:
    """As an image processor would make them: float32, channels first."""
    mean, std = torch.tensor(NORMALISATION.mean), torch.tensor(NORMALISATION.std)
    return ((pixels.float() * NORMALISATION.factor - mean) / std).movedim(-1, -3)


def llava(model: Any, pixels: list[Tensor], grids: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return pooled(model.get_image_features(channels_first(torch.cat(pixels))))


def llava_next(model: Any, pixels: list[Tensor], grids: Sequence[tuple[int, ...]]) -> list[Tensor]:
    most = max(map(len, pixels))
    padded = [torch.cat((each, each.new_zeros(most - len(each), *each.shape[1:]))) for each in pixels]
    sizes = [SIZES[grid] for grid in grids]
    return pooled(model.get_image_features(channels_first(torch.stack(padded)), torch.tensor(sizes)))


# Of tiles of 28 pixels with 4x4 patches: the picture (height, width) that a grid comes from.
SIZES: dict[tuple[int, ...], tuple[int, int]] = {
    (2, 2, 8, 8): (50, 50),
    (1, 2, 2, 8): (20, 60),
    (2, 1, 8, 4): (80, 30),
    (2, 2, 6, 8): (70, 95),
    (1, 2, 0, 8): (4, 400),
}


def qwen(model: Any, pixels: list[Tensor], grids: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return pooled(model.get_image_features(*as_patches(model, pixels, grids)))


def as_patches(model: Any, pixels: list[Tensor], grids: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """As Qwen's processors have them: block by block, the picture twice along time."""
    size, merge = model.config.vision_config.patch_size, model.config.vision_config.spatial_merge_size
    patches = []
    for picture, (_, rows, columns) in zip(pixels, grids, strict=True):
        x = channels_first(picture).view(3, rows // merge, merge, size, columns // merge, merge, size)
        x = x.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, 2, -1, -1)
        patches.append(x.reshape(rows * columns, -1))
    return torch.cat(patches), torch.tensor(grids)


def qwen3(model: Any, pixels: list[Tensor], grids: Sequence[tuple[int, ...]]) -> list[Tensor]:
    found = model.get_image_features(*as_patches(model, pixels, grids))
    return [torch.cat(levels, dim=1) for levels in zip(found.pooler_output, *found.deepstack_features, strict=True)]


def of_qwen(patch_size: int) -> Pictures:
    grids = [(4, 6), (10, 4), (2, 2), (6, 10), (8, 8)]
    return [((rows * patch_size, columns * patch_size, 3), (1, rows, columns)) for rows, columns in grids]


def idefics3(model: Any, pixels: list[Tensor], grids: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """One row of a batch for each picture; what it has too few squares for is all zero."""
    most = max(map(len, pixels))
    rows = torch.zeros(len(pixels), most, 3, *pixels[0].shape[1:3])
    for row, picture in zip(rows, pixels, strict=True):
        row[: len(picture)] = channels_first(picture)
    return pooled(model.get_image_features(rows))


def squares(model: Any, pixels: list[Tensor], grids: Sequence[tuple[int, ...]]) -> list[Tensor]:
    found = model.get_image_features(channels_first(torch.cat(pixels))).pooler_output
    return [each.flatten(0, 1) for each in found.split([len(picture) for picture in pixels])]


def idefics2(model: Any, pixels: list[Tensor], grids: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Padded to the largest square of all, with masks."""
    most, height, width = (max(each.shape[dim] for each in pixels) for dim in range(3))
    rows = torch.zeros(len(pixels), most, 3, height, width)
    masks = torch.zeros(len(pixels), most, height, width, dtype=torch.bool)
    for number, (picture, grid) in enumerate(zip(pixels, grids, strict=True)):
        for place, (tall, wide) in enumerate(zip(grid[::2], grid[1::2], strict=True)):
            rows[number, place, :, :tall, :wide] = channels_first(picture[place, :tall, :wide])
            masks[number, place, :tall, :wide] = True
    return pooled(model.get_image_features(rows, masks))


def pixtral(model: Any, pixels: list[Tensor], grids: Sequence[tuple[int, ...]]) -> list[Tensor]:
    sizes = [picture.shape[:2] for picture in pixels]
    rows = torch.zeros(len(pixels), 3, max(size[0] for size in sizes), max(size[1] for size in sizes))
    for row, picture, (height, width) in zip(rows, pixels, sizes, strict=True):
        row[:, :height, :width] = channels_first(picture)
    return pooled(model.get_image_features(rows, image_sizes=torch.tensor(sizes)))


def mllama(model: Any, pixels: list[Tensor], grids: Sequence[tuple[int, ...]]) -> list[Tensor]:
    tiles = torch.zeros(len(pixels), 1, 4, 3, *pixels[0].shape[1:3])
    for picture, found in zip(pixels, tiles, strict=True):
        found[0, : len(picture)] = channels_first(picture)
    mask = torch.tensor([[[int(tile < len(picture)) for tile in range(4)]] for picture in pixels])
    ids = torch.tensor([[grid[0]] for grid in grids])
    states = model.model.vision_model(tiles, aspect_ratio_ids=ids, aspect_ratio_mask=mask).last_hidden_state
    return list(model.model.multi_modal_projector(states).flatten(1, 3))


def of_pixtral(*grids: tuple[int, int]) -> Pictures:
    return [((rows * 7, columns * 7, 3), (rows, columns)) for rows, columns in grids]


SQUARES: Pictures = [((1, 28, 28, 3), ())] * 3
TILES: Pictures = [((1 + grid[0] * grid[1], 28, 28, 3), grid) for grid in SIZES]
HUB_LLAVA = {r"^vision_tower\.": "vision_tower.vision_model."}
IN_MEMORY = {
    r"^language_model\.lm_head": "lm_head",
    r"^language_model\.model": "model.language_model",
    r"^(vision_tower|vision_model|multi_modal_projector|image_newline)": r"model.\1",
}
QWEN_IN_MEMORY = {r"^visual": "model.visual", r"^model\.": "model.language_model."}
FAMILIES = {
    "llava": Family(
        "LlavaForConditionalGeneration",
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP, "image_token_index": 63},
        SQUARES,
        llava,
        [HUB_LLAVA, IN_MEMORY],
    ),
    "llava-siglip-layers": Family(
        "LlavaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**SIGLIP, "vision_use_head": False},
            "image_token_index": 63,
            "vision_feature_layer": [-1, 1],
            "vision_feature_select_strategy": "full",
            "multimodal_projector_bias": False,
        },
        SQUARES,
        llava,
        [HUB_LLAVA],
    ),
    "llava-next": Family(
        "LlavaNextForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": CLIP,
            "image_token_index": 63,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        TILES,
        llava_next,
        [HUB_LLAVA, IN_MEMORY],
    ),
    "idefics3": Family(
        "Idefics3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**SIGLIP, "model_type": "idefics3_vision"},
            "scale_factor": 2,
            "image_token_id": 63,
        },
        [((5, 28, 28, 3), (2, 2)), ((1, 28, 28, 3), (0, 0)), ((3, 28, 28, 3), (1, 2))],
        idefics3,
    ),
    "smolvlm-other-size": Family(  # pictures of another size than that of the table of positions
        "SmolVLMForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**SIGLIP, "model_type": "smolvlm_vision", "image_size": 35, "patch_size": 7},
            "scale_factor": 3,
            "image_token_id": 63,
        },
        [((3, 42, 42, 3), (2, 1)), ((1, 42, 42, 3), (0, 0))],
        idefics3,
    ),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "head_dim": 8},
            "vision_config": {**SIGLIP, "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_index": 63,
        },
        [((3, 28, 28, 3), ()), ((1, 28, 28, 3), ())],
        squares,
        [HUB_LLAVA, IN_MEMORY],
    ),
    "paligemma": Family(
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "gemma2", "head_dim": 8},
            "vision_config": SIGLIP,  # with the head that nobody needs
            "projection_dim": 32,
            "image_token_index": 63,
        },
        SQUARES,
        squares,
        [HUB_LLAVA, IN_MEMORY],
    ),
    "qwen2-vl": Family(
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": QWEN_TEXT,
            "vision_config": {**QWEN, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        },
        of_qwen(7),
        qwen,
        [QWEN_IN_MEMORY],
    ),
    "qwen2.5-vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": QWEN_TEXT,
            "vision_config": {
                **QWEN,
                "hidden_size": 32,
                "intermediate_size": 40,
                "window_size": 28,
                "out_hidden_size": 32,
                "fullatt_block_indexes": [1],
            },
        },
        of_qwen(7),
        qwen,
        [QWEN_IN_MEMORY],
    ),
    "qwen3-vl": Family(
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**QWEN_TEXT, "head_dim": 8},
            "vision_config": {
                **QWEN,
                "hidden_size": 32,
                "intermediate_size": 40,
                "out_hidden_size": 32,
                "num_position_embeddings": 25,
                "deepstack_visual_indexes": [0, 2],
            },
        },
        [*of_qwen(7), ((14, 28, 3), (1, 2, 4))],
        qwen3,
        [{r"^model\.visual": "visual", r"^model\.language_model\.": "model."}],
    ),
    "idefics2": Family(
        "Idefics2ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": {**SIGLIP, "model_type": "idefics2_vision", "image_size": 70},
            "perceiver_config": {
                "resampler_n_latents": 5,
                "resampler_depth": 2,
                "resampler_n_heads": 4,
                "resampler_head_dim": 6,
                "num_key_value_heads": 2,
                "hidden_size": 32,
            },
            "image_token_id": 63,
        },
        [((1, 24, 40, 3), (24, 40)), ((3, 40, 35, 3), (40, 31, 22, 35, 23, 30)), ((1, 70, 29, 3), (70, 29))],
        idefics2,
    ),
    "mllama": Family(
        "MllamaForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "num_hidden_layers": 3,
                "cross_attention_layers": [1],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 40,
                "attention_heads": 4,
                "num_hidden_layers": 3,
                "num_global_layers": 2,
                "intermediate_layers_indices": [0, 2],
                "vision_output_dim": 32 * 3,
                "image_size": 28,
                "patch_size": 7,
                "norm_eps": 1e-3,
            },
            "image_token_index": 64,
        },
        [((2, 28, 28, 3), (2, 1, 2)), ((1, 28, 28, 3), (1, 1, 1)), ((4, 28, 28, 3), (6, 2, 2))],
        mllama,
        [IN_MEMORY],
    ),
    "internvl": Family(
        "InternVLForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**INTERN, "attention_bias": True},
            "image_token_id": 63,
        },
        [((3, 28, 28, 3), ()), ((1, 28, 28, 3), ())],
        squares,
        [IN_MEMORY],
    ),
    "internvl-norms": Family(
        "InternVLForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**INTERN, "use_qk_norm": True, "norm_type": "rms_norm", "use_mean_pooling": False},
            "image_token_id": 63,
            "tie_word_embeddings": False,
        },
        [((2, 28, 28, 3), ()), ((1, 28, 28, 3), ())],
        squares,
        [IN_MEMORY],
    ),
    "pixtral": Family(
        "LlavaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": PIXTRAL,
            "image_token_index": 63,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        of_pixtral((3, 5), (1, 1), (8, 2), (2, 8)),
        pixtral,
        [IN_MEMORY],
    ),
    "mistral3": Family(
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "mistral", "rms_norm_eps": 1e-3},
            "vision_config": PIXTRAL,
            "image_token_index": 63,
            "spatial_merge_size": 2,
        },
        of_pixtral((4, 6), (2, 2), (8, 2), (2, 8)),
        pixtral,
        [IN_MEMORY],
    ),
}


@dataclass
class Made:
    family: Family
    folder: Path
    model: transformers.PreTrainedModel

    @property
    def module(self) -> Any:
        return family_of(read_config(self.folder))


def family_of(config: Config) -> Any:
    found = find_family(config)
    assert found is not None
    return found


@pytest.fixture(scope="module", params=list(FAMILIES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    family = FAMILIES[request.param]
    of = getattr(transformers, family.architecture)
    torch.manual_seed(0)
    model = of(of.config_class(**family.config)).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith("bias") or "gate" in name or "embedding" in name:
                parameter.normal_(0, 0.2)
            else:
                parameter.uniform_(0.5, 1.5)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return Made(family, folder, model)


def load(made: Made, folder: Path | None = None, ops: Ops | None = None, dtype: torch.dtype = torch.float32) -> Tower:
    """Through the loader, with the text model beside it, as everything is: nothing may be missing or left over."""
    folder = folder or made.folder
    config, context, cpu = read_config(folder), Context(ops or Ops(), dtype=dtype), torch.device("cpu")
    checkpoint = Checkpoint.open(folder)
    if hasattr(made.module, "build"):
        model: Any = build(config, context)
        model.adapt(checkpoint.names(), checkpoint.are_equal)
        load_checkpoint(model, checkpoint, dtype, cpu, model.ignored)
        tower: Tower = model.tower
    else:
        tower = made.module.tower(config, context)
        tower.adapt(checkpoint.names())
        text = [f"{each}.*" for each in (*made.module.DECODERS, *made.module.HEADS)]
        load_checkpoint(tower, checkpoint, dtype, cpu, [*tower.ignored, *text])
    tower.normalisation = NORMALISATION
    return tower


def draw(made: Made) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    torch.manual_seed(1)
    pictures = made.family.pictures
    pixels = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape, _ in pictures]
    return pixels, [grid for _, grid in pictures]


@torch.no_grad()
def test_features_are_those_of_transformers(made: Made) -> None:
    tower, (pixels, grids) = load(made), draw(made)
    expected = made.family.features(made.model, pixels, grids)
    found = tower.encode(pixels, grids)
    assert all(module.only_as_stored for _, module in tower.walk() if isinstance(module, Matrix))  # else it is rounded
    assert [each.shape for each in found] == [each.shape for each in expected]
    assert {each.shape[1] for each in found} == {tower.width}
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert theirs.std() > 0.01  # else anything would be near it
    other = tower.encode([255 - each for each in pixels], grids)
    assert all((a - b).abs().max() > 0.01 for a, b in zip(found, other, strict=True))


@torch.no_grad()
def test_pictures_together_are_pictures_alone(made: Made) -> None:
    tower, (pixels, grids) = load(made), draw(made)
    alone = [tower.encode([picture], [grid])[0] for picture, grid in zip(pixels, grids, strict=True)]
    for count in range(2, len(pixels) + 1):
        for ours, expected in zip(tower.encode(pixels[:count], grids[:count]), alone[:count], strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@torch.no_grad()
def test_padding_changes_nothing(made: Made, num_steps: int) -> None:
    """Passes of sizes of a plan, through which pictures go piece by piece."""
    tower, (pixels, grids) = load(made), draw(made)
    assert isinstance(tower, PaddedTower)
    expected = tower.encode(pixels, grids)
    for picture, grid, features in zip(pixels, grids, expected, strict=True):
        tower.look_at(picture.shape)
        tower.get_ready(picture.device)
        sizes, pieces = tower.sizes_of(picture.shape, grid), tower.pieces_of(picture, grid)
        assert sizes == [len(piece[-1]) for piece in pieces]
        size = max(sizes) + tower.step * num_steps
        rows = [
            tower.run(*(torch.cat((x, x.new_zeros((size - len(x), *x.shape[1:])))) for x in piece)) for piece in pieces
        ]
        behind = rows[-1][-1:]
        assert all(len(each) == tower.num_rows(size) + 1 and torch.equal(each[-1:], behind) for each in rows)
        kept = [each[: tower.num_rows(count)] for each, count in zip(rows, sizes, strict=True)]
        found = torch.cat((*kept, behind))[torch.from_numpy(tower.order_of(picture.shape, grid))]
        torch.testing.assert_close(found, features, atol=2e-5, rtol=2e-5)
        blank = [x.new_zeros((size, *x.shape[1:])) for x in tower.blank()]
        assert bool(tower.run(*blank).isfinite().all())


@torch.no_grad()
def test_work_that_is_left_after_each_part_comes_to_the_same(made: Made) -> None:
    tower, (pixels, grids) = load(made), draw(made)
    one, other = tower.in_parts(pixels, grids), tower.in_parts(pixels[:1], grids[:1])
    for _ in range(tower.num_parts):
        next(one)
        next(other)
    assert tower.num_parts > 1
    for found, expected in ((one, pixels), (other, pixels[:1])):
        with pytest.raises(StopIteration) as end:
            next(found)
        for ours, theirs in zip(end.value.value, tower.encode(expected, grids[: len(expected)]), strict=True):
            assert torch.equal(ours, theirs)


@torch.no_grad()
def test_native_kernels_give_the_same(made: Made) -> None:
    pixels, grids = draw(made)
    device = CpuDevice(cache_folder(ServerConfig(model_id=str(made.folder))))
    found = load(made, ops=device.ops).encode(pixels, grids)
    for ours, expected in zip(found, load(made).encode(pixels, grids), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_widths_that_a_device_multiplies_faster_change_nothing(made: Made) -> None:
    pixels, grids = draw(made)
    tower = load(made, ops=Ops(fast_multiple=17))
    grown = [each for _, each in tower.walk() if isinstance(each, TowerLinear) and each.num_inputs != each.shape[1]]
    assert grown and all(each.num_inputs % 17 == 0 for each in grown)
    for ours, expected in zip(tower.encode(pixels, grids), load(made).encode(pixels, grids), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_rows_that_are_computed_a_few_at_a_time(made: Made) -> None:
    """One picture or tile after the other, and within a feed-forward a few rows."""
    pixels, grids = draw(made)
    tower = load(made, ops=Ops(tower_rows=20))
    for ours, expected in zip(tower.encode(pixels, grids), load(made).encode(pixels, grids), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_features_have_the_type_of_the_decoder(made: Made, dtype: torch.dtype) -> None:
    pixels, grids = draw(made)
    for ours, exact in zip(
        load(made, dtype=dtype).encode(pixels, grids), load(made).encode(pixels, grids), strict=True
    ):
        assert ours.dtype is dtype
        assert (ours.float() - exact).norm() < 0.05 * exact.norm()


@torch.no_grad()
def test_random_numbers_in_place_of_a_checkpoint(made: Made) -> None:
    pixels, grids = draw(made)
    tower = made.module.tower(read_config(made.folder), Context())
    load_dummy(tower, torch.float32, torch.device("cpu"), seed=3)
    found = tower.encode(pixels, grids)
    assert all(each.shape[1] == tower.width == 32 * (1 + tower.num_levels) for each in found)
    assert all(bool(each.isfinite().all()) for each in found)


@torch.no_grad()
def test_all_spellings_of_names_are_read(made: Made, tmp_path: Path) -> None:
    pixels, grids = draw(made)
    expected = load(made).encode(pixels, grids)
    (tmp_path / "config.json").write_text((made.folder / "config.json").read_text())
    stored = load_file(made.folder / "model.safetensors")
    for spelling in made.family.spellings:
        renamed = {rename(name, spelling): tensor for name, tensor in stored.items()}
        assert renamed.keys() != stored.keys()
        save_file(renamed, tmp_path / "model.safetensors")
        found = load(made, tmp_path).encode(pixels, grids)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def rename(name: str, spelling: dict[str, str]) -> str:
    return next((re.sub(a, b, name) for a, b in spelling.items() if re.search(a, name)), name)


def test_tensors_that_are_missing_or_left_over_are_errors(made: Made, tmp_path: Path) -> None:
    stored = load_file(made.folder / "model.safetensors")
    (tmp_path / "config.json").write_text((made.folder / "config.json").read_text())
    tower = made.module.tower(read_config(made.folder), Context())
    tower.adapt(list(stored))
    needed = [prefix + part.name for prefix, module in tower.walk() for d in module.declare() for part in d.parts]
    assert needed and all(name in stored for name in needed)
    for name in (needed[0], needed[-1]):
        save_file({key: value for key, value in stored.items() if key != name}, tmp_path / "model.safetensors")
        with pytest.raises(ModelFormatError, match=re.escape(f"lacks the tensor {name}")):
            load(made, tmp_path)
    extra = needed[0].rpartition(".")[0] + ".other"
    save_file({**stored, extra: torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFormatError, match=re.escape(extra)):
        load(made, tmp_path)


def describe(config: Config) -> object:
    """What a config makes of a tower, and of the text model beside it."""
    family = family_of(config)
    tower = family.tower(config, Context())
    parts = [
        (prefix + part.name, part.shape)
        for prefix, module in tower.walk()
        for d in module.declare()
        for part in d.parts
    ]
    text: Any = build(Config(family.text_config(config), "text_config"))
    return parts, text.spec, tower.width


@pytest.mark.parametrize("architecture", KNOWN)
def test_a_config_that_says_nothing_is_the_default_of_its_family(architecture: str) -> None:
    made = getattr(transformers, architecture).config_class
    nothing: dict[str, Any] = {"architectures": [architecture]}
    if "Gemma3" in architecture:  # whose default is no grid that the default of its encoder could be pooled to
        nothing |= {"mm_tokens_per_image": 49}
    said = json.loads(made(**nothing).to_json_string(use_diff=False))
    assert describe(Config(nothing, "config.json")) == describe(Config(said, "config.json"))
    inner = {"text_config": {}, "vision_config": {}}
    said = json.loads(made(**nothing, **inner).to_json_string(use_diff=False))
    assert describe(Config({**nothing, **inner}, "config.json")) == describe(Config(said, "config.json"))


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl"])
def test_fields_of_text_may_be_outside(name: str) -> None:
    """As in the first files of Qwen2-VL, which also name the rotation by sections as a kind of its own."""
    family = FAMILIES[name]
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    outer = {"architectures": [family.architecture], "tie_word_embeddings": True}
    vision = {**family.config["vision_config"], "in_chans": 3, "model_type": name.replace("-", "_")}
    text = {**TEXT, "rope_theta": 5e5, "rope_scaling": rope}
    flat = Config({**outer, **text, "vision_config": vision}, "config.json")
    nested = Config({**outer, "text_config": text, "vision_config": vision}, "config.json")
    assert describe(flat) == describe(nested)
    module = family_of(flat)
    assert module.sections(flat) == module.sections(nested) == (1, 1, 2)
    spec: Any = describe(flat)
    assert spec[1].tied and spec[1].layers[0].attention.rope.theta == 5e5


ODD: tuple[object, ...] = (None, 0, -1, 1, 3, 2**40, 2**70, 0.5, "x", True, [], [1, 2], [99], {}, {"a": 1})


@pytest.mark.parametrize("name", FAMILIES)
def test_odd_values_are_read_or_named(name: str) -> None:
    """No field of a config makes anything but a tower or an error that names a field."""
    family = FAMILIES[name]
    of = getattr(transformers, family.architecture)
    said = json.loads(of.config_class(**family.config, architectures=[family.architecture]).to_json_string())
    inner = [(outer, name) for outer in ("vision_config", "perceiver_config") for name in said.get(outer) or {}]
    for outer, key in [*inner, *(("", name) for name in said if name != "architectures")]:
        for value in ODD:
            changed = {**said, key: value} if not outer else {**said, outer: {**said[outer], key: value}}
            config = Config(changed, "config.json")
            try:
                family_of(config).tower(config, Context())
            except ModelFormatError as error:
                assert "`" in str(error)
