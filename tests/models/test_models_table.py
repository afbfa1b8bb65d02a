"""docs/models.md shows the registry as it is."""

import json
import runpy
from pathlib import Path

import pytest

from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ModelFormatError
from text_generation_inference.launch.check import check_model
from text_generation_inference.models.config import Config
from text_generation_inference.models.refused import REFUSED
from text_generation_inference.models.registry import ARCHITECTURES, SEEING, build

ROOT = Path(__file__).parents[2]


def test_the_page_shows_every_architecture() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "models_table.py"))
    page = (ROOT / "docs" / "models.md").read_text()
    for table in (made["table"](), made["refused_table"](), made["hub_table"]()):
        assert table in page, "run: .venv/bin/python tools/models_table.py"


# What TGI had code for, by the names that its users' checkpoints have.
SERVED_BY_TGI = """
BaichuanForCausalLM BloomForCausalLM Cohere2ForCausalLM CohereForCausalLM DbrxForCausalLM DeepseekV2ForCausalLM
DeepseekV3ForCausalLM FalconForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration
CodeGenForCausalLM GPTNeoForCausalLM
GemmaForCausalLM GPT2LMHeadCustomModel GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM
GraniteForCausalLM Idefics2ForConditionalGeneration Idefics3ForConditionalGeneration IdeficsForVisionText2Text
InternLM2ForCausalLM Llama4ForConditionalGeneration LlamaForCausalLM LlavaNextForConditionalGeneration MambaForCausalLM
MistralForCausalLM MixtralForCausalLM MllamaForConditionalGeneration MPTForCausalLM MptForCausalLM
MT5ForConditionalGeneration Olmo2ForCausalLM OPTForCausalLM PaliGemmaForConditionalGeneration Phi3ForCausalLM
PhiForCausalLM PhiMoEForCausalLM Qwen2_5_VLForConditionalGeneration Qwen2ForCausalLM Qwen2MoeForCausalLM
Qwen2VLForConditionalGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM RWForCausalLM StableLmForCausalLM
Starcoder2ForCausalLM T5ForConditionalGeneration
"""


def test_everything_that_tgi_served_is_served_or_refused_with_a_reason() -> None:
    assert not set(SERVED_BY_TGI.split()) - ARCHITECTURES.keys() - SEEING.keys() - REFUSED.keys()
    assert not (ARCHITECTURES | SEEING).keys() & REFUSED.keys()
    for name in REFUSED:
        config = Config({"architectures": [name]}, "config.json")
        with pytest.raises(ModelFormatError, match=f"'{name}' is not supported: it .* Use "):
            build(config)


def test_check_says_why_a_model_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = check_model(ServerConfig(model_id=str(tmp_path), device="cpu"))
    assert report.architecture == "T5ForConditionalGeneration" and not report.is_supported
    assert "it is an encoder-decoder" in report.problems[0] and "Use a decoder-only model" in report.problems[0]
