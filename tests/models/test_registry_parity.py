"""Every architecture of the registry equals `transformers` on every path that a pass can take, token for token."""

from pathlib import Path

import pytest
import torch
import transformers
from driving import Tiny, family_of, make_tiny, reference
from paths import NEW, PROMPTS, Expected, check_bucketed, check_captured, check_plain
from ranks import PROMPT, logits_of_threads

from text_generation_inference.config import ServerConfig
from text_generation_inference.launch.check import check_model
from text_generation_inference.layers.experts import Experts
from text_generation_inference.models.registry import ARCHITECTURES, build, read_config

pytestmark = pytest.mark.usefixtures("one_thread")

# Architectures that `transformers` has, as they are and in the variants that their files name; those of a model inside
# another's config are tested once.
CASES: dict[str, tuple[str, dict]] = {}
for architecture in ARCHITECTURES:
    if hasattr(transformers, architecture):
        CASES[architecture] = (architecture, {})
        family = family_of(architecture)
        is_inside = architecture in getattr(family, "TINIES", {})
        for name, overrides in () if is_inside else getattr(family, "VARIANTS", {}).items():
            CASES[f"{architecture}-{name}"] = (architecture, overrides)


@pytest.fixture(scope="module", params=list(CASES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(*CASES[request.param], tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> Expected:
    return [reference(tiny.model, prompt, NEW) for prompt in PROMPTS]


def test_plain(tiny: Tiny, expected: Expected) -> None:
    check_plain(tiny.folder, expected)


def test_captured(tiny: Tiny, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkpoint in several files."""
    tiny.model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    check_captured(tmp_path / "sharded", expected, tmp_path, monkeypatch)


def test_bucketed(tiny: Tiny, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_bucketed(tiny.folder, expected, tmp_path, monkeypatch)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks(tiny: Tiny, world: int) -> None:
    """3 divides few of their numbers of heads and widths; 4 are more than there are keys and values. Experts are split
    by width, and each with one rank."""
    with torch.no_grad():
        expected = tiny.model(torch.tensor([PROMPT])).logits[0]
    model = build(read_config(tiny.folder))
    has_experts = any(isinstance(module, Experts) for _, module in model.walk())
    for by_expert in (False, True)[: 1 + has_experts]:
        found = logits_of_threads(tiny.folder, world, by_expert=by_expert)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_check(tiny: Tiny) -> None:
    """`tgi check` counts what the model has, before anything of it is loaded."""
    report = check_model(ServerConfig(model_id=str(tiny.folder), device="cpu", dtype="float32"))
    assert report.is_supported
    assert [each.partition(",")[0] for each in report.problems] == ["there is no tokenizer.json"]
    saved, model = tiny.model.state_dict(), tiny.model
    tensors = (*model.named_parameters(), *((name, each) for name, each in model.named_buffers() if name in saved))
    parameters = [(name, each.numel()) for name, each in tensors]
    others = ("vision_tower", "vision_model", "projector")
    counted = sum(size for name, size in parameters if not any(each in name for each in others))
    assert (report.parameters, report.weight_bytes) == (counted, 4 * counted)
    assert report.kv_bytes_per_token == 4 + sum(group.bytes_per_token for group in report.kv_layers)
    assert report.path is not None and report.path.startswith("models/") and report.lost == []
    assert (report.active_parameters is not None) == any(".experts" in name for name, _ in parameters)
