"""Folders of models that see, without weights: public facts of configs, settings of preprocessing, a tokenizer.

What ours and the peers read alike. Knows nothing of our packages.
"""

import json
from pathlib import Path
from typing import Any

_CLIP = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
_CLIP |= {"num_attention_heads": 16, "image_size": 336, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000}
_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_MISTRAL = {"model_type": "mistral", "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 14336}
_MISTRAL |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 1000000.0}
_MISTRAL |= {"max_position_embeddings": 32768, "sliding_window": None, "rms_norm_eps": 1e-5}
_QWEN = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
_QWEN |= {"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6}
_QWEN |= {"rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
_QWEN |= {"tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}
_QWEN_TOWER = {"model_type": "qwen2_5_vl", "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
_QWEN_TOWER |= {"out_hidden_size": 3584, "patch_size": 14, "spatial_patch_size": 14, "spatial_merge_size": 2}
_QWEN_TOWER |= {"temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
_MEANS = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_QWEN_IDS = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652}

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, int]]] = {  # config, settings, tokens
    "llava-next-7b": (
        {
            "architectures": ["LlavaNextForConditionalGeneration"],
            "model_type": "llava_next",
            "image_token_index": 32000,
            "image_grid_pinpoints": _PINPOINTS,
            "text_config": _MISTRAL,
            "vision_config": _CLIP,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "use_image_newline_parameter": True,
        },
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "processor_class": "LlavaNextProcessor",
            "image_grid_pinpoints": _PINPOINTS,
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
            **_MEANS,
        },
        {"<image>": 32000},
    ),
    "qwen2.5-vl-7b": (
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "vision_end_token_id": 151653,
            **_QWEN_IDS,
            **_QWEN,
            "vision_config": _QWEN_TOWER,
        },
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            **_MEANS,
        },
        {"<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|image_pad|>": 151655, "<|video_pad|>": 151656},
    ),
}
_TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY |= {"num_key_value_heads": 2}
_TINY_TOWER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def write_seeing(shape: str, folder: Path, tiny: bool = False) -> Path:
    """`tiny`: with few and small layers, for trying a script out."""
    config, settings, tokens = SHAPES[shape]
    config = json.loads(json.dumps(config))
    if tiny and shape == "llava-next-7b":
        config["text_config"] |= _TINY
        config["vision_config"] |= _TINY_TOWER
    elif tiny:
        config |= {**_TINY, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
        config["vision_config"] |= {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4}
        config["vision_config"] |= {"out_hidden_size": 64, "fullatt_block_indexes": [1]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=1))
    extra = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    if shape == "llava-next-7b":
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaNextProcessor", **extra}))
    _write_tokenizer(folder, tokens)
    return folder


def vocab_size(folder: str) -> int:
    config = json.loads(Path(folder, "config.json").read_text())
    return config.get("text_config", config)["vocab_size"]


def _write_tokenizer(folder: Path, tokens: dict[str, int]) -> None:
    """Bytes, then words that nobody writes as far as the first of the tokens of pictures."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *letters]
    first = min(tokens.values())
    words += [f"<unused{number}>" for number in range(len(words), first)]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    last = max(tokens.values())
    named = {place: name for name, place in tokens.items()}
    named |= {place: f"<unused{place}>" for place in range(first, last) if place not in named}
    tokenizer.add_special_tokens([AddedToken(named[place], special=True) for place in sorted(named)])
    for name, place in tokens.items():
        assert tokenizer.token_to_id(name) == place, (name, place)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
