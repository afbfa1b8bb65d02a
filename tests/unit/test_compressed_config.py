"""What config.json of a compressed-tensors checkpoint says: schemes, names in their order, and what is refused."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.quant.choose import detect
from text_generation_inference.quant.compressed_tensors import CompressedTensors
from text_generation_inference.quant.fp4 import MXFP4, NVFP4, StoredFp4
from text_generation_inference.quant.fp8 import Fp8Scheme
from text_generation_inference.quant.integers import Integers, StoredIntegers, unpack

FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKEN = {**FLOAT8, "strategy": "token", "dynamic": True}
INT8 = {**FLOAT8, "type": "int"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MX4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
ROWS = {**TOKEN, "type": "int"}


def compressed(weights: dict | None = FLOAT8, inputs: dict | None = None, **more: object) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}, "ignore": ["lm_head"], **more}


def read(config: dict) -> CompressedTensors:
    found = detect({"quantization_config": config}, "config.json")
    assert isinstance(found, CompressedTensors)
    return found


def scheme(config: dict) -> object:
    found = read(config).scheme_of("model.layers.0.mlp.up_proj")
    return found.stored if isinstance(found, StoredIntegers | StoredFp4) else found


@pytest.mark.parametrize(
    ("weights", "inputs", "format", "expected"),
    [
        (FLOAT8, TOKEN, "float-quantized", Fp8Scheme()),
        (FLOAT8, None, "naive-quantized", Fp8Scheme(quantizes_inputs=False)),
        (INT4, None, "pack-quantized", Integers(4, True, "group", 32)),
        (INT4, None, None, Integers(4, True, "group", 32)),
        ({**INT4, "strategy": None}, None, None, Integers(4, True, "group", 32)),
        ({**INT4, "strategy": None, "group_size": -1}, None, None, Integers(4, True, "channel")),
        ({**INT4, "symmetric": False}, None, "pack-quantized", Integers(4, True, "group", 32, False)),
        ({**INT4, "actorder": "weight"}, None, "pack-quantized", Integers(4, True, "group", 32)),
        ({**INT4, "actorder": "static"}, None, "pack-quantized", Integers(4, True, "group", 32)),
        ({**INT4, "actorder": "group"}, None, None, Integers(4, True, "group", 32, has_group_index=True)),
        ({**INT4, "actorder": "dynamic"}, None, None, Integers(4, True, "group", 32, has_group_index=True)),
        ({**INT4, "actorder": True}, None, None, Integers(4, True, "group", 32, has_group_index=True)),
        (INT8, None, "pack-quantized", Integers(8, True, "channel")),
        (INT8, None, "int-quantized", Integers(8, False, "channel")),
        (INT8, ROWS, None, Integers(8, False, "channel", inputs="dynamic", has_input_scales=True)),
        (INT8, INT8 | {"strategy": "tensor"}, "int-quantized", Integers(8, False, "channel", None, True, False, "static", has_input_scales=True)),
        (INT8, INT8 | {"strategy": "tensor", "symmetric": False}, None, Integers(8, False, "channel", None, True, False, "dynamic", has_input_scales=True)),
        (INT4, ROWS, None, Integers(4, False, "group", 32, drops_inputs=True, has_input_scales=True)),
        (INT4, TOKEN, "pack-quantized", Integers(4, True, "group", 32, drops_inputs=True, has_input_scales=True)),
        (FP4, {**FP4, "dynamic": "local"}, "nvfp4-pack-quantized", NVFP4),
        (FP4, None, None, NVFP4),
        (MX4, {**MX4, "dynamic": True}, "mxfp4-pack-quantized", MXFP4),
        (None, None, None, None),
    ],
    ids=str,
)  # fmt: skip
def test_schemes(weights: dict, inputs: dict | None, format: str | None, expected: object) -> None:
    assert scheme(compressed(weights, inputs, format=format)) == expected
    grouped = compressed(weights, inputs, format="mixed-precision")
    grouped["config_groups"]["g"]["format"] = format
    assert scheme(grouped) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("W4A16", Integers(4, True, "group", 128)),
        ("w4a16_asym", Integers(4, True, "group", 128, is_symmetric=False)),
        ("W8A16", Integers(8, True, "group", 128)),
        ("W8A8", Integers(8, False, "channel", inputs="dynamic", has_input_scales=True)),
        ("W4A8", Integers(4, False, "group", 128, drops_inputs=True, has_input_scales=True)),
        ("FP8_DYNAMIC", Fp8Scheme()),
        ("FP8_BLOCK", Fp8Scheme(by_square=True)),
        ("FP8", Fp8Scheme(input_scale_name="input_scale")),
        ("NVFP4", NVFP4),
        ("MXFP4A16", MXFP4),
        ("UNQUANTIZED", None),
    ],
)
def test_schemes_that_have_a_name(name: str, expected: object) -> None:
    assert scheme({"quant_method": "compressed-tensors", "config_groups": {name: ["Linear"]}}) == expected


def test_members_that_say_nothing() -> None:
    nothing = {"transform_config": {"config_groups": {}}, "sparsity_config": {}, "moe_sparsity_config": None}
    assert read(compressed(INT4, **nothing)) == read(compressed(INT4))


def test_what_is_done_otherwise_is_said() -> None:
    assert read(compressed(INT4, ROWS)).description == (
        "matrices in integers of 4 bits, as the checkpoint has them (compressed-tensors); inputs stay in the type of the"
        " model, which is more precise than what it says of them"
    )
    assert read(compressed(INT8, ROWS)).description == (
        "matrices in integers of 8 bits with inputs in 8 bits, as the checkpoint has them (compressed-tensors)"
    )
    assert "matrices in NVFP4, as" in read(compressed(FP4, None)).description
    assert "; inputs stay" in read(compressed(FP4, {**FP4, "dynamic": "local"})).description
    assert read(compressed()).needs_fp8 and not read(compressed(INT4)).needs_fp8


# -- names -----------------------------------------------------------------------------------------------------------


def groups(*pairs: tuple[str, int], ignore: tuple[str, ...] = ()) -> CompressedTensors:
    """A group for each target, told apart by the size of its groups."""
    made = {
        str(n): {"targets": [target], "weights": {**INT4, "group_size": size}} for n, (target, size) in enumerate(pairs)
    }
    return read({"quant_method": "compressed-tensors", "config_groups": made, "ignore": list(ignore)})


def size_of(found: CompressedTensors, name: str, kind: str = "Linear") -> int | None:
    scheme = found.scheme_of(name, kind)
    return scheme.stored.group_size if isinstance(scheme, StoredIntegers) else None


def test_a_whole_name_comes_before_an_expression_before_a_class() -> None:
    found = groups(("Linear", 1), ("re:.*proj", 2), ("model.q_proj", 3))
    assert [size_of(found, name) for name in ("model.q_proj", "model.k_proj", "lm_head")] == [3, 2, 1]
    found = groups(("re:.*q_proj", 2), ("re:.*[kq]_proj", 5))  # of expressions the first in the alphabet
    assert [size_of(found, name) for name in ("model.q_proj", "model.k_proj")] == [5, 5]
    assert size_of(groups(("Linear", 1), ("Linear", 2)), "model.q_proj") == 2  # the last of the same words


def test_only_the_whole_name_counts() -> None:
    found = groups(("Linear", 1), ignore=("lm_head", "model.layers.1.mlp", r"re:.*self_attn\.[qk]_proj", "re:head"))
    for name in ("lm_head", "model.layers.7.self_attn.k_proj", "head.proj"):
        assert size_of(found, name) is None
    for name in ("model.layers.1.mlp.up_proj", "model.lm_head", "model.layers.1.self_attn.v_proj", "model.head"):
        assert size_of(found, name) == 1


def test_classes() -> None:
    assert size_of(groups(("Linear", 1)), "model.embed_tokens", "Embedding") is None
    assert size_of(groups(("Embedding", 1)), "model.embed_tokens", "Embedding") == 1
    assert size_of(groups(("Embedding", 1)), "model.q_proj") is None
    assert size_of(groups(("re:.*q_proj", 1), ignore=("Linear",)), "model.q_proj") is None


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "compressed-tensors"}, "config_groups must be an object"),
        (compressed({**FLOAT8, "num_bits": 16}), "g.weights: `num_bits` 16 is not supported, 8 is"),
        (compressed({**INT4, "num_bits": 9}), "g.weights: `num_bits` 9 is not supported, 1 to 8 is"),
        (compressed({**INT4, "num_bits": True}), "`num_bits` must be an integer, it is True"),
        (compressed({**FLOAT8, "type": "real"}), "`type` 'real' is not supported, int or float is"),
        (compressed({**FLOAT8, "strategy": "group"}), "`strategy` 'group' is not supported"),
        (compressed({**INT8, "strategy": "block"}), "`strategy` 'block' is not supported, tensor or channel or group"),
        (compressed({**INT4, "group_size": 0}), "`group_size` 0 is not supported"),
        (compressed({**INT4, "group_size": 1 << 31}), "`group_size` 2147483648 is not supported"),
        (compressed({**INT4, "actorder": "odd"}), "`actorder` 'odd' is not supported"),
        (compressed({**INT4, "dynamic": True}), "`dynamic` True is not supported"),
        (compressed({**FLOAT8, "symmetric": False}), "`symmetric` False is not supported"),
        (compressed({**FP4, "symmetric": False}), "`symmetric` False is not supported"),
        (compressed({**FP4, "group_size": 32}), "`group_size` 32 is not supported, with `strategy` tensor_group, 16"),
        (compressed(MX4, format="nvfp4-pack-quantized"), "`group_size` 32 is not supported, with `format` nvfp4"),
        (compressed(FP4, format="pack-quantized"), "`group_size` 16 is not supported, with `format` pack-quantized"),
        (compressed(INT4, format="mxfp4-pack-quantized"), "`type` 'int' is not supported, with `format` mxfp4"),
        (compressed(INT4, format="float-quantized"), "`type` 'int' is not supported, with `format` float-quantized"),
        (compressed({**FLOAT8, "strategy": "block", "block_structure": [64, 64]}), "`block_structure` [64, 64]"),
        (compressed(inputs={**FLOAT8, "strategy": "token"}), "input_activations: `strategy` 'token' is not supported"),
        (compressed(inputs={**TOKEN, "num_bits": 16}), "`num_bits` 16 is not supported"),
        (compressed(INT8, {**ROWS, "dynamic": False}), "input_activations: `strategy` 'token' is not supported, tensor"),
        (compressed(INT8, {**ROWS, "num_bits": 16}), "input_activations: `num_bits` 16 is not supported, 4 or 8"),
        (compressed(ignore=["re:("]), "`ignore` has 're:(': it is no pattern"),
        (compressed(kv_cache_scheme={**FLOAT8, "num_bits": 4}), "kv_cache_scheme: `num_bits` 4 is not supported"),
        (compressed(kv_cache_scheme={**FLOAT8, "strategy": "attn_head"}), "kv_cache_scheme: `strategy` 'attn_head'"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "`format` 'sparse-24-bitmask' is not supported"),
        (compressed(format="marlin-24"), "`format` 'marlin-24' is not supported, (it leaves out half of the values"),
        (compressed(format="dense"), "`format` 'dense' is not supported"),
        (compressed(format="new"), "`format` 'new' is not supported"),
        (compressed(quantization_status="initialized"), "`quantization_status` 'initialized' is not supported"),
        (compressed(transform_config={"config_groups": {"a": 1}}), "`transform_config` {'config_groups': {'a': 1}} is not"),
        ({"quant_method": "compressed-tensors", "config_groups": {"W4A5": ["Linear"]}}, "config_groups: `W4A5` ['Linear'"),
        ({"quant_method": "compressed-tensors", "config_groups": {"W4A16": [3]}}, "`targets` must be a list of names"),
        ({"quant_method": "compressed-tensors", "config_groups": {"W4A16": 3}}, "W4A16 must be an object"),
    ],
    ids=lambda value: str(value)[-60:],
)  # fmt: skip
def test_what_is_refused(config: dict, text: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        detect({"quantization_config": config}, "config.json")
    assert text in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.sampled_from(["", "group", "re:(", "int", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["weights", "dynamic"]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
FIELDS = ["config_groups", "ignore", "format", "quantization_status", "sparsity_config", "kv_cache_scheme", "transform_config"]  # fmt: skip
ARGUMENTS = ["num_bits", "type", "strategy", "group_size", "symmetric", "dynamic", "actorder", "block_structure"]


@given(st.sampled_from([FLOAT8, INT8, INT4, FP4, MX4]), st.sampled_from([None, ROWS, TOKEN, FP4]), st.data())
def test_odd_values_are_read_or_named(weights: dict, inputs: dict | None, data: st.DataObject) -> None:
    """Whatever stands in a field: it is refused by its name, or the config means something."""
    config = json.loads(json.dumps(compressed(weights, inputs, kv_cache_scheme=None)))
    group = config["config_groups"]["g"]
    places = [config, group, group["weights"], *([group["input_activations"]] if inputs else [])]
    place = data.draw(st.integers(0, len(places) - 1))
    names = [FIELDS, ["targets", "weights", "input_activations", "format"], ARGUMENTS, ARGUMENTS][place]
    name = data.draw(st.sampled_from(names))
    places[place][name] = data.draw(JSON)
    try:
        found = detect({"quantization_config": config}, "config.json")
    except ModelFormatError as error:
        named = re.findall(r"`(\w+)`|\.(\w+) must be", str(error))
        assert named and str(error).startswith("config.json: `quantization_config`")
    else:
        assert isinstance(found, CompressedTensors)
        found.scheme_of("model.layers.0.mlp.up_proj")
        assert found.description


# -- words -------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 100), st.booleans(), st.data())
def test_codes_are_found_in_words(bits: int, count: int, is_dense: bool, data: st.DataObject) -> None:
    """Against a number with all bits, from any place on."""
    codes = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=count, max_size=count))
    per_word = 32 // bits
    if is_dense:
        number = sum(code << bits * place for place, code in enumerate(codes))
        words = [number >> 32 * n & 0xFFFFFFFF for n in range(-(-count * bits // 32))]
    else:
        runs = [codes[first : first + per_word] for first in range(0, count, per_word)]
        words = [sum(code << bits * place for place, code in enumerate(run)) for run in runs]
    skip = data.draw(st.integers(0, count - 1))
    packed = torch.tensor([words, words], dtype=torch.int64).to(torch.int32)
    found = unpack(packed, bits, skip, count - skip, is_dense)
    assert found.tolist() == [codes[skip:]] * 2
