"""The embedded model quantised by the libraries whose formats they are, for `perplexity.py --folder`.

    PYTHON bench/library_checkpoints.py MODEL_FOLDER OUT
    .venv/bin/python bench/perplexity.py --only float32 --folder OUT/hqq-4bit-g64 --folder ...

PYTHON has torch, transformers, hqq and torchao, which the server does not need. MODEL_FOLDER has the model in
safetensors, as the server converts it once (`weights.source.resolve_model`). The output head stays as it is.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from safetensors.torch import save_file
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, MappingType, PerGroup
from transformers import AutoModelForCausalLM, TorchAoConfig

TEXTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_hqq(source: Path, out: Path, bits: int, group_size: int) -> None:
    """As the library's `save_to_safetensors`: the state of each module under its name."""
    usual = BaseQuantizeConfig(nbits=bits, group_size=group_size, axis=1)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    for name, module in [(n, m) for n, m in model.named_modules() if n.endswith("_proj")]:
        parent, _, last = name.rpartition(".")
        made = HQQLinear(module, usual, compute_dtype=torch.float16, device="cpu")
        setattr(model.get_submodule(parent), last, made)
    out.mkdir(parents=True)
    state = {key: value.data.contiguous() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    save_file(state, out / "model.safetensors", {"format": "pt"})
    section = {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": usual}
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": section}, indent=1))


def write_torchao(source: Path, out: Path, config: object) -> None:
    chosen = TorchAoConfig(config)
    made = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=chosen, device_map="cpu", dtype=torch.bfloat16
    )
    made.save_pretrained(out)


def main() -> None:
    source, out = map(Path, sys.argv[1:3])
    for bits, group_size in ((8, 64), (4, 128), (4, 64), (3, 64), (2, 32)):
        write_hqq(source, out / f"hqq-{bits}bit-g{group_size}", bits, group_size)
    about = {"weight_dtype": torch.int4, "mapping_type": MappingType.ASYMMETRIC}
    write_torchao(source, out / "torchao-int8", Int8WeightOnlyConfig())
    write_torchao(source, out / "torchao-int4-g64", IntxWeightOnlyConfig(granularity=PerGroup(64), **about))
    write_torchao(source, out / "torchao-int4-g32", IntxWeightOnlyConfig(granularity=PerGroup(32), **about))
    for folder in out.iterdir():
        for name in TEXTS:
            if (source / name).exists():
                shutil.copy(source / name, folder / name)
        print(folder)


if __name__ == "__main__":
    main()
