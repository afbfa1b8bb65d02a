"""Checkpoints of bitsandbytes against what the library makes of them, and its formats and EETQ made on loading."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from damage import damage, matrix_of
from driving import Tiny, make_tiny, start
from gptq_writing import load_matrices
from hypothesis import given, settings
from hypothesis import strategies as st
from library_checkpoints import (
    DATA,
    check_tokens,
    check_values,
    expected_digests,
    library_tensors,
    oracle,
    read_matrices,
    whole_checkpoint,
    write_folder,
)
from ranks import PROMPT, check_ranks, logits_of_threads
from safetensors.torch import load_file
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.models.model import Context
from text_generation_inference.models.registry import build, read_config, read_quantization
from text_generation_inference.quant.bitsandbytes_codes import TABLES, round_scales
from text_generation_inference.quant.choose import ON_LOADING, assign_methods, choose_quantization, name_quantization
from text_generation_inference.quant.low_bit import LowBitOnLoading
from text_generation_inference.quant.method import Matrix
from text_generation_inference.weights.load import load_dummy

pytestmark = pytest.mark.usefixtures("one_thread")

ON_LOADING_HERE = ["bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "eetq"]
K = "model.layers.0.self_attn.k_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    return load_file(DATA / "plain" / "model.safetensors")


@pytest.mark.parametrize("name", ["nf4", "fp4", "int8"])
def test_checkpoints_of_the_library(name: str, tmp_path: Path) -> None:
    folder = whole_checkpoint(name, tmp_path)
    matrices, held = read_matrices(folder)
    assert held == set(expected_digests()[name])
    check_values(name, matrices)
    model = oracle(folder, matrices)
    check_tokens(folder, model, custom_kernels=name != "fp4")
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    check_ranks(folder, logits)


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_a_config_from_when_methods_had_no_names(name: str, tmp_path: Path) -> None:
    folder = whole_checkpoint(name, tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    assert fields["quantization_config"].pop("quant_method") == "bitsandbytes"
    (folder / "config.json").write_text(json.dumps(fields))
    assert name_quantization(fields) == f"bitsandbytes, {8 if name == 'int8' else 4} bits"
    matrices, held = read_matrices(folder)
    assert held == set(expected_digests()[name])
    check_values(name, matrices)


@pytest.mark.parametrize("name", ON_LOADING_HERE)
def test_on_loading(name: str, plain: dict[str, Tensor]) -> None:
    matrices, held = read_matrices(DATA / "plain", name)
    assert held == {key for key in plain if key.endswith("_proj.weight")}
    if name != "eetq":  # which has no library here
        check_values(name, matrices)
    assert torch.equal(matrices["model.embed_tokens.weight"], plain["model.embed_tokens.weight"].float())
    check_tokens(DATA / "plain", oracle(DATA / "plain", matrices), quantize=name, dtype=None)


@pytest.mark.parametrize("name", ON_LOADING_HERE)
def test_ranks_have_the_codes_of_one(name: str) -> None:
    check_ranks(DATA / "plain", logits_of_threads(DATA / "plain", 1, name), quantize=name)


def test_eetq() -> None:
    """The largest value of a row is 128 steps, codes reach 127; halves go away from 0; small rows keep their values."""
    quantization = ON_LOADING["eetq"]
    assert isinstance(quantization, LowBitOnLoading)
    weight = torch.tensor([[128.0, -128.0, 2.5, -2.5, 0.49], [0, 0, 0, 0, 0], [1.28e-6, 1e-8, 0, 0, 0]])
    made = quantization.scheme.quantize(weight)
    assert (made.codes.int() - 128).tolist() == [[127, -128, 3, -3, 0], [0] * 5, [127, 1, 0, 0, 0]]
    assert low_bit.dequantize(made)[:2].tolist() == [[127, -128, 3, -3, 0], [0] * 5]
    assert low_bit.dequantize(made)[2, 0].item() == pytest.approx(1.27e-6)
    made = quantization.scheme.quantize(torch.tensor([[1.0, 0.3]]) / 3)
    assert made.scale.item() == (torch.tensor(1.0) / 3 / 128).half().item()


def test_random_weights_are_held_so_too() -> None:
    for name, quantize in (("nf4", None), ("int8", None), ("plain", "eetq")):
        config = read_config(DATA / name)
        model = build(config, Context())
        assign_methods(model, choose_quantization(quantize, read_quantization(config)))
        load_dummy(model, torch.float32, torch.device("cpu"), 0)
        matrices = [module for _, module in model.walk() if isinstance(module, Matrix)]
        assert all(isinstance(matrix.weight, LowBitWeight) == matrix.may_round for matrix in matrices)


# -- written here ----------------------------------------------------------------------------------------------------


def write_4bit(
    name: str,
    value: Tensor,
    kind: str = "nf4",
    block: int = 64,
    nested: bool = True,
    storage: torch.dtype = torch.uint8,
) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix as the library stores it, with tables of our own; and what it stands for."""
    flat, table = value.reshape(-1), torch.tensor(TABLES[kind]) * 0.95
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    scale = blocks.abs().amax(1)
    state = {"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": list(value.shape)}
    tensors = {f"{name}.quant_map": table}
    if nested:
        steps, largest = torch.linspace(-1, 1, 256), torch.full((-(-len(scale) // 256),), 0.25)
        codes = (scale[:, None] - 0.25).div(0.25)[..., None].sub(steps).abs().argmin(-1).view(-1).to(torch.uint8)
        scale = steps[codes.int()] * 0.25 + 0.25
        tensors.update({f"{name}.absmax": codes, f"{name}.nested_absmax": largest, f"{name}.nested_quant_map": steps})
        state.update(nested_blocksize=256, nested_dtype="float32", nested_offset=0.25)
    else:
        tensors[f"{name}.absmax"] = scale
    codes = (blocks / scale[:, None])[..., None].sub(table).abs().argmin(-1).to(torch.uint8)
    values = (table[codes.int()] * scale[:, None]).view(-1)[: len(flat)].view(value.shape)
    codes = codes.view(-1)[: len(flat) + len(flat) % 2]
    tensors[name] = (codes[0::2] << 4 | codes[1::2]).view(storage)[:, None]
    tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    return tensors, values


def write_model(tiny: Tiny, folder: Path, **how: object) -> tuple[Path, dict[str, Tensor]]:
    """All matrices but the router's and the head's; those of a Conv1D turned round, as the library does."""
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, value in load_file(tiny.folder / "model.safetensors").items():
        if value.ndim != 2 or not name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight", *turned)):
            tensors[name] = value
            continue
        is_turned = name.endswith(turned)
        made, dense = write_4bit(name, value.t() if is_turned else value, **how)  # pyright: ignore[reportArgumentType]
        tensors.update(made)
        values[name] = dense.t() if is_turned else dense
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = {**json.loads((tiny.folder / "config.json").read_text()), "quantization_config": section}
    return write_folder(folder, config, tensors), values


@pytest.mark.parametrize(
    ("how", "held"),
    [
        ({"block": 64}, {"gate_proj", "up_proj", "q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"block": 128, "nested": False, "storage": torch.float32, "kind": "fp4"}, {"gate_proj"}),
        ({"block": 32, "storage": torch.int16}, {"o_proj"}),
    ],
    ids=["64", "128", "32"],
)
def test_blocks_that_rows_do_not_hold(tmp_path: Path, how: dict, held: set[str]) -> None:
    """Rows of 72 have no groups worth it: that matrix is widened, with the same values; rows of 64 in blocks of 128 have."""
    tiny = make_tiny("Llama", {"intermediate_size": 72, "num_hidden_layers": 1}, tmp_path / "plain")
    folder, values = write_model(tiny, tmp_path / "bnb", **how)
    matrices, found = read_matrices(folder)
    assert held <= {name.split(".")[-2] for name in found} and not any("down_proj" in name for name in found)
    for name, value in values.items():
        assert torch.equal(matrices[name], value), name
    with torch.no_grad():
        logits = oracle(folder, matrices)(torch.tensor([PROMPT])).logits[0]
    check_ranks(folder, logits)


@pytest.mark.parametrize("family", ["Mixtral", "GPT2LMHeadModel"])
def test_families(family: str, tmp_path: Path) -> None:
    """A tensor for each expert; and matrices that a plain checkpoint has the other way round."""
    sizes = {"intermediate_size": 64, "num_hidden_layers": 1} if family == "Mixtral" else {"n_layer": 1}
    tiny = make_tiny(family, sizes, tmp_path / "plain")
    folder, values = write_model(tiny, tmp_path / "bnb")
    matrices, held = read_matrices(folder)
    assert values and held == set(values)
    for name, value in values.items():
        assert torch.equal(matrices[name], value), name
    tensors = {
        **load_file(tiny.folder / "model.safetensors"),
        **{key: each.contiguous() for key, each in values.items()},
    }
    write_folder(tmp_path / "wide", json.loads((tiny.folder / "config.json").read_text()), tensors)
    model = type(tiny.model).from_pretrained(tmp_path / "wide").eval().float()
    check_tokens(folder, model)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    check_ranks(folder, logits)


def state(**fields: object) -> Tensor:
    whole = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [32, 64]}
    nested = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}
    return torch.tensor(list(json.dumps({**whole, **nested, **fields}).encode()), dtype=torch.uint8)


STATE = f"{K}.weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({STATE: None}, f"lacks the tensor {STATE}"),
        ({STATE: torch.tensor([123, 255], dtype=torch.uint8)}, f"tensor {STATE} in .* must be JSON"),
        ({STATE: torch.tensor([91, 93], dtype=torch.uint8)}, f"tensor {STATE} in .* must be a JSON object"),
        ({STATE: torch.ones(4)}, f"tensor {STATE} in .* has type float32, config.json makes it uint8"),
        ({STATE: state(blocksize=48)}, f"tensor {STATE} in .* says `blocksize` '48'"),
        ({STATE: state(blocksize=64.0)}, f"tensor {STATE} in .* says `blocksize` '64.0'"),
        ({STATE: state(blocksize=128)}, f"tensor {STATE} in .* says `blocksize` 128, but .*absmax has 32 scales"),
        ({STATE: state(shape=[64, 32])}, rf"tensor {STATE} in .* says `shape` \[64, 32\]"),
        ({STATE: state(shape=None)}, f"tensor {STATE} in .* says `shape` 'None'"),
        ({STATE: state(quant_type="fp4")}, f"tensor {STATE} in .* says `quant_type` 'fp4'"),
        ({STATE: state(nested_offset="x")}, f"tensor {STATE} in .* says `nested_offset` 'x'"),
        ({STATE: state(nested_offset=math.inf)}, f"tensor {STATE} in .* says `nested_offset` 'inf'"),
        ({STATE: state(nested_offset=10**400)}, f"tensor {STATE} in .* says `nested_offset` '1000"),
        ({STATE: torch.full((1 << 17,), 32, dtype=torch.uint8)}, f"tensor {STATE} in .* has more than 65536 bytes"),
        ({STATE: state(nested_blocksize=64)}, f"tensor {STATE} in .* says `nested_blocksize` '64'"),
        ({f"{K}.weight": torch.zeros(5, 1, dtype=torch.uint8)}, rf"tensor {K}.weight in .* has shape \[5, 1\]"),
        ({f"{K}.weight": torch.zeros(1024, 1, dtype=torch.int16)}, f"tensor {K}.weight in .* has type int16"),
        ({f"{K}.weight.absmax": torch.zeros(31, dtype=torch.uint8)}, rf"tensor {K}.weight.absmax in .* has shape \[31\]"),
        ({f"{K}.weight.absmax": torch.zeros(32)}, f"tensor {K}.weight.absmax in .* has type float32, config.json makes it uint8"),
        ({f"{K}.weight.quant_map": None}, f"lacks the tensor {K}.weight.quant_map"),
        ({f"{K}.weight.quant_map": torch.full((16,), torch.nan)}, f"tensor {K}.weight.quant_map in .* not finite"),
        ({f"{K}.weight.nested_quant_map": torch.zeros(16)}, f"tensor {K}.weight.nested_quant_map in .* has shape"),
        ({f"{K}.weight.nested_absmax": torch.zeros(2)}, f"tensor {K}.weight.nested_absmax in .* has shape"),
        ({f"{K}.weight.absmax": None}, f"does not use: {K}.weight.nested_absmax|tensor {K}.weight in .* has shape"),
        ({f"{K}.SCB": torch.zeros(32)}, f"tensor {K}.weight in .* has shape"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_tensors_are_named(tmp_path: Path, change: dict[str, Tensor | None], text: str) -> None:
    with pytest.raises(ModelFormatError, match=text):
        start(whole_checkpoint("nf4", tmp_path, change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({f"{DOWN}.SCB": None}, f"tensor {DOWN}.weight in .* has type int8"),
        ({f"{DOWN}.SCB": torch.zeros(3)}, rf"tensor {DOWN}.SCB in .* has shape \[3\]"),
        ({f"{DOWN}.weight_format": torch.tensor(2, dtype=torch.uint8)}, f"tensor {DOWN}.weight_format in .* order"),
        (
            {f"{DOWN}.weight": torch.zeros(64, 160)},
            f"tensor {DOWN}.weight in .* has type float32, config.json makes it int8",
        ),
    ],
    ids=str,
)
def test_wrong_tensors_of_8_bits_are_named(tmp_path: Path, change: dict[str, Tensor | None], text: str) -> None:
    if change.get(f"{DOWN}.SCB", 0) is None:
        change = {**change, f"{DOWN}.weight_format": None}
    with pytest.raises(ModelFormatError, match=text):
        start(whole_checkpoint("int8", tmp_path, change))


_SCALES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB")


@pytest.mark.parametrize("name", ["nf4", "fp4", "int8"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_damaged_files_are_named(name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tensors, metadata = library_tensors(name)
    scales = tuple(each for each in _SCALES if each != ".absmax" or name != "nf4")  # whose scales are codes
    damaged, rank = damage(tensors, ("_proj.weight", f".bitsandbytes__{name}", *_SCALES), scales, data)
    folder = write_folder(
        tmp_path_factory.getbasetemp() / "damaged",
        json.loads((DATA / name / "config.json").read_text()),
        tensors,
        metadata,
    )
    with pytest.raises(ModelFormatError, match=re.escape(matrix_of(damaged))):
        load_matrices(folder, *rank)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_words_that_are_damaged_are_read_or_named(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tensors, metadata = library_tensors("nf4")
    words = tensors[STATE].clone()
    place = data.draw(st.integers(0, len(words) - 1))
    words[place] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.getbasetemp() / "damaged"
    write_folder(folder, json.loads((DATA / "nf4" / "config.json").read_text()), {**tensors, STATE: words}, metadata)
    try:
        load_matrices(folder)
    except ModelFormatError as error:
        assert K in str(error)


def test_parts_with_tables_of_their_own_are_widened(tmp_path: Path) -> None:
    table = torch.linspace(-1, 1, 16)
    folder = whole_checkpoint("nf4", tmp_path, {f"{K}.weight.quant_map": table})
    matrices, held = read_matrices(folder)
    before = read_matrices(whole_checkpoint("nf4", tmp_path / "before"))[0]
    assert f"{K}.weight" not in held and f"{DOWN}.weight" in held
    (changed,) = (name for name, value in matrices.items() if not torch.equal(value, before[name]))
    assert changed == f"{K}.weight"


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_half_way_goes_to_the_lower_value(kind: str) -> None:
    quantization = ON_LOADING[f"bitsandbytes-{kind}"]
    assert isinstance(quantization, LowBitOnLoading)
    values = torch.tensor(TABLES[kind]).sort().values
    block = torch.cat([values, (values[1:] + values[:-1]) / 2]).repeat(3)[:64][None]
    found = low_bit.dequantize(quantization.scheme.quantize(block))
    assert torch.equal(found, torch.cat([values, values[:-1]]).repeat(3)[:64][None])


def test_scales_of_scales_stay_near() -> None:
    scale = torch.rand(700) + 0.5
    assert (round_scales(scale) - scale).abs().max() < 0.01
    assert torch.equal(round_scales(torch.zeros(3)), torch.zeros(3))
    assert library_tensors("nf4")[0][f"{K}.weight.absmax"].dtype is torch.uint8
