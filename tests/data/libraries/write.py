"""Writes the quantised checkpoints of this folder with the libraries whose formats they are, once.

It needs bitsandbytes, hqq, torchao, accelerate and transformers, which no test does. Every checkpoint is that of `plain`:
what it has in common with it is left out. `expected.json` has, by checkpoint and matrix, the SHA-256 of what the library
makes of it: values in float32, or in float16 where the library rounds more than once on the way.
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
    return hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def keep(name: str, values: dict[str, torch.Tensor]) -> None:
    """What is saved in the scratch folder, less what the plain one has, and what it stands for."""
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    plain = load_file(HERE / "plain" / "model.safetensors") if name != "plain" else {}
    stored = load_file(SCRATCH / name / "model.safetensors")
    with safe_open(SCRATCH / name / "model.safetensors", "pt") as opened:
        metadata = opened.metadata() or {"format": "pt"}
    own = {key: value for key, value in stored.items() if key not in plain or value.dtype != plain[key].dtype}
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


if __name__ == "__main__":
    made = make_plain()
    write_bitsandbytes(made)
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
