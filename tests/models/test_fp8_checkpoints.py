"""Checkpoints in FP8, each written as its tools write it, against an independent oracle; and quantising on loading."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from driving import Output, Tiny, make_request, make_tiny, random_prompts, run, start
from fp8_writing import (
    Rounding,
    by_row,
    by_square,
    by_tensor,
    make_oracle,
    prompt_scores,
    round_fp8,
    round_groups,
    round_rows,
    spread,
    write_fp8,
)
from ranks import PROMPT, logits_of_threads
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from text_generation_inference.engine.build import Engine
from text_generation_inference.errors import ModelFormatError, StartError
from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.runner.runner import Runner

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
SQUARES = {**FP8, "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
SCALES = {"q_proj": 0.02, "k_proj": 0.03, "v_proj": 0.01, "o_proj": 0.011, "gate_proj": 0.02, "up_proj": 0.025}


def compressed(weights: str, inputs: dict | None, **more: object) -> dict:
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**float8, "strategy": weights, "dynamic": False},
        "input_activations": None if inputs is None else {**float8, **inputs},
        "output_activations": None,
    }
    if weights == "block":
        group["weights"]["block_structure"] = [128, 128]
    groups = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "format": "float-quantized"}
    return {"quant_method": "compressed-tensors", "kv_cache_scheme": None, **groups, **more}


TOKEN = {"strategy": "token", "dynamic": True}
STATIC = {"strategy": "tensor", "dynamic": False}
GROUP = {"strategy": "group", "dynamic": True, "group_size": 128}


def scale_of(name: str) -> float:
    return SCALES.get(name.strip(".").rpartition(".")[2], 0.15)


def static(name: str) -> Rounding:
    """Parts of a fused matrix use the largest of their scales."""
    last = name.rpartition(".")[2]
    fused = next((f for f in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) if last in f), (last,))
    scale = max(scale_of(part) for part in fused)
    return lambda x: round_fp8(x, scale)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """All matrices are whole squares of 128, on four ranks too."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_hidden_layers": 2}
    return make_tiny("Llama", sizes, tmp_path_factory.mktemp("wide"))


def scores(engine: Engine, prompt: list[int]) -> Tensor:
    """As `fp8_writing.prompt_scores`, from our engine."""
    output = run(engine, [make_request(0, prompt, 1, decoder_input_details=True)])[0]
    return torch.tensor([output.prompt_logprobs[place] for place in range(1, len(prompt))])


def check(engine: Engine, oracle: PreTrainedModel, plain: PreTrainedModel) -> None:
    """Nearly the oracle: float32 sums in another order may round a value the other way now and then."""
    prompt = random_prompts(320, [120])[0]
    expected = prompt_scores(oracle, prompt)
    found = scores(engine, prompt)
    engine.close()
    noise = (expected - prompt_scores(plain, prompt)).abs().mean()
    assert noise > 0.01  # FP8 are visible
    assert (found - expected).abs().mean() < 0.1 * noise


def matrices(engine: Engine) -> list[object]:
    runner = engine.rank.runner
    assert isinstance(runner, Runner)
    layer = runner.model.model.layers[0]
    return [linear.weight for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)]


ROWS = lambda name: round_rows  # noqa: E731
FORMATS: dict[str, tuple[dict, Callable, Callable, dict]] = {
    "fp8-tensor": ({**FP8, "ignored_layers": ["lm_head"]}, by_tensor, ROWS, {}),
    "fp8-static": ({**FP8, "activation_scheme": "static"}, by_tensor, static, {"input_scale": scale_of}),
    "fp8-transformers": (
        {**FP8, "activation_scheme": "static", "weight_block_size": None},
        by_tensor,
        static,
        {"input_scale": scale_of, "scale_name": "weight_scale_inv", "input_scale_name": "activation_scale"},
    ),
    "compressed-channel": (compressed("channel", TOKEN), by_row, ROWS, {}),
    "compressed-tensor": (compressed("tensor", STATIC), by_tensor, static, {"input_scale": scale_of, "shape": (1,)}),
    "compressed-weights-only": (compressed("channel", None), by_row, lambda name: None, {}),
    "fbgemm": (FBGEMM, by_row, ROWS, {}),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("custom_kernels", [False, True], ids=["reference", "native"])
def test_formats(tiny_llama: Tiny, tmp_path: Path, name: str, custom_kernels: bool) -> None:
    config, quantize, rounding, writing = FORMATS[name]
    folder = write_fp8(tiny_llama, tmp_path, config, quantize, **writing)
    engine = start(folder, custom_kernels=custom_kernels)
    assert all(isinstance(matrix, Fp8Weight) for matrix in matrices(engine)) == (name != "compressed-weights-only")
    assert any("matrices in FP8, as the checkpoint has them" in note for note in engine.notes)
    check(engine, make_oracle(tiny_llama, quantize, rounding), tiny_llama.model)


@pytest.mark.parametrize("name", ["fp8", "compressed"])
def test_squares(wide: Tiny, tmp_path: Path, name: str) -> None:
    config = SQUARES if name == "fp8" else compressed("block", GROUP)
    scale_name = "weight_scale_inv" if name == "fp8" else "weight_scale"
    folder = write_fp8(wide, tmp_path, config, by_square, scale_name=scale_name)
    engine = start(folder)
    assert all(isinstance(matrix, Fp8Weight) and matrix.by_square for matrix in matrices(engine))
    check(engine, make_oracle(wide, by_square, lambda name: round_groups), wide.model)


def test_squares_of_latents(tmp_path: Path) -> None:
    """Rows that are rotated together trade places inside their squares; what heads make of latents is widened."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    }
    tiny = make_tiny("DeepseekV3", sizes, tmp_path / "plain")
    folder = write_fp8(tiny, tmp_path / "fp8", SQUARES, by_square, "weight_scale_inv")
    engine = start(folder)
    attention = engine.rank.runner.model.model.layers[0].attention
    stored = (attention.down, attention.q_up, attention.out, attention.kv_up)
    assert [isinstance(each.weight, Fp8Weight) for each in stored] == [True, True, True, False]
    oracle = make_oracle(tiny, by_square, lambda name: None if name.endswith("kv_b_proj") else round_groups)
    check(engine, oracle, tiny.model)
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
        noise = (tiny.model(torch.tensor([PROMPT])).logits[0] - expected).abs().mean()
    assert (logits_of_threads(folder, 2) - expected).abs().mean() < 0.1 * noise
    # The values of a head are half a square: every second of 4 ranks widens what it has of them.
    assert (logits_of_threads(folder, 4) - expected).abs().mean() < noise


def test_squares_that_do_not_line_up_are_widened(tmp_path: Path) -> None:
    """Rows of q, k, v end inside a square: only o and down stay in FP8, with a last square that is not whole."""
    tiny = make_tiny("Llama", {"hidden_size": 192, "intermediate_size": 320}, tmp_path / "plain")
    folder = write_fp8(tiny, tmp_path / "fp8", SQUARES, by_square, scale_name="weight_scale_inv")
    engine = start(folder)
    assert [isinstance(matrix, Fp8Weight) for matrix in matrices(engine)] == [False, True, False, True]
    stays = ("o_proj", "down_proj")
    check(engine, make_oracle(tiny, by_square, lambda n: round_groups if n.endswith(stays) else None), tiny.model)


def test_an_input_bound_is_honoured(tiny_llama: Tiny, tmp_path: Path) -> None:
    bound = 0.8
    folder = write_fp8(tiny_llama, tmp_path, {**FBGEMM, "activation_scale_ub": bound}, by_row)
    oracle = make_oracle(tiny_llama, by_row, lambda name: lambda x: round_rows(x.clamp(-bound, bound)))
    check(start(folder), oracle, make_oracle(tiny_llama, by_row, ROWS))


def test_what_is_ignored_stays_plain(tiny_llama: Tiny, tmp_path: Path) -> None:
    """By name, by pattern, and parts of a fused matrix that differ."""

    def keep(name: str) -> bool:
        return "layers.0.mlp" in name or "layers.1.self_attn.o_proj" in name or "layers.2.self_attn.k_proj" in name

    ignore = [
        "lm_head",
        r"re:model.layers\.0\.mlp",
        r"re:.*layers\.1\.self_attn\.o_.*",
        "model.layers.2.self_attn.k_proj",
    ]
    folder = write_fp8(tiny_llama, tmp_path, compressed("channel", TOKEN, ignore=ignore), by_row, keep=keep)

    def rounding(name: str) -> Rounding | None:
        is_widened = "layers.2.self_attn" in name and not name.endswith("o_proj")
        return None if is_widened else round_rows

    engine = start(folder)
    assert [isinstance(matrix, Fp8Weight) for matrix in matrices(engine)] == [True, True, False, False]
    check(engine, make_oracle(tiny_llama, by_row, rounding, keep), tiny_llama.model)


@pytest.mark.parametrize(
    "config",
    [
        {
            **FP8,
            "modules_to_not_convert": ["lm_head", "model.language_model.layers.0.mlp", r"^model\.layers\.1\..*o_proj$"],
        },
        compressed("channel", TOKEN, ignore=["lm_head", "model.language_model.layers.0.mlp.down_proj"]),
    ],
    ids=lambda config: config["quant_method"],
)
def test_what_is_stored_plainly_is_plain_whatever_lists_say(tiny_llama: Tiny, tmp_path: Path, config: dict) -> None:
    """They have the names that modules had where a model was quantised, or are matched in the ways of others."""

    def keep(name: str) -> bool:
        return "layers.0.mlp" in name or "layers.1.self_attn.o_proj" in name

    folder = write_fp8(tiny_llama, tmp_path, config, by_row, keep=keep)
    engine = start(folder)
    assert [isinstance(matrix, Fp8Weight) for matrix in matrices(engine)] == [True, True, False, False]
    check(engine, make_oracle(tiny_llama, by_row, ROWS, keep), tiny_llama.model)


def test_a_quantised_head_is_widened(tiny_llama: Tiny, tmp_path: Path) -> None:
    folder = write_fp8(
        tiny_llama,
        tmp_path,
        compressed("channel", TOKEN, ignore=[]),
        by_row,
        also=lambda name: name.startswith("lm_head"),
    )
    oracle = make_oracle(tiny_llama, by_row, ROWS)
    data, scale = by_row(oracle.lm_head.weight.data)
    oracle.lm_head.weight.data = data.float() * scale
    check(start(folder), oracle, tiny_llama.model)


def test_biases(tmp_path: Path) -> None:
    tiny = make_tiny("Llama", {"attention_bias": True, "mlp_bias": True}, tmp_path / "plain")
    folder = write_fp8(tiny, tmp_path / "fp8", FP8, by_tensor)
    check(start(folder), make_oracle(tiny, by_tensor, ROWS), tiny.model)


# -- ranks ---------------------------------------------------------------------------------------------------------


def rank_rounding(name: str, world: int) -> Rounding:
    """Each rank quantises its own part of what o and down read."""
    return lambda x: round_rows(x, world if name.endswith(("o_proj", "down_proj")) else 1)


@pytest.mark.parametrize(
    ("config", "quantize", "rounding", "writing"),
    [
        (SQUARES, by_square, lambda name, _: round_groups, {"scale_name": "weight_scale_inv"}),
        (compressed("channel", TOKEN), by_row, rank_rounding, {}),
        (
            compressed("tensor", STATIC),
            by_tensor,
            lambda name, _: static(name),
            {"input_scale": scale_of, "shape": (1,)},
        ),
    ],
    ids=["squares", "rows", "tensor"],
)
def test_ranks(wide: Tiny, tmp_path: Path, config: dict, quantize: Callable, rounding: Callable, writing: dict) -> None:
    folder = write_fp8(wide, tmp_path, config, quantize, **writing)
    for world in (2, 4):
        with torch.no_grad():
            oracle = make_oracle(wide, quantize, lambda name, world=world: rounding(name, world))
            expected = oracle(torch.tensor([PROMPT])).logits[0]
            noise = (wide.model(torch.tensor([PROMPT])).logits[0] - expected).abs().mean()
        assert (logits_of_threads(folder, world) - expected).abs().mean() < 0.1 * noise


# -- quantising on loading ------------------------------------------------------------------------------------------


def outputs(folder: Path, **settings: object) -> list[Output]:
    engine = start(folder, **settings)
    requests = [make_request(n, prompt, 12) for n, prompt in enumerate(random_prompts(320, [3, 17, 40]))]
    found = run(engine, requests)
    engine.close()
    return found


def test_quantising_on_loading_equals_a_checkpoint(tiny_llama: Tiny, tmp_path: Path) -> None:
    """The matrix that is kept as it is, the last one before the head, is so in the checkpoint too."""
    fields = json.loads((tiny_llama.folder / "config.json").read_text())
    last = f"model.layers.{fields['num_hidden_layers'] - 1}.mlp.down_proj"
    config = {**compressed("channel", TOKEN), "ignore": ["lm_head", last]}
    folder = write_fp8(tiny_llama, tmp_path, config, by_row, keep=lambda name: name.startswith(last))
    expected = outputs(folder)
    assert outputs(tiny_llama.folder, quantize="fp8", dtype=None) == expected
    assert outputs(folder, quantize="fp8", dtype=None) == expected
    assert outputs(folder, quantize="compressed-tensors", dtype=None) == expected
    assert outputs(tiny_llama.folder) != expected


def test_quantising_on_loading_reads_one_matrix_at_a_time(tiny_llama: Tiny) -> None:
    engine = start(tiny_llama.folder, quantize="fp8", dtype=None)
    assert any("matrices in FP8, quantised on loading" in note for note in engine.notes)
    for matrix in matrices(engine):
        assert isinstance(matrix, Fp8Weight)
        assert matrix.data.dtype is torch.float8_e4m3fn and matrix.scale.dtype is torch.float32
        assert matrix.scale.shape == matrix.data.shape[:1]
    engine.close()


@pytest.mark.parametrize("config", [None, SQUARES, {**FP8, "activation_scheme": "static"}], ids=str)
def test_dummy_weights(wide: Tiny, tmp_path: Path, config: dict | None) -> None:
    fields = json.loads((wide.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    engine = start(tmp_path, load_format="dummy", quantize="fp8", dtype=None)
    found = matrices(engine)
    assert all(isinstance(m, Fp8Weight) and m.by_square == (config is SQUARES) for m in found)
    output = run(engine, [make_request(0, [1, 2, 3], 4)])[0]
    assert len(output.token_ids) == 4 and all(logprob < 0 for logprob in output.logprobs)
    engine.close()


def test_the_wrong_setting_for_a_checkpoint(tiny_llama: Tiny, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="`quantize` compressed-tensors is for checkpoints that say so"):
        start(tiny_llama.folder, quantize="compressed-tensors", dtype=None)


# -- checkpoints that are wrong -------------------------------------------------------------------------------------

DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({f"{DOWN}.weight_scale": None}, f"lacks the tensor {DOWN}.weight_scale"),
        ({f"{DOWN}.input_scale": None}, f"lacks the tensor {DOWN}.input_scale"),
        ({f"{DOWN}.weight_scale": torch.ones(3)}, f"tensor {DOWN}.weight_scale in"),
        ({f"{DOWN}.weight_scale": torch.ones((), dtype=torch.int8)}, "has type int8, but scales are float32"),
        ({f"{DOWN}.weight_scale": torch.tensor(torch.nan)}, "holds a scale that is not finite"),
        ({f"{DOWN}.weight_scale": torch.tensor(0.0)}, f"tensor {DOWN}.weight_scale in"),
        ({f"{DOWN}.weight_scale": torch.arange(64.0)[:, None] - 1}, "must hold scales above 0"),
        ({f"{DOWN}.input_scale": torch.tensor(0.0)}, "must be one number above 0"),
        ({f"{DOWN}.weight": torch.ones(64, 96)}, f"tensor {DOWN}.weight in"),
        ({f"{DOWN}.weight": torch.ones(64, 96).to(torch.float8_e5m2)}, "has type float8_e5m2, config.json makes it"),
        ({f"{DOWN}.weight": torch.ones(32, 96).to(torch.float8_e4m3fn)}, "config.json makes it [64, 96]"),
        ({f"{DOWN}.weight_zero_point": torch.ones(())}, f"does not use: {DOWN}.weight_zero_point"),
        ({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, "tensor model.norm.weight in"),
        ({"model.norm.weight": torch.ones(64, dtype=torch.int8)}, "has type int8"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor(1.0)}, "lacks the tensor model.layers.0.self_attn.v_scale"),
        ({f"model.layers.0.self_attn.{side}_scale": torch.ones(4) for side in "kv"}, "has shape [4]"),
        ({f"model.layers.0.self_attn.{side}_scale": torch.tensor(-1.0) for side in "kv"}, "must be one number above 0"),
    ],
    ids=str,
)
def test_wrong_tensors_are_named(tiny_llama: Tiny, tmp_path: Path, change: dict, text: str) -> None:
    config = {**FP8, "activation_scheme": "static"}
    write_fp8(tiny_llama, tmp_path, config, by_tensor, input_scale=scale_of)
    tensors = {**load_file(tmp_path / "model.safetensors"), **change}
    save_file({n: t for n, t in tensors.items() if t is not None}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFormatError) as caught:
        start(tmp_path)
    assert text in str(caught.value)


def test_fp8_without_a_word_in_the_config(tiny_llama: Tiny, tmp_path: Path) -> None:
    write_fp8(tiny_llama, tmp_path, {}, by_row)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if not name.endswith("scale")}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFormatError, match="is stored in FP8, but config.json does not say"):
        start(tmp_path)


def test_squares_of_the_oracle() -> None:
    """The oracle's own arithmetic, by hand."""
    weight = torch.zeros(130, 129)
    weight[129, 128], weight[0, 0] = 448.0, 2 * 448.0
    _, scale = by_square(weight)
    assert scale[0, 0] == 2 and scale[1, 1] == 1
    assert spread(scale, weight.shape)[129, 128] == 1
