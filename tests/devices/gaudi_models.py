"""Tiny models of the kinds that the published command lines for Gaudi name (`tests/unit/gaudi_commands.py`), as folders,
and measurements of them for the lines in FP8."""

import json
from pathlib import Path

from driving import make_request, make_tiny, random_prompts
from measured_fp8 import write_quant_config
from vision_oracle import FAMILIES, make_oracle

PROMPTS = random_prompts(200, [140, 3, 40], seed=3)
NEW = 4
REFUSED = ("idefics",)
GPT2_WORDS = ("GPTBigCode", "GPT2LMHeadModel", "GPTJ")
# Those whose name is not an architecture's, or whose published models are another form than the tests' own.
FORMS = {
    "Falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False}),
    "FalconMultiQuery": ("Falcon", {"new_decoder_architecture": False, "multi_query": True}),
}

# What the published pairs of files leave out, and how they are measured, where it is not the plain pair.
BLOCKED = {
    "Mixtral": ["self_attn"],
    "Phi": ["matmul_qk", "matmul_av", "lm_head"],
    "Gemma": ["lm_head"],
    "DeepseekV2": ["lm_head", "k_b_proj", "kv_b_proj", "k_cache", "v_cache"],
}
WITH_OUTPUTS = ("Falcon",)


def sees(kind: str) -> bool:
    return kind in FAMILIES


def make_model(kind: str, folder: Path, *, positions: int = 512, is_split: bool = False) -> Path:
    """Its folder. `is_split`: with a head for each of eight cards."""
    heads = {"num_attention_heads": 8, "hidden_size": 64} if is_split else {}
    if kind in REFUSED:
        folder.mkdir()
        fields = {"architectures": ["IdeficsForVisionText2Text"], "model_type": "idefics"}
        (folder / "config.json").write_text(json.dumps(fields))
        return folder
    if sees(kind):
        return _with_positions(make_oracle(kind, folder, heads).folder, positions)
    architecture, overrides = FORMS.get(kind, (kind, {}))
    if kind in GPT2_WORDS:
        heads = {"n_head": 8, "n_embd": 64} if is_split else {}
        return make_tiny(architecture, {"n_positions": positions, **heads}, folder).folder
    return make_tiny(architecture, {"max_position_embeddings": positions, **overrides, **heads}, folder).folder


def measure(kind: str, model: Path, folder: Path) -> str:
    asked = [make_request(n, prompt, NEW) for n, prompt in enumerate(PROMPTS)]
    more = {"measure_exclude": "NONE"} if kind in WITH_OUTPUTS else {}
    return write_quant_config(model, folder, asked, BLOCKED.get(kind, ()), **more)


def _with_positions(folder: Path, positions: int) -> Path:
    """Rotations have no weights."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config)["max_position_embeddings"] = positions
    path.write_text(json.dumps(config))
    return folder
