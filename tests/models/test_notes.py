"""What the log of a start and `tgi check` tell of a model that is served."""

from pathlib import Path

import pytest
from driving import make_tiny, start

from text_generation_inference.config import ServerConfig
from text_generation_inference.launch.check import check_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("architecture", "dtype", "is_told"),
    [
        ("Gemma2ForCausalLM", "float16", True),
        ("Gemma3ForCausalLM", "float16", True),
        ("Gemma2ForCausalLM", "float32", False),
        ("GemmaForCausalLM", "float16", False),
    ],
)
def test_float16_of_a_model_that_it_has_too_little_range_for(
    architecture: str, dtype: str, is_told: bool, tmp_path: Path
) -> None:
    folder = make_tiny(architecture, {}, tmp_path).folder
    report = check_model(ServerConfig(model_id=str(folder), device="cpu", dtype=dtype))
    engine = start(folder, dtype=dtype, max_total_tokens=64)
    engine.close()
    for notes in (report.notes, engine.notes):
        assert any("in float16 its hidden states may overflow" in note for note in notes) == is_told
