"""FP8 by measure, then quantise: what is measured against `transformers`, what is served against an oracle of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Tiny, make_request, make_tiny, random_prompts, reference, run, start
from fp8_writing import by_row, make_oracle, prompt_scores, round_fp8, write_fp8
from ranks import check_near_ranks, logits_of_threads
from safetensors.torch import load_file
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from text_generation_inference.engine.build import Engine
from text_generation_inference.errors import ResourceError, StartError
from text_generation_inference.kernels.fp8 import FP8, Fp8Weight
from text_generation_inference.launch.server_command import main
from text_generation_inference.quant.inc.config import CalibrationConfig
from text_generation_inference.quant.inc.measure import Recorder

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(320, [40, 7, 90, 1], seed=5)
NEW = 6
PROMPT = random_prompts(320, [100], seed=9)[0]


INPUTS = ("inputs", "inputs 1")  # of a module that has two


def write_config(folder: Path, mode: str, **more: object) -> str:
    path = folder / f"{mode.lower()}.json"
    path.write_text(json.dumps({"mode": mode, "observer": "maxabs", "dump_stats_path": str(folder / "m"), **more}))
    return str(path)


def measure(tiny: Tiny, folder: Path, settings: dict | None = None, **config: object) -> dict:
    """Measure our own way; the nodes that were written."""
    engine = start(tiny.folder, quant_config=write_config(folder, "MEASURE", **config), **(settings or {}))
    run(engine, [make_request(n, prompt, NEW) for n, prompt in enumerate(PROMPTS)])
    engine.close()
    (path,) = folder.glob("m_hooks_*l.json") if config.get("observer") else [folder / "m_hooks_maxabs.json"]
    return json.loads(path.read_text())["Nodes"]


def watch_attention(tiny: Tiny, see: Any) -> None:
    def attend(module, query, key, value, *rest, **named):
        key, value = see(module.layer_idx, query, key, value)
        return sdpa_attention_forward(module, query, key, value, *rest, **named)

    ALL_ATTENTION_FUNCTIONS.register("watched", attend)
    tiny.model.set_attn_implementation("watched")


def multiply_in_fp8(tiny: Tiny, scales: Any) -> None:
    """`scales` gives those of queries, keys, weights and values of a layer."""

    def attend(module, query, key, value, mask, scaling, **named):
        of_query, of_key, of_weight, of_value = scales(module.layer_idx)
        groups = module.num_key_value_groups
        key, value = (x.repeat_interleave(groups, 1) for x in (round_fp8(key, of_key), round_fp8(value, of_value)))
        scores = round_fp8(query, of_query) @ key.mT * scaling
        length = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        mixed = round_fp8(weights, of_weight) @ value / weights.sum(-1, keepdim=True)
        return mixed.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("in fp8", attend)
    tiny.model.set_attn_implementation("in fp8")


@torch.no_grad()
def oracle_maxima(tiny: Tiny) -> dict[tuple[str, str], torch.Tensor]:
    """By (module, what): the largest values of each channel over the tokens that our engine computes."""
    model = tiny.model
    sequences = [prompt + reference(model, prompt, NEW)[0][:-1] for prompt in PROMPTS]
    found: dict[tuple[str, str], torch.Tensor] = {}
    hooks = []

    def take(name: str, what: str, value: torch.Tensor) -> None:
        largest = value.abs().flatten(0, -2).amax(0)
        found[name, what] = torch.maximum(found.get((name, what), largest), largest)

    def see(layer: int, *states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = (each.transpose(1, 2).flatten(2) for each in states)  # [1, heads, tokens, dim]
        path = f"model.layers.{layer}.self_attn"
        for name, inputs in {
            "k_cache": (key,),
            "v_cache": (value,),
            "matmul_qk": (query, key),
            "matmul_av": (torch.ones(1, 1, 1), value),
        }.items():
            for what, each in zip(INPUTS, inputs, strict=False):
                take(f"{path}.{name}", what, each)
        return states[1:]

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            take(name, "weight", layer.weight.t())

            def hook(_, inputs, output, name=name):
                # Scores are computed after the prompt only.
                wanted = slice(-NEW, None) if name == "lm_head" else slice(None)
                take(name, "inputs", inputs[0][:, wanted])
                take(name, "outputs", output[:, wanted])

            hooks.append(layer.register_forward_hook(hook))
    watch_attention(tiny, see)
    try:
        for sequence in sequences:
            model(torch.tensor([sequence]))
    finally:
        tiny.model.set_attn_implementation("sdpa")
        for handle in hooks:
            handle.remove()
    return found


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("Llama", {"attention_bias": True, "mlp_bias": True}, tmp_path_factory.mktemp("biased"))


# -- measuring -----------------------------------------------------------------------------------------------------


def check_nodes(nodes: dict, expected: dict[tuple[str, str], torch.Tensor], by_channel: bool = False) -> None:
    for (name, what), largest in expected.items():
        if what == "outputs":
            continue
        node = nodes[name]
        column = node["params"]["weight"] if what == "weight" else node["inputs"][INPUTS.index(what)]
        found = torch.tensor(column)
        assert found.shape == ((largest.shape[0], 1) if by_channel else (1, 1)), name
        wanted = largest[:, None] if by_channel else largest.amax().reshape(1, 1)
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    assert set(nodes) == {name for name, _ in expected}


@pytest.mark.parametrize("settings", [{}, {"max_batch_prefill_tokens": 33}, {"overlap": False, "max_batch_size": 1}])
def test_maxima_are_those_of_transformers(biased: Tiny, tmp_path: Path, settings: dict) -> None:
    nodes = measure(biased, tmp_path, settings)
    check_nodes(nodes, oracle_maxima(biased))
    assert all("outputs" not in node for node in nodes.values())
    listed = json.loads((tmp_path / "m_hooks_maxabs_mod_list.json").read_text())
    assert listed == list(nodes)


@torch.no_grad()
def test_experts_are_measured_and_quantised(tmp_path: Path) -> None:
    """As published: a pair of files without lists. Maxima are those of the tokens that experts were chosen for."""
    tiny = make_tiny("Mixtral", {}, tmp_path / "mixtral")
    nodes = measure(tiny, tmp_path)
    weights = load_file(tiny.folder / "model.safetensors")
    config, expected = tiny.model.config, {}
    blocks = [layer for layer in tiny.model.modules() if type(layer).__name__ == "MixtralSparseMoeBlock"]
    sequences = [prompt + reference(tiny.model, prompt, NEW)[0][:-1] for prompt in PROMPTS]
    for number, block in enumerate(blocks):
        seen: list[torch.Tensor] = []
        handle = block.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].flatten(0, -2)))
        for sequence in sequences:
            tiny.model(torch.tensor([sequence]))
        handle.remove()
        x, at = torch.cat(seen), f"model.layers.{number}.block_sparse_moe"
        chosen = (x @ weights[f"{at}.gate.weight"].T).topk(config.num_experts_per_tok).indices
        gated = [
            torch.nn.functional.silu(x @ weights[f"{at}.experts.{e}.w1.weight"].T)
            * (x @ weights[f"{at}.experts.{e}.w3.weight"].T)
            * (chosen == e).any(1, keepdim=True)
            for e in range(config.num_local_experts)
        ]
        for e in range(config.num_local_experts):
            inputs = {"w1": x.abs().amax(), "w3": x.abs().amax(), "w2": torch.stack(gated).abs().amax()}
            expected |= {f"{at}.experts.{e}.{name}": float(value) for name, value in inputs.items()}
    found = {name: node["inputs"][0][0][0] for name, node in nodes.items() if ".experts." in name}
    assert found == pytest.approx(expected, rel=2e-3)
    engine = start(tiny.folder)
    plain = scores(engine)
    engine.close()
    engine = start(tiny.folder, quant_config=write_config(tmp_path, "QUANTIZE"))
    stacked = [module.weight for _, module in engine.rank.runner.model.walk() if getattr(module, "is_stacked", False)]
    assert len(stacked) == 2 * len(blocks)
    assert all(isinstance(each, Fp8Weight) and each.input_scale is not None for each in stacked)
    rounded = scores(engine)
    engine.close()
    assert 0 < float((rounded - plain).abs().mean()) < 0.3


def test_maxima_by_channel(tiny_llama: Tiny, tmp_path: Path) -> None:
    nodes = measure(tiny_llama, tmp_path, observer="maxabs_per_channel")
    check_nodes(nodes, oracle_maxima(tiny_llama), by_channel=True)


def test_outputs_and_lists(tiny_llama: Tiny, tmp_path: Path) -> None:
    allowed = {"allowlist": {"types": [], "names": ["up_proj"]}, "blocklist": {"names": [r"layers\.1\."]}}
    nodes = measure(tiny_llama, tmp_path, measure_exclude="NONE", **allowed)
    assert set(nodes) == {"model.layers.0.mlp.up_proj", "model.layers.2.mlp.up_proj"}
    expected = oracle_maxima(tiny_llama)
    for name, node in nodes.items():
        assert node["outputs"][0][0][0] == pytest.approx(expected[name, "outputs"].amax().item(), rel=2e-3)
    with pytest.raises(StartError, match="leave nothing of this model"):
        measure(tiny_llama, tmp_path, allowlist={"names": ["nothing"]})


def test_padding_is_not_measured(tiny_llama: Tiny, tmp_path: Path) -> None:
    """Rows that fill a bucket up are computed too, but nobody asked for them."""
    engine = start(tiny_llama.folder, bucketing=True, custom_kernels=False, max_total_tokens=128, max_batch_size=8)
    model = engine.rank.runner.model
    recorder = Recorder(model, CalibrationConfig("c", "MEASURE", stats=tmp_path / "m"), engine.resolved.block_size)
    run(engine, [make_request(n, prompt, NEW) for n, prompt in enumerate(PROMPTS)])
    engine.close()
    assert recorder.has_news
    recorder.save()
    check_nodes(json.loads((tmp_path / "m_hooks_maxabs.json").read_text())["Nodes"], oracle_maxima(tiny_llama))


def test_earlier_files_stay_until_there_is_something_new(tiny_llama: Tiny, tmp_path: Path) -> None:
    first = measure(tiny_llama, tmp_path)
    engine = start(tiny_llama.folder, quant_config=write_config(tmp_path, "MEASURE"))
    engine.close()
    assert not list(tmp_path.glob("backup*"))
    assert measure(tiny_llama, tmp_path) == first
    (backup,) = tmp_path.glob("backup_m_*")
    assert json.loads((backup / "m_hooks_maxabs.json").read_text())["Nodes"] == first


# -- quantising ----------------------------------------------------------------------------------------------------


def pow2(value: float) -> float:
    return next(2.0**e for e in range(-60, 60) if 2.0**e >= value)


def weights_of(engine: Engine) -> dict[str, Fp8Weight | torch.Tensor]:
    layers = engine.rank.runner.model.model.layers  # pyright: ignore
    found = {}
    for number, layer in enumerate(layers):
        attention, mlp = layer.attention, layer.mlp
        for name, linear in (
            ("qkv", attention.qkv),
            ("o", attention.out),
            ("gate_up", mlp.gate_up),
            ("down", mlp.down),
        ):
            found[f"{number}.{name}"] = linear.weight
    return found


def scores(engine: Engine) -> torch.Tensor:
    output = run(engine, [make_request(0, PROMPT, 1, decoder_input_details=True)])[0]
    engine.close()
    return torch.tensor([output.prompt_logprobs[place] for place in range(1, len(PROMPT))])


METHODS = {
    "maxabs_hw": (False, pow2),
    "maxabs_arbitrary": (False, float),
    "act_maxabs_pow2_weights_pcs_maxabs_pow2": (True, pow2),
}


@pytest.mark.parametrize("attention", [False, True], ids=["", "fp8-attention"])
@pytest.mark.parametrize("cache", [False, True], ids=["", "fp8-cache"])
@pytest.mark.parametrize("method", METHODS)
def test_static_scales_compute_what_an_oracle_computes(
    tiny_llama: Tiny, tmp_path: Path, method: str, cache: bool, attention: bool
) -> None:
    nodes = measure(tiny_llama, tmp_path)
    by_channel, rounding = METHODS[method]
    types = [name for name, is_there in (("KVCache", cache), ("Matmul", attention)) if not is_there]
    blocked = {"types": types, "names": [r"layers\.2\.mlp\.down_proj"]}
    config = write_config(tmp_path, "QUANTIZE", scale_method=method, blocklist=blocked)

    def input_scale(name: str, number: int = 0) -> float:
        return rounding(nodes[name]["inputs"][number][0][0] / (448 * 0.25))

    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = weight.abs().amax(1, keepdim=True) if by_channel else weight.abs().amax().reshape(1, 1)
        scale = torch.tensor([[rounding(value)] for value in (largest / (448 * 0.5)).flatten().tolist()])
        return (weight / scale).to(FP8), scale

    def keep(name: str) -> bool:
        return name == "model.layers.2.mlp.down_proj.weight"

    def find_rounding(name: str) -> Any:
        return lambda x: round_fp8(x, input_scale(name))

    oracle = make_oracle(tiny_llama, quantize, find_rounding, keep, also=lambda name: name == "lm_head.weight")
    if attention:

        def scales(layer: int) -> list[float]:
            path = f"model.layers.{layer}.self_attn"
            return [input_scale(f"{path}.{name}", n) for name in ("matmul_qk", "matmul_av") for n in (0, 1)]

        multiply_in_fp8(Tiny(tiny_llama.folder, oracle), scales)
    elif cache:

        def see(layer: int, _: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple:
            path = f"model.layers.{layer}.self_attn"
            return round_fp8(key, input_scale(f"{path}.k_cache")), round_fp8(value, input_scale(f"{path}.v_cache"))

        watch_attention(Tiny(tiny_llama.folder, oracle), see)
    expected = prompt_scores(oracle, PROMPT)
    oracle.set_attn_implementation("sdpa")  # the configuration is that of the other model too
    noise = (prompt_scores(tiny_llama.model, PROMPT) - expected).abs().mean()
    assert noise > 0.01
    engine = start(tiny_llama.folder, quant_config=config, max_batch_prefill_tokens=33)
    assert any("static scales" in note for note in engine.notes)
    stored = engine.rank.runner.kv_cache[0][0].dtype
    assert (stored is FP8) == cache
    for name, weight in weights_of(engine).items():
        if name == "2.down":
            assert not isinstance(weight, Fp8Weight)
            continue
        assert isinstance(weight, Fp8Weight) and weight.input_scale is not None
        first = {
            "qkv": "self_attn.q_proj",
            "o": "self_attn.o_proj",
            "gate_up": "mlp.gate_proj",
            "down": "mlp.down_proj",
        }
        layer, short = name.split(".")
        path = f"model.layers.{layer}.{first[short]}"
        assert weight.input_scale.item() == pytest.approx(input_scale(path), rel=1e-6)
        plain = tiny_llama.model.get_parameter(f"{path}.weight").data
        data, scale = quantize(plain)
        rows = plain.shape[0]
        torch.testing.assert_close(weight.scale[:rows], scale.expand(rows, 1)[:, 0])
        assert torch.equal(weight.data[:rows].view(torch.uint8), data.view(torch.uint8))
    assert (scores(engine) - expected).abs().mean() < 0.1 * noise
    if not cache:
        plain = logits_of_threads(tiny_llama.folder, 1)
        check_near_ranks(tiny_llama.folder, plain, quant_config=config)


def test_a_file_in_the_layout_of_the_toolkit(tiny_llama: Tiny, tmp_path: Path) -> None:
    """Two ranks of another engine, with modules that this one does not have, and no values of matrices."""
    maxima = oracle_maxima(tiny_llama)
    for rank in range(2):
        share, nodes = 1.0 if rank else 0.5, dict[str, dict]()
        for name in {name for name, _ in maxima}:
            inputs = [maxima[name, what].amax().item() for what in INPUTS if (name, what) in maxima]
            nodes[name] = {"inputs": [[[share * value]] for value in inputs], "outputs": [[[9.0]]]}
        nodes["model.layers.0.self_attn.softmax"] = {"inputs": [[[3.0]]], "outputs": [[[1.0]]]}
        content = {"GlobalRank": rank, "LocalRank": rank, "Mode": "DynamicRange", "Nodes": nodes}
        (tmp_path / f"m_hooks_maxabs_{rank}_2.json").write_text(json.dumps(content))
    engine = start(tiny_llama.folder, quant_config=write_config(tmp_path, "QUANTIZE"))
    assert "products of attention are in FP8 in 3 of 3 layers" in engine.notes
    assert "the head is in FP8, apart from embeddings" in engine.notes
    theirs = scores(engine)
    measure(tiny_llama, tmp_path)
    ours = scores(start(tiny_llama.folder, quant_config=write_config(tmp_path, "QUANTIZE")))
    torch.testing.assert_close(theirs, ours)


@pytest.mark.parametrize("architecture", ["GptOss", "Llama4"])
def test_experts_of_one_tensor_and_special_attention(tmp_path: Path, architecture: str) -> None:
    """A tensor of all experts has one largest value. Attention with sinks or in chunks stays in the model's type."""
    tiny = make_tiny(architecture, {}, tmp_path / "model")
    measure(tiny, tmp_path)
    engine = start(tiny.folder, quant_config=write_config(tmp_path, "QUANTIZE"))
    run(engine, [make_request(n, prompt, NEW) for n, prompt in enumerate(PROMPTS)])
    engine.close()
    stacked = [module.weight for _, module in engine.rank.runner.model.walk() if getattr(module, "is_stacked", False)]
    assert stacked and all(isinstance(each, Fp8Weight) for each in stacked)
    rest = [note for note in engine.notes if note.startswith("products of attention stay in the model's type in ")]
    assert len(rest) == 1


def test_a_head_whose_rows_are_normed_stays_as_it_is(tmp_path: Path) -> None:
    fields = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "vocab_size": 125696}
    fields |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 512, "hidden_act": "silu", "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = write_config(tmp_path, "QUANTIZE", scale_method="unit_scale")
    engine = start(tmp_path, load_format="dummy", quant_config=config)
    engine.close()
    assert any("10 of 10 matrices are in FP8" in note for note in engine.notes)
    assert not [note for note in engine.notes if note.startswith("the head")]


def test_unit_scale_needs_no_measurement(tiny_llama: Tiny, tmp_path: Path) -> None:
    engine = start(tiny_llama.folder, quant_config=write_config(tmp_path, "QUANTIZE", scale_method="unit_scale"))
    weight = weights_of(engine)["0.qkv"]
    assert isinstance(weight, Fp8Weight) and weight.input_scale is not None
    assert weight.input_scale.item() == 1.0 and weight.scale.unique().tolist() == [1.0]
    assert "static scales that are fixed: 21 of 21 matrices are in FP8" in engine.notes
    engine.close()


def test_what_is_in_fp8_is_told(tiny_llama: Tiny, tmp_path: Path) -> None:
    """A list, or a file with other names, can leave out much; a server that has nothing in FP8 is not what was asked."""
    measure(tiny_llama, tmp_path)
    lists = {"names": ["q_proj"], "types": ["KVCache"]}
    engine = start(tiny_llama.folder, quant_config=write_config(tmp_path, "QUANTIZE", blocklist=lists))
    engine.close()
    (note,) = [note for note in engine.notes if note.startswith("static scales")]
    names = [f"model.layers.0.self_attn.{side}_proj" for side in "qkv"]
    assert note.endswith(f"12 of 21 matrices are in FP8; as they were stay {', '.join(names)} and 6 more")
    assert not [note for note in engine.notes if note.startswith(("matrices in FP8", "KV cache in"))]
    lists = {"types": ["Linear", "KVCache"]}
    engine = start(tiny_llama.folder, quant_config=write_config(tmp_path, "QUANTIZE", blocklist=lists))
    engine.close()
    assert [note for note in engine.notes if "attention" in note] and not [
        note for note in engine.notes if "head" in note
    ]
    lists = {"types": ["Linear", "KVCache", "Matmul"]}
    with pytest.raises(
        StartError, match=r"quantize.json: nothing of this model would be in FP8.*Leave QUANT_CONFIG out"
    ):
        start(tiny_llama.folder, quant_config=write_config(tmp_path, "QUANTIZE", blocklist=lists))
    path = tmp_path / "m_hooks_maxabs.json"
    path.write_text(path.read_text().replace("model.layers", "transformer.h"))
    others = {"ignore_modules_wo_measures": True}
    with pytest.raises(StartError, match=r"the measurement has none of its modules"):
        start(tiny_llama.folder, quant_config=write_config(tmp_path, "QUANTIZE", **others))


def test_before_weights_are_read(tiny_llama: Tiny, tmp_path: Path) -> None:
    """What can be known to fail does so at once."""
    (tmp_path / "file").touch()
    config = write_config(tmp_path, "MEASURE", dump_stats_path=str(tmp_path / "file" / "m"))
    with pytest.raises(ResourceError, match=r"nothing can be written there"):
        start(tmp_path / "no model", quant_config=config)


def test_generation_two_uses_less_of_the_range(tiny_llama: Tiny, tmp_path: Path) -> None:
    measure(tiny_llama, tmp_path)
    for device, full in (("GAUDI2", 240.0), ("GAUDI3", 448.0)):
        config = write_config(tmp_path, "QUANTIZE", device_for_scales=device, scale_method="maxabs_arbitrary")
        engine = start(tiny_llama.folder, quant_config=config)
        weight = weights_of(engine)["0.o"]
        assert isinstance(weight, Fp8Weight)
        engine.close()
        # Half of the range, as near as FP8 come.
        assert weight.data.float().abs().max().item() == pytest.approx(full / 2, rel=1 / 16)


def test_dummy_weights(tiny_llama: Tiny, tmp_path: Path) -> None:
    settings = {"load_format": "dummy"}
    measure(tiny_llama, tmp_path, settings)
    engine = start(tiny_llama.folder, quant_config=write_config(tmp_path, "QUANTIZE"), **settings)
    assert all(isinstance(weight, Fp8Weight) for weight in weights_of(engine).values())
    assert engine.rank.runner.model.model.layers[0].attention.cache_scales.k != 1.0
    engine.close()


def test_the_measurement_of_another_model_is_refused(tiny_llama: Tiny, biased: Tiny, tmp_path: Path) -> None:
    measure(tiny_llama, tmp_path)
    path = tmp_path / "m_hooks_maxabs.json"
    content = json.loads(path.read_text())
    content["Nodes"]["model.layers.1.mlp.down_proj"]["params"]["weight"][0][0] *= 1.5
    path.write_text(json.dumps(content))
    with pytest.raises(StartError, match=r"other weights: the largest value of model.layers.1.mlp.down_proj.weight"):
        start(tiny_llama.folder, quant_config=write_config(tmp_path, "QUANTIZE"))


def test_settings_that_contradict(tiny_llama: Tiny, tmp_path: Path) -> None:
    config = write_config(tmp_path, "MEASURE")
    with pytest.raises(StartError, match=r"`quant_config` and `quantize` both say|`quantize` .* and `quant_config`"):
        start(tiny_llama.folder, quant_config=config, quantize="fp8", dtype=None)
    with pytest.raises(StartError, match=r"`kv_cache_dtype` cannot be set while measuring"):
        start(tiny_llama.folder, quant_config=config, kv_cache_dtype="fp8_e4m3fn")
    small = write_fp8(tiny_llama, tmp_path / "fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}, by_row)
    with pytest.raises(StartError, match=r"this one is stored in FP8 \(fp8\). Leave QUANT_CONFIG out"):
        start(small, quant_config=config)
    with pytest.raises(StartError, match=r"there is no .*m_hooks_maxabs.json"):
        start(tiny_llama.folder, quant_config=write_config(tmp_path, "QUANTIZE"))
    engine = start(tiny_llama.folder, quant_config=write_config(tmp_path, "NONE"))
    assert "QUANT_CONFIG has no effect: its `mode` is NONE" in engine.notes
    engine.close()


# -- the command ---------------------------------------------------------------------------------------------------

WORDS = "The quick brown fox jumps over the lazy dog, and nobody has ever asked it why it would do such a thing. "


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 20)
    arguments = ["--model-id", "embedded", "--text", str(text), "--window", "40", "--max-prompts", "3"]
    config = write_config(tmp_path, "MEASURE")
    assert main(["measure", *arguments, "--quant-config", config]) == 0
    out = capsys.readouterr().out
    assert re.search(r"120 tokens of 3 prompts; 331 modules are in .*m_hooks_maxabs.json", out)
    nodes = json.loads((tmp_path / "m_hooks_maxabs.json").read_text())["Nodes"]
    assert len(nodes) == 30 * 11 + 1 and all(node["inputs"][0][0][0] > 0 for node in nodes.values())


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, "--quant-config is missing"),
        (["--quant-config", "{measure}", "--window", "1"], 2, "--window must be >= 2"),
        (["--quant-config", "{quantize}"], 1, "`mode` is QUANTIZE, but to measure it must be MEASURE"),
        (["--quant-config", "nothing.json"], 1, "`quant_config` nothing.json cannot be read"),
        (["--quant-config", "{measure}", "--text", "nothing.txt"], 1, "--text nothing.txt cannot be read"),
        (["--quant-config", "{measure}", "--text", "{empty}"], 1, "is empty"),
        (["--quant-config", "{measure}", "--model-id", "/nothing/here"], 1, "/nothing/here"),
        (["--quant-config", "{measure}", "--window", "9999"], 1, "10000 (--window and --max-new-tokens together)"),
    ],
)
def test_command_says_what_is_wrong(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_llama: Tiny,
    arguments,
    status,
    words,
) -> None:
    monkeypatch.setenv("MODEL_ID", str(tiny_llama.folder))
    monkeypatch.delenv("QUANT_CONFIG", raising=False)
    text, empty = tmp_path / "text.txt", tmp_path / "empty.txt"
    text.write_text(WORDS)
    empty.write_text(" \n")
    names = {mode.lower(): write_config(tmp_path, mode) for mode in ("MEASURE", "QUANTIZE")} | {"empty": str(empty)}
    arguments = ["--text", str(text), *(argument.format(**names) for argument in arguments)]
    assert main(["measure", *arguments]) == status
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ") and words in error and "Traceback" not in error


def test_interrupting_the_command_leaves_files_alone(tmp_path: Path, model_cache: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 2000)
    earlier = tmp_path / "m_hooks_maxabs.json"
    earlier.write_text("{}")
    command = [
        sys.executable,
        "-m",
        "text_generation_inference.launch.server_command",
        "measure",
        "--model-id",
        "embedded",
    ]
    command += ["--text", str(text), "--quant-config", write_config(tmp_path, "MEASURE"), "--window", "32"]
    environment = {**os.environ, "TGI_CACHE_DIR": str(model_cache)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("measure ..."):
            break
    time.sleep(0.2)  # somewhere in the middle
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130, rest
    assert "interrupted" in rest and "Traceback" not in rest
    assert earlier.read_text() == "{}" and not list(tmp_path.glob("backup*"))
