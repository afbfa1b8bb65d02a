"""Models in few bits equal `transformers` with the values that those stand for, on every path that a pass can take."""

from pathlib import Path

import low_bit_writing
import pytest
import torch
import transformers
from driving import Tiny, make_tiny, reference
from low_bit_writing import FORMS, write_folders, write_low_bit
from paths import NEW, PROMPTS, Expected, check_bucketed, check_captured, check_plain
from ranks import PROMPT, check_ranks, logits_of_threads
from safetensors.torch import load_file, save_file

from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.layers.experts import Experts
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.registry import ARCHITECTURES, build, read_config
from text_generation_inference.quant import choose
from text_generation_inference.quant.method import Matrix

pytestmark = pytest.mark.usefixtures("one_thread", "tests_format")

CASES = [
    ("Llama", "symmetric"),
    ("Mixtral", "zero points"),
    ("DeepseekV3", "8 bits"),
    ("Mixtral", "table"),
    ("Llama", "order"),
    ("Mixtral", "order"),
]


@pytest.fixture(scope="module")
def tests_format() -> object:
    patch = pytest.MonkeyPatch()
    patch.setitem(choose.METHODS, low_bit_writing.METHOD, low_bit_writing.detect)
    yield
    patch.undo()


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    family, form = request.param
    return write_low_bit(make_tiny(family, {}, tmp_path_factory.mktemp("tiny")), form, tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> Expected:
    return [reference(tiny.model, prompt, NEW) for prompt in PROMPTS]


def test_plain(tiny: Tiny, expected: Expected) -> None:
    check_plain(tiny.folder, expected)


def test_captured(tiny: Tiny, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = check_captured(tiny.folder, expected, tmp_path, monkeypatch)
    matrices = [each for _, each in engine.rank.runner.model.walk() if isinstance(each, Matrix)]  # pyright: ignore
    held = [matrix for matrix in matrices if isinstance(matrix.weight, LowBitWeight)]
    assert held and all(matrix.may_round == (matrix in held) for matrix in matrices)


def test_bucketed(tiny: Tiny, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_bucketed(tiny.folder, expected, tmp_path, monkeypatch)


@pytest.mark.parametrize("ops", [None, Ops()], ids=["widened", "held"])
def test_ranks(tiny: Tiny, ops: Ops | None) -> None:
    check_logits(tiny, ops)


def check_logits(tiny: Tiny, ops: Ops | None) -> None:
    with torch.no_grad():
        expected = tiny.model(torch.tensor([PROMPT])).logits[0]
    check_ranks(tiny.folder, expected, ops)
    model = build(read_config(tiny.folder))
    if any(isinstance(module, Experts) for _, module in model.walk()):
        found = logits_of_threads(tiny.folder, 3, ops=ops, by_expert=True)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


FAMILIES = [name for name in ARCHITECTURES if hasattr(transformers, name)]


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=FAMILIES)
def test_every_family(number: int, tmp_path: Path) -> None:
    """Whichever way round, in which order and in how many tensors it stores its matrices; forms take turns."""
    tiny = make_tiny(FAMILIES[number], {}, tmp_path / "tiny")
    check_logits(write_low_bit(tiny, list(FORMS)[number % len(FORMS)], tmp_path), Ops())


def test_experts_in_tensors_of_their_own(tmp_path: Path) -> None:
    """Quantised versions have each matrix of an expert for itself, where plain ones have those of all in one."""
    source = make_tiny("Llama4", {}, tmp_path / "tiny").folder
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        words = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(name.split(".")[-1], ())
        stem = name.rpartition(".")[0]
        for number, matrix in enumerate(value if words else ()):
            for word, part in zip(words, matrix.t().chunk(len(words)), strict=True):
                tensors[f"{stem}.{number}.{word}.weight"] = part.contiguous()
        if not words:
            tensors[name] = value
    assert any(".experts.0.up_proj." in name for name in tensors)
    expected = logits_of_threads(source, 1)
    save_file(tensors, source / "model.safetensors")
    torch.testing.assert_close(logits_of_threads(source, 1), expected)
    plain, few = write_folders(source, "zero points", tmp_path)
    check_ranks(few, logits_of_threads(plain, 1), Ops())


GPT_OSS = {  # what each matrix of an expert is called, and the router
    "each": (("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj"), "router"),
    "pairs": (("experts.gate_up.{}", "experts.down.{}"), "router"),
    "unsloth": (("experts.gate_up_projs.{}", "experts.down_projs.{}"), "router.linear"),
}


@pytest.mark.parametrize("form", GPT_OSS)
def test_experts_of_gpt_oss_in_tensors_of_their_own(form: str, tmp_path: Path) -> None:
    """As its quantised versions have them, with their biases; gates and values take turns where they are one tensor."""
    source = make_tiny("GptOss", {}, tmp_path / "tiny").folder
    expected = logits_of_threads(source, 1)
    (*pair, down), router = GPT_OSS[form]
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        stem, _, last = name.partition("experts.")
        names = pair if last.startswith("gate_up_proj") else [down]
        for number, each in enumerate(value if last else ()):
            for place, word in enumerate(names):
                end = "bias" if last.endswith("_bias") else "weight"
                part = each if end == "bias" else each.t()
                tensors[f"{stem}{word.format(number)}.{end}"] = part[place :: len(names)].contiguous()
        if not last:
            tensors[name.replace("mlp.router", f"mlp.{router}")] = value
    save_file(tensors, source / "model.safetensors")
    torch.testing.assert_close(logits_of_threads(source, 1), expected)
    torch.testing.assert_close(logits_of_threads(source, 3, by_expert=True), expected, atol=1e-4, rtol=1e-4)
    plain, few = write_folders(source, "zero points", tmp_path)
    whole = logits_of_threads(plain, 1)
    check_ranks(few, whole, Ops())
    found = logits_of_threads(few, 3, ops=Ops(), by_expert=True)
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_in_few_bits_is_a_head(is_tied: bool, tmp_path: Path) -> None:
    """Whatever its tensors are called, and even where config.json says that the embedding is the head."""
    source = make_tiny("Gemma", {}, tmp_path / "tiny").folder
    fields = {**read_config(source).fields, "tie_word_embeddings": is_tied}
    model = build(Config(fields, "config.json"))
    assert isinstance(model, CausalLM)
    names = list(load_file(source / "model.safetensors"))
    model.adapt([*names, "lm_head.qweight", "lm_head.scales"], lambda *_: True)
    assert model.head is not None and model.head.parts[0].name == "lm_head.weight"
