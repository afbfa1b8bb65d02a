"""Writes the quantised checkpoints of this folder with the libraries whose formats they are, once.

It needs bitsandbytes, hqq, torchao, accelerate and transformers, which no test does. Every checkpoint is that of `plain`:
what it has in common with it is left out. `expected.json` has, by checkpoint and matrix, the SHA-256 of what the library
makes of it, and the type of the values: float32, or a shorter one where the library rounds on the way to it.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
SCRATCH = Path(sys.argv[1])
SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
# The pure torch implementation: the CPU's own one takes codes next to the nearest now and then, and mixes up the scales of
# rows that are not whole blocks.
EXACT = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
expected: dict[str, dict[str, str]] = {}


def digest(value: torch.Tensor) -> str:
    found = hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{str(value.dtype).removeprefix('torch.')} {found}"


def keep(name: str, values: dict[str, torch.Tensor]) -> None:
    """What is saved in the scratch folder, less what the plain one has, and what it stands for."""
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    plain = load_file(HERE / "plain" / "model.safetensors") if name != "plain" else {}
    stored = load_file(SCRATCH / name / "model.safetensors")
    with safe_open(SCRATCH / name / "model.safetensors", "pt") as opened:
        metadata = opened.metadata() or {"format": "pt"}
    own = {key: value for key, value in stored.items() if key not in plain or key.endswith("_proj.weight")}
    save_file(own, folder / "model.safetensors", metadata)
    shutil.copy(SCRATCH / name / "config.json", folder / "config.json")
    expected[name] = {key: digest(value) for key, value in values.items()}


def matrices(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {f"{name}.weight": module for name, module in model.named_modules() if name.endswith("_proj")}


def make_plain() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True)).half()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.12) if parameter.ndim > 1 else parameter.uniform_(0.7, 1.3)
    model.save_pretrained(SCRATCH / "plain")
    keep("plain", {})
    return model


def load(config: object, dtype: torch.dtype) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(
        SCRATCH / "plain", quantization_config=config, device_map="cpu", dtype=dtype
    )


# -- bitsandbytes ----------------------------------------------------------------------------------------------------


def dequantize_4bit(data: torch.Tensor, absmax: torch.Tensor, kind: str, shape: torch.Size) -> torch.Tensor:
    op = torch.ops.bitsandbytes.dequantize_4bit.default
    return op.redispatch(EXACT, data, absmax, 64, kind, list(shape), torch.float32)


def write_bitsandbytes(plain: LlamaForCausalLM) -> None:
    import bitsandbytes.functional as bnb

    kinds = {
        "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        "fp4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_quant_storage=torch.bfloat16),
    }
    for name, config in kinds.items():
        model, values = load(config, torch.float16), {}
        for key, module in matrices(model).items():
            state = module.weight.quant_state
            absmax = state.absmax
            if state.nested:
                absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
            values[key] = dequantize_4bit(module.weight.data, absmax, name, state.shape)
        model.save_pretrained(SCRATCH / name)
        keep(name, values)
    model = load(BitsAndBytesConfig(load_in_8bit=True), torch.float16)
    values = {
        key: bnb.int8_vectorwise_dequant(module.weight.data, module.weight.SCB).half()
        for key, module in matrices(model).items()
    }
    model.save_pretrained(SCRATCH / "int8")
    keep("int8", values)
    expected["bitsandbytes"] = expected["int8"]
    for kind in kinds:  # on loading
        expected[f"bitsandbytes-{kind}"] = {}
        for key, module in matrices(plain).items():
            weight = module.weight.data
            data, state = bnb.quantize_4bit(weight, quant_type=kind)
            offset = state.absmax.mean()
            code = bnb.create_dynamic_map()
            op = torch.ops.bitsandbytes.quantize_blockwise.default
            absmax, nested = op.redispatch(EXACT, state.absmax - offset, code, 256)
            absmax = code[absmax.int()] * nested.repeat_interleave(256)[: len(absmax)] + offset
            expected[f"bitsandbytes-{kind}"][key] = digest(dequantize_4bit(data, absmax, kind, weight.shape))


# -- HQQ -------------------------------------------------------------------------------------------------------------


def write_hqq() -> None:
    """Saved as `transformers` 4 and the library's `save_to_safetensors` do: the module's state under its name."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    usual = {"nbits": 4, "group_size": 64, "axis": 1}
    mixed = {
        "q_proj": {"nbits": 8, "group_size": 64, "axis": 1},
        "k_proj": {"nbits": 3, "group_size": 32, "axis": 1},
        "v_proj": {"nbits": 2, "group_size": 32, "axis": 1},
        "o_proj": {"nbits": 4, "group_size": 64, "axis": 1, "view_as_float": True},
        "gate_proj": {"nbits": 4, "group_size": 64, "axis": 0},
        "up_proj": {"nbits": 1, "group_size": 32, "axis": 1},
        "down_proj": {"nbits": 3, "group_size": 64, "axis": 0, "view_as_float": True},
    }
    for name, settings in {"hqq": {}, "hqq-mixed": mixed}.items():
        model, values, quant_config = LlamaForCausalLM.from_pretrained(SCRATCH / "plain", dtype=torch.float16), {}, {}
        for key, module in matrices(model).items():
            parent, _, last = key.removesuffix(".weight").rpartition(".")
            config = BaseQuantizeConfig(**settings.get(last, usual))
            quant_config[f"{parent.rpartition('.')[2]}.{last}"] = config
            made = HQQLinear(module, config, compute_dtype=torch.float16, device="cpu", del_orig=False)
            setattr(model.get_submodule(parent), last, made)
            meta = {**made.meta, "compute_dtype": torch.float32}
            meta.update(scale=meta["scale"].float(), zero=meta["zero"].float())
            dense = Quantizer.dequantize(made.W_q.data, meta)
            exact = meta["nbits"] == 4 or meta["axis"] == 0  # zero points are whole numbers, or nothing is regrouped
            values[key] = dense if exact else dense.half()
        (SCRATCH / name).mkdir(exist_ok=True)
        state = {key: value.data.contiguous() for key, value in model.state_dict().items() if key != "lm_head.weight"}
        save_file(state, SCRATCH / name / "model.safetensors", {"format": "pt"})
        config = json.loads((SCRATCH / "plain" / "config.json").read_text())
        section = {"quant_method": "hqq", "skip_modules": ["lm_head"]}
        section["quant_config"] = quant_config if settings else BaseQuantizeConfig(**usual)
        (SCRATCH / name / "config.json").write_text(json.dumps({**config, "quantization_config": section}, indent=1))
        keep(name, values)


# -- torchao ---------------------------------------------------------------------------------------------------------


def write_torchao(plain: LlamaForCausalLM) -> None:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int4Tensor, Int8WeightOnlyConfig, IntxWeightOnlyConfig, MappingType, PerGroup
    from transformers import TorchAoConfig

    by_group = PerGroup(32)
    kinds = {
        "torchao-int8": Int8WeightOnlyConfig(),
        "torchao-intx": IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=by_group, mapping_type=MappingType.ASYMMETRIC
        ),
    }
    for name, config in kinds.items():
        model = load(TorchAoConfig(config), torch.bfloat16)
        values = {key: module.weight.dequantize() for key, module in matrices(model).items()}
        model.save_pretrained(SCRATCH / name)
        keep(name, values)
    # Of 4 bits two in a byte: torchao makes them on a GPU alone, so this is its form with values found here.
    state, values = {}, {}
    for key, value in plain.state_dict().items():
        if not key.endswith("_proj.weight"):
            continue
        groups = value.float().unflatten(1, (-1, 32))
        low, high = groups.amin(2), groups.amax(2)
        scale = ((high - low) / 15).bfloat16()
        added = (low + scale.float() * 8).bfloat16()
        codes = ((groups - added.float()[..., None]) / scale.float()[..., None]).round().clamp(-8, 7)
        values[key] = (codes * scale.float()[..., None] + added.float()[..., None]).flatten(1)
        codes = codes.flatten(1).to(torch.int8)
        packed = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
        state[key] = Int4Tensor(packed, scale.t().contiguous(), added.t().contiguous(), [1, 32], value.shape)
    tensors, metadata = flatten_tensor_state_dict(state)
    (SCRATCH / "torchao-int4").mkdir(exist_ok=True)
    save_file(tensors, SCRATCH / "torchao-int4" / "model.safetensors", {**metadata, "format": "pt"})
    config = json.loads((SCRATCH / "torchao-int8" / "config.json").read_text())
    packing = {"_data": "PLAIN", "_type": "Int4PackingFormat"}
    kind = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {"group_size": 32, "int4_packing_format": packing}}
    config["quantization_config"]["quant_type"]["default"] = kind
    (SCRATCH / "torchao-int4" / "config.json").write_text(json.dumps(config, indent=1))
    keep("torchao-int4", values)


if __name__ == "__main__":
    made = make_plain()
    write_bitsandbytes(made)
    write_hqq()
    write_torchao(made)
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    for path in HERE.glob("*/*"):
        path.chmod(0o644)
