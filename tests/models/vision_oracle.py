"""Tiny random models that see, as folders a server can be started on, and what `transformers` computes with them.

A folder has all that a real one has: config, weights, tokenizer with the family's tokens, settings of preprocessing and
a chat template. Texts are tokenised byte by byte. Every parameter is random: at their first values gates are zero, and
pictures would change nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from driving import Output
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from text_generation_inference.pictures.rule import PictureRule
from text_generation_inference.pictures.rules import find_rule

Prompt = Sequence[str | Image.Image]  # texts, and pictures in their places

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
VOCAB_SIZE = 320
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}
CLIP = {**TOWER, "model_type": "clip_vision_model"}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
CROP_28 = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
SQUARE_28 = {"size": {"height": 28, "width": 28}}
QWEN_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
QWEN_SIZE = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 30}}
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PLACES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
IN_ORDER = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARKER{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class Family:
    architecture: str
    processor: str  # module and class in transformers.models
    config: Mapping[str, Any]
    settings: Mapping[str, Any]  # of preprocessor_config.json
    tokens: Sequence[str]  # of pictures, with ids from 260 on
    id_names: Mapping[str, str] = field(default_factory=dict)  # in config.json -> the token whose id it has
    adds_bos: bool = True  # the tokenizer does, by itself


def _qwen(version: str, **vision: Any) -> Family:
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    settings = {**QWEN_SIZE, "patch_size": vision["patch_size"], "image_processor_type": "Qwen2VLImageProcessor"}
    return Family(
        f"{version}ForConditionalGeneration",
        "qwen2_vl.Qwen2VL",
        {"text_config": QWEN_TEXT, "vision_config": {"depth": 3, "num_heads": 4, **vision}},
        settings,
        QWEN_TOKENS,
        names,
        adds_bos=False,
    )


def _idefics3(architecture: str, processor: str) -> Family:
    return Family(
        f"{architecture}ForConditionalGeneration",
        processor,
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "image_size": 28},
            "scale_factor": 2,
        },
        {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}},
        ("<image>", "<fake_token_around_image>", "<global-img>", *PLACES),
        {"image_token_id": "<image>"},
    )


FAMILIES = {
    "llava": Family(
        "LlavaForConditionalGeneration",
        "llava.Llava",
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP},
        CROP_28,
        ("<image>",),
        {"image_token_index": "<image>"},
    ),
    "llava_next": Family(
        "LlavaNextForConditionalGeneration",
        "llava_next.LlavaNext",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": CLIP,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
        },
        {**CROP_28, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]},
        ("<image>",),
        {"image_token_index": "<image>"},
    ),
    "qwen2_vl": _qwen("Qwen2VL", embed_dim=32, hidden_size=32, mlp_ratio=2, patch_size=14),
    "qwen2_5_vl": _qwen(
        "Qwen2_5_VL",
        hidden_size=32,
        intermediate_size=40,
        out_hidden_size=32,
        window_size=56,
        fullatt_block_indexes=[1],
        patch_size=14,
    ),
    "qwen3_vl": _qwen(
        "Qwen3VL",
        hidden_size=32,
        intermediate_size=40,
        out_hidden_size=32,
        num_position_embeddings=36,
        deepstack_visual_indexes=[0, 2],
        patch_size=16,
    ),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        "gemma3.Gemma3",
        {
            "text_config": {
                **TEXT,
                "num_hidden_layers": 3,
                "sliding_window": 24,
                "query_pre_attn_scalar": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
        },
        SQUARE_28,
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        {
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
    ),
    "idefics2": Family(
        "Idefics2ForConditionalGeneration",
        "idefics2.Idefics2",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**TOWER, "image_size": 70},
            "perceiver_config": {
                "resampler_n_latents": 5,
                "resampler_depth": 2,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
                "hidden_size": 32,
            },
        },
        {"size": {"shortest_edge": 21, "longest_edge": 70}, "do_image_splitting": True},
        ("<image>", "<fake_token_around_image>"),
        {"image_token_id": "<image>"},
    ),
    "idefics3": _idefics3("Idefics3", "idefics3.Idefics3"),
    "smolvlm": _idefics3("SmolVLM", "smolvlm.SmolVLM"),
    "paligemma": Family(
        "PaliGemmaForConditionalGeneration",
        "siglip.Siglip",
        {"text_config": {**TEXT, "model_type": "gemma"}, "vision_config": SIGLIP, "projection_dim": 32},
        {**SQUARE_28, "image_processor_type": "SiglipImageProcessor"},
        ("<image>",),
        {"image_token_index": "<image>"},
    ),
    "mllama": Family(
        "MllamaForConditionalGeneration",
        "mllama.Mllama",
        {
            "text_config": {
                **TEXT,
                "num_hidden_layers": 4,
                "cross_attention_layers": [1, 3],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 40,
                "attention_heads": 4,
                "num_hidden_layers": 3,
                "num_global_layers": 2,
                "intermediate_layers_indices": [0, 1],
                "vision_output_dim": 32 * 3,
                "image_size": 28,
                "patch_size": 7,
            },
        },
        SQUARE_28,
        ("<|image|>",),
        {"image_token_index": "<|image|>"},
        adds_bos=False,
    ),
    "pixtral": Family(
        "LlavaForConditionalGeneration",
        "pixtral.Pixtral",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**TOWER, "model_type": "pixtral", "image_size": 56, "head_dim": 8},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        {
            "size": {"longest_edge": 56},
            "patch_size": {"height": 7, "width": 7},
            "image_processor_type": "PixtralImageProcessor",
        },
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        {"image_token_index": "[IMG]"},
    ),
    "mistral3": Family(
        "Mistral3ForConditionalGeneration",
        "pixtral.Pixtral",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**TOWER, "model_type": "pixtral", "image_size": 56, "head_dim": 8},
            "spatial_merge_size": 2,
        },
        {
            "size": {"longest_edge": 56},
            "patch_size": {"height": 14, "width": 14},
            "image_processor_type": "PixtralImageProcessor",
        },
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        {"image_token_index": "[IMG]"},
    ),
    "internvl": Family(
        "InternVLForConditionalGeneration",
        "got_ocr2.GotOcr2",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**TOWER, "image_size": [28, 28], "patch_size": [7, 7]},
        },
        {**SQUARE_28, "crop_to_patches": True, "max_patches": 4, "image_processor_type": "GotOcr2ImageProcessor"},
        ("<IMG_CONTEXT>", "<img>", "</img>"),
        {"image_token_id": "<IMG_CONTEXT>"},
        adds_bos=False,
    ),
}


@dataclass
class Oracle:
    """A tiny model, its folder, and what `transformers` says of prompts."""

    name: str
    folder: Path
    model: Any

    @cached_property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text())

    @cached_property
    def rule(self) -> PictureRule:
        rule = find_rule(self.folder, self.config)
        assert rule is not None
        return rule

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def image_processor(self) -> Any:
        package, name = FAMILIES[self.name].processor.split(".")
        module = import_module(f"transformers.models.{package}.image_processing_pil_{package}")
        settings = json.loads((self.folder / "preprocessor_config.json").read_text())
        settings.pop("image_processor_type", None)
        return getattr(module, f"{name}ImageProcessorPil")(**settings)

    def ids(self, prompt: Prompt) -> list[int]:
        """A prompt's tokens, as the family's processor expands its pictures (`tests/unit/test_picture_rules.py`)."""
        text = ""
        for part in prompt:
            if isinstance(part, str):
                text += part
                continue
            layout = self.rule.layout(*part.size)
            text += "".join(
                each if isinstance(each, str) else self.rule.image_token * each for each in layout.expansion
            )
        if not pictures_of(prompt):
            return self.tokenizer.encode(text).ids
        return self.tokenizer.encode(self.rule.finish(text, BOS), add_special_tokens=not self.rule.places_bos).ids

    def inputs(self, prompt: Prompt) -> dict[str, Tensor]:
        """Of the library's model: ids, masks and pixels."""
        ids = torch.tensor([self.ids(prompt)])
        result = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        is_picture = (ids == self.tokenizer.token_to_id(self.rule.image_token)).long()
        if self.name == "gemma3":
            result["token_type_ids"] = is_picture
        if self.name == "paligemma":
            result["token_type_ids"] = torch.zeros_like(ids)
        if not (pictures := pictures_of(prompt)):
            return result
        if self.name.startswith("qwen"):
            result["mm_token_type_ids"] = is_picture
        pixels = self.pixels(pictures)
        if self.name == "mllama":
            result["cross_attention_mask"] = self._cross_mask(ids, pixels.pop("num_tiles"))
        return {**result, **pixels}

    def pixels(self, pictures: Sequence[Image.Image]) -> dict[str, Any]:
        nested = self.name in ("idefics2", "idefics3", "smolvlm", "mllama")
        found = self.image_processor([list(pictures)] if nested else list(pictures))
        result: dict[str, Any] = {}
        for name, value in found.items():
            if name in ("num_crops", "num_patches", "rows", "cols"):
                continue
            result[name] = value if name == "num_tiles" else torch.from_numpy(np.array(value))
        return result

    def features(self, pictures: Sequence[Image.Image]) -> list[Tensor]:
        """[features, width] of each; of Mllama what cross-attention reads of its tiles, the missing ones too; of Qwen3-VL
        beside them those that are added to the first layers."""
        pixels = self.pixels(pictures)
        with torch.no_grad():
            if self.name == "mllama":
                pixels.pop("num_tiles")
                states = self.model.model.vision_model(**pixels).last_hidden_state
                states = self.model.model.multi_modal_projector(states)
                return list(states.reshape(len(pictures), -1, states.shape[-1]))
            found = self.model.get_image_features(**pixels)
        flat = torch.cat([each.reshape(-1, each.shape[-1]) for each in found.pooler_output])
        if self.name == "qwen3_vl":
            flat = torch.cat((flat, *map(torch.cat, found.deepstack_features)), -1)
        return list(flat.split([self.rule.layout(*picture.size).num_features for picture in pictures]))

    def generate(self, prompt: Prompt, num_new: int) -> Output:
        """Greedy tokens with their log-probabilities, and those of the prompt by place; EOS ends nothing."""
        inputs = self.inputs(prompt)
        settings = transformers.GenerationConfig(
            max_new_tokens=num_new, do_sample=False, pad_token_id=0, eos_token_id=None, bos_token_id=1
        )
        with torch.no_grad():
            logits = self.model(**inputs).logits[0]
            found = self.model.generate(
                **inputs, generation_config=settings, output_logits=True, return_dict_in_generate=True
            )
        ids = inputs["input_ids"][0].tolist()
        token_ids = found.sequences[0, len(ids) :].tolist()
        scores = torch.log_softmax(torch.cat(found.logits), -1)
        before = torch.log_softmax(logits, -1)
        return Output(
            token_ids=token_ids,
            logprobs=[scores[place, token].item() for place, token in enumerate(token_ids)],
            prompt_logprobs={
                place: before[place - 1, token].item()
                for place, token in enumerate(ids)
                if place and token < before.shape[-1]
            },
        )

    def _cross_mask(self, ids: Tensor, num_tiles: list[list[int]]) -> Tensor:
        made = import_module("transformers.models.mllama.processing_mllama")
        image_id = self.tokenizer.token_to_id(self.rule.image_token)
        spans = [made.get_cross_attention_token_mask(ids[0].tolist(), image_id)]
        mask = made.convert_sparse_cross_attention_mask_to_dense(spans, num_tiles, max_num_tiles=4, length=ids.shape[1])
        return torch.from_numpy(mask)


def pictures_of(prompt: Prompt) -> list[Image.Image]:
    return [part for part in prompt if not isinstance(part, str)]


def make_oracle(
    name: str, folder: Path, text: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None
) -> Oracle:
    """With `text` in place of what the family's decoder has, and `settings` of what its preprocessing has."""
    family = FAMILIES[name]
    family = replace(family, settings={**family.settings, **(settings or {})})
    made = getattr(transformers, family.architecture)
    tokenizer = make_tokenizer(name)
    ids = {key: tokenizer.token_to_id(token) for key, token in family.id_names.items()}
    special = {key: value for key, value in TEXT.items() if key.endswith("_token_id")}
    torch.manual_seed(0)
    config = {**family.config, "text_config": {**family.config["text_config"], **(text or {})}}
    model = made(made.config_class(**{**config, **ids, **special})).eval().float()
    _spread(model)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    rule = find_rule_of(family, folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "model_max_length": 2048})
    )
    (folder / "chat_template.jinja").write_text(IN_ORDER.replace("MARKER", rule.marker))
    return Oracle(name, folder, model)


def find_rule_of(family: Family, folder: Path) -> PictureRule:
    (folder / "preprocessor_config.json").write_text(json.dumps(family.settings))
    rule = find_rule(folder, json.loads((folder / "config.json").read_text()))
    assert rule is not None
    return rule


def make_tokenizer(name: str) -> Tokenizer:
    """Bytes have the ids from 3 on, tokens of pictures from 260 on; Mllama's lies beyond the vocabulary of its head."""
    family = FAMILIES[name]
    names = [PAD, BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    first = VOCAB_SIZE if name == "mllama" else 260
    vocabulary = {token: number for number, token in enumerate(names)}
    vocabulary |= {token: first + number for number, token in enumerate(family.tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, BOS, EOS, *family.tokens]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if family.adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return tokenizer


def draw(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise over a slope, with a corner of another colour."""
    pixels = np.random.default_rng([width, height, seed]).integers(0, 128, (height, width, 3))
    pixels += np.linspace(0, 127, width).astype(np.int64)[None, :, None]
    pixels[: (height + 1) // 2, : (width + 1) // 2, seed % 3] = 255
    return Image.fromarray(pixels.astype(np.uint8))


def _spread(model: torch.nn.Module) -> None:
    """Values far enough from each other that the best token is never a near-tie, and no gate that is closed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "gate" in name:
                parameter.uniform_(0.3, 0.9)
            else:
                parameter.uniform_(0.7, 1.3)
