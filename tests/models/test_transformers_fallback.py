"""Architectures without a file of their own equal `transformers`, token for token, and those that would not are refused."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from driving import Tiny, make_request, random_prompts, reference, run, start
from queue_on_cpu import QueueOnCpu
from safetensors.torch import load_file, save_file
from transformers import masking_utils
from transformers_models import FAMILIES, SIZES, make

from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine
from text_generation_inference.engine.memory import check_weights_fit
from text_generation_inference.errors import ModelFormatError, ResourceError, StartError
from text_generation_inference.launch.check import check_model
from text_generation_inference.launch.check_report import render
from text_generation_inference.models import transformers_fallback, transformers_hook
from text_generation_inference.models.config import Config
from text_generation_inference.models.registry import build, read_config

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 12
PROMPTS = random_prompts(320, [1, 5, 17, 40], seed=3)  # the last is longer than the windows


@pytest.fixture(scope="module", params=list(FAMILIES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make("Olmo", tmp_path_factory.mktemp("olmo"))


def check(tiny: Tiny, prompts: list[list[int]], new: int = NEW, **settings: Any) -> Engine:
    """All at once, in chunks where prompts may be cut, twice where a prefix may be found, and the longest alone."""
    expected = [reference(tiny.model, prompt, new) for prompt in prompts]
    defaults = {"max_batch_prefill_tokens": 33, "max_total_tokens": 64, "max_batch_size": 4}
    engine = start(tiny.folder, **{**defaults, **settings})
    assert any("served through transformers" in note for note in engine.notes)
    requests = [make_request(n, prompt, new) for n, prompt in enumerate(prompts)]
    found = (
        run(engine, requests, arrivals=list(range(len(requests)))) + run(engine, requests) + run(engine, requests[-1:])
    )
    engine.close()
    for output, (tokens, logprobs) in zip(found, [*expected, *expected, expected[-1]], strict=True):
        assert output.token_ids == tokens
        assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(output.logprobs, logprobs, strict=True))
    return engine


def test_equals_transformers(tiny: Tiny) -> None:
    check(tiny, PROMPTS)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch_total_tokens": 128, "max_total_tokens": 112, "max_batch_size": 6, "new": 24},
        {"max_batch_prefill_tokens": 7, "custom_kernels": False},
    ],
    ids=["preemption", "small-chunks"],
)
@pytest.mark.parametrize("family", ["Olmo3", "MiniCPM3"])
def test_preemption_chunks_and_prefixes(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    shared = random_prompts(320, [40], seed=1)[0]
    tails = [3, 9, 1, 20, 5, 30] if "max_batch_total_tokens" in settings else [3, 9, 1]
    prompts = [shared + tail for tail in random_prompts(320, tails, seed=2)]
    engine = check(make(family, tmp_path), prompts, **settings)
    assert engine.loop.scheduler.stats.num_cached_prompt_tokens > 0
    if "max_batch_total_tokens" in settings:
        assert engine.loop.scheduler.stats.num_preemptions > 0


def test_nothing_is_captured(olmo: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = QueueOnCpu(tmp_path)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    check(olmo, PROMPTS)
    assert device.num_replays == 0
    with pytest.raises(StartError, match="op by op"):
        start(olmo.folder, bucketing=True, max_total_tokens=64, max_batch_prefill_tokens=64)


def test_padded_shapes(olmo: Tiny) -> None:
    engine = check(olmo, PROMPTS, bucketing=True, max_batch_prefill_tokens=24, custom_kernels=False)
    assert engine.loop.scheduler.stats.num_cached_prompt_tokens > 0


def test_prompt_logprobs(olmo: Tiny) -> None:
    engine = start(olmo.folder, max_batch_prefill_tokens=16)
    (output,) = run(engine, [make_request(0, PROMPTS[-1], 2, decoder_input_details=True)])
    engine.close()
    with torch.no_grad():
        scores = olmo.model(torch.tensor([PROMPTS[-1]])).logits[0].log_softmax(-1)
    expected = {i: scores[i - 1, PROMPTS[-1][i]].item() for i in range(1, len(PROMPTS[-1]))}
    assert output.prompt_logprobs == pytest.approx(expected, abs=1e-4)


def test_dummy_weights(olmo: Tiny, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((olmo.folder / "config.json").read_bytes())
    engine = start(tmp_path, load_format="dummy", max_total_tokens=64)
    assert len(run(engine, [make_request(0, [1, 2, 3], 4)])[0].token_ids) == 4
    engine.close()


def test_ranks_are_refused(olmo: Tiny) -> None:
    with pytest.raises(StartError, match="served through transformers is not split over ranks: use one"):
        start(olmo.folder, num_shard=2)


def test_check_says_so(olmo: Tiny) -> None:
    report = check_model(ServerConfig(model_id=str(olmo.folder)))
    assert report.is_supported and transformers_fallback.NOTE in report.notes
    assert report.path == "transformers" and report.lost == list(transformers_fallback.LOST)
    assert "transformers, over our cache" in render(report) and "several ranks" in render(report)
    assert report.parameters == sum(parameter.numel() for parameter in olmo.model.parameters())
    assert report.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4 + 4  # keys and values of 3 layers, and the id


def test_check_counts_experts(tmp_path: Path) -> None:
    tiny = make("Olmoe", tmp_path)
    report = check_model(ServerConfig(model_id=str(tiny.folder)))
    sizes = {name: each.numel() for name, each in tiny.model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert report.experts == [8, 2] and report.active_parameters == sum(sizes.values()) - experts * 6 // 8


def test_one_that_is_too_large_is_told_nothing_of_quantising(olmo: Tiny) -> None:
    """On a device that has FP8, which no setting asked for."""
    device = SimpleNamespace(
        limits=SimpleNamespace(measures_steps=True, meters_memory=True),
        all_free_bytes=lambda: 1,
        supports_fp8=True,
        description="a small GPU",
    )
    with pytest.raises(ResourceError, match="too large") as caught:
        check_weights_fit(ServerConfig(), build(read_config(olmo.folder)), torch.float32, device)  # pyright: ignore
    assert "quantize" not in str(caught.value)


# -- refusals --------------------------------------------------------------------------------------------------------


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "recurrent": ("Mamba", {}, "it is recurrent"),
    "hybrid": ("FalconH1", {}, "does not attend through the interface"),
    "convolution": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "keeps a state"),
    "values on the way": ("JetMoe", {}, "looks at values on the way to decide what to compute"),
    "a state": ("MiniMax", {}, "2 of its 3 layers attend through the interface"),
    "a state on one layer": (
        "GraniteMoeHybrid",
        {"layer_types": ["attention", "mamba", "attention"]},
        "keeps a state that is no cache",
    ),
    "two calls a layer": ("DiffLlama", {}, "attends more than once"),
    "own mask": ("Doge", {}, "makes a mask of its own"),
    "bidirectional": ("Olmo", {"is_causal": False}, "looks at tokens that come later"),
    "dynamic rope": ("Olmo", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type dynamic"),
    "encoder": ("T5", {"architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder: each token attends over"),
    "unlisted encoder": ("LED", {"is_encoder_decoder": True}, "it is an encoder-decoder"),
    "images": ("Llava", {"architectures": ["LlavaForX"], "vision_config": {}}, "it reads images"),
    "images without a tower": ("Fuyu", {}, "it reads more than text"),
    "the text of a model that sees": (
        "Gemma4",
        {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": SIZES},
        "it reads more than text",
    ),
    "no causal model": ("Bert", {"architectures": ["BertForMaskedLM"]}, "has no such causal language model"),
    "remote code": ("Frob", {"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "run only with --trust-remote-code"),
    "code of nothing": ("Frob", {"auto_map": {"AutoConfig": "x.Y"}}, "has no such causal language model"),
    "absurd": ("Olmo", {"num_hidden_layers": 2**40}, "`num_hidden_layers` must be at most"),
    "no numbers": ("Olmo", {"hidden_size": "many"}, "`hidden_size` must be a positive integer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    family, changes, reason = REFUSED[name]
    made = getattr(transformers, f"{family}Config", None)
    fields = {**SIZES, "model_type": getattr(made, "model_type", "frob"), "architectures": [f"{family}ForCausalLM"]}
    with pytest.raises(ModelFormatError) as caught:
        start(write(tmp_path, {**fields, **changes}))
    assert reason in str(caught.value)


CODE = """from transformers import OlmoForCausalLM
from .settings_of_frob import FrobConfig


class FrobForCausalLM(OlmoForCausalLM):
    config_class = FrobConfig
"""
SETTINGS = """from transformers import OlmoConfig


class FrobConfig(OlmoConfig):
    model_type = "frob"
"""
OWN = {"architectures": ["FrobForCausalLM"], "model_type": "frob"}


def bring_code(olmo: Tiny, folder: Path, code: str = CODE, reference: str = "model_of_frob.FrobForCausalLM") -> Path:
    """The same weights, in a folder that has the modelling code beside them."""
    for path in olmo.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    fields = json.loads((folder / "config.json").read_text())
    write(folder, {**fields, **OWN, "auto_map": {"AutoModelForCausalLM": reference}})
    (folder / "model_of_frob.py").write_text(code)
    (folder / "settings_of_frob.py").write_text(SETTINGS)
    return folder


def test_code_that_comes_with_a_model(olmo: Tiny, tmp_path: Path) -> None:
    folder = bring_code(olmo, tmp_path)
    with pytest.raises(ModelFormatError, match="run only with --trust-remote-code"):
        start(folder)
    engine = check(Tiny(folder, olmo.model), PROMPTS[1:3], 4, trust_remote_code=True)
    assert "code that came with the model is run: model_of_frob.py" in engine.notes
    assert not (folder / "__pycache__").exists()
    report = check_model(ServerConfig(model_id=str(folder), trust_remote_code=True))
    assert report.path == "transformers" and report.is_supported
    assert not check_model(ServerConfig(model_id=str(folder))).is_supported


@pytest.mark.parametrize(
    ("code", "reference", "reason"),
    [
        ("", "model_of_frob.FrobForCausalLM", "AttributeError"),
        ("import no_such_package_at_all", "model_of_frob.FrobForCausalLM", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "model_of_frob.FrobForCausalLM", "SystemExit"),
        ("FrobForCausalLM = dict", "model_of_frob.FrobForCausalLM", "no model of transformers"),
        ("class FrobForCausalLM:\n    is_backend_compatible = 3", "model_of_frob.FrobForCausalLM", "TypeError: 'int'"),
        (
            f"{CODE}\nFrobForCausalLM.config_class = None",
            "model_of_frob.FrobForCausalLM",
            "names no class of its config",
        ),
        (
            f"{CODE}\n    get_output_embeddings = 3",
            "model_of_frob.FrobForCausalLM",
            "FrobForCausalLM of model_of_frob.py",
        ),
        (f"{CODE}\n    def to(self, *_): exit(3)", "model_of_frob.FrobForCausalLM", "SystemExit: 3"),
        (f"{CODE}\n    def eval(self): return self.absent", "model_of_frob.FrobForCausalLM", "no attribute 'absent'"),
        ("", "absent.FrobForCausalLM", "absent.py is missing"),
        ("", "../x.Y", "no `module.Class`"),
        ("", "org/other--model.Y", "copy it into the model's folder"),
        ("", "model_of_frob", "no `module.Class`"),
    ],
)
def test_code_that_cannot_be_used(olmo: Tiny, tmp_path: Path, code: str, reference: str, reason: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        start(bring_code(olmo, tmp_path, code, reference), trust_remote_code=True)
    assert reason in str(caught.value)


def test_hostile_configs(olmo: Tiny) -> None:
    """Whatever a field holds: a model is described, or refused in our words."""
    fields = json.loads((olmo.folder / "config.json").read_text())
    values = [None, -1, 0, 2**40, "x", [], {}, True, math.nan, {"rope_type": "spiral"}, ["full_attention"]]
    rng = random.Random(0)
    refused = 0
    for _ in range(40):
        changed = {name: rng.choice(values) for name in rng.sample(sorted(fields.keys() - {"architectures"}), 2)}
        try:
            build(Config({**fields, **changed}, "config.json"))
        except StartError:
            refused += 1
    assert refused > 20


def test_masks() -> None:
    causal = masking_utils.causal_mask_function
    assert transformers_hook.read_window(causal) is None
    assert transformers_hook.read_window(masking_utils.sliding_window_causal_mask_function(24)) == 24
    chunks = masking_utils.chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.int64))
    prefix = masking_utils.or_masks(causal, lambda batch, head, query, key: key < 5)
    for function in (masking_utils.bidirectional_mask_function, chunks, prefix):
        with pytest.raises(transformers_hook.NotServed, match="neither causal nor a window"):
            transformers_hook.read_window(function)


def test_without_transformers(olmo: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_fallback, "find_spec", lambda _: None)
    with pytest.raises(ModelFormatError, match=r"'OlmoForCausalLM' is not supported: .*pip install .*\[transformers\]"):
        start(olmo.folder)


def test_what_is_not_what_transformers_computes_is_refused(olmo: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    look = transformers_hook.look
    monkeypatch.setattr(transformers_hook, "look", lambda *given: [replace(layer, scale=3.0) for layer in look(*given)])
    with pytest.raises(ModelFormatError, match="depend on more than the tokens"):
        start(olmo.folder)


@pytest.mark.parametrize("change", ["missing", "left over", "shape", "pickle"])
def test_weights_that_do_not_fit(change: str, olmo: Tiny, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((olmo.folder / "config.json").read_bytes())
    tensors = load_file(olmo.folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    match change:
        case "missing":
            del tensors[name]
        case "left over":
            name = "model.layers.7.strange"
            tensors[name] = torch.zeros(3)
        case "shape":
            tensors[name] = torch.zeros(3, 3)
        case _:
            torch.save(tensors, tmp_path / "pytorch_model.bin")
            name = "pytorch_model.bin"
    if change != "pickle":
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFormatError) as caught:
        start(tmp_path)
    assert name in str(caught.value)


def test_quantising_is_refused(olmo: Tiny, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="served through transformers cannot be quantised"):
        start(olmo.folder, quantize="fp8", dtype=None)
    fields = json.loads((olmo.folder / "config.json").read_text())
    stored = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    with pytest.raises(ModelFormatError, match="stored in fp8"):
        start(write(tmp_path, {**fields, "quantization_config": stored}))
