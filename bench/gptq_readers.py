"""A checkpoint of `text-generation-server quantize` as `transformers` and gptqmodel read it: every value of it.

    python bench/gptq_readers.py FOLDER [--backend torch]

Needs gptqmodel and optimum, which are no packages of this project. Values must be those that we say the file holds,
rounded to float16 as gptqmodel does; fails where one is not. TORCHDYNAMO_DISABLE=1 saves compiling what is used once.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPTQConfig

from text_generation_inference.make_quantized.packing import SUFFIXES, unpack
from text_generation_inference.models.registry import read_config
from text_generation_inference.weights.checkpoint import Checkpoint

ROUNDED = 2.0**-10  # of a value in float16, twice


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="torch", help="of gptqmodel: others may compile kernels first")
    options = parser.parse_args()
    bits = read_config(options.folder).inner("quantization_config").integer("bits")
    checkpoint = Checkpoint.open(options.folder)
    model = AutoModelForCausalLM.from_pretrained(
        options.folder,
        device_map="cpu",
        dtype=torch.float16,
        quantization_config=GPTQConfig(bits=bits, backend=options.backend),
    )
    found = {name: module for name, module in model.named_modules() if hasattr(module, "dequantize_weight")}
    stored = {name.removesuffix(".qweight") for name in checkpoint.names() if name.endswith(".qweight")}
    assert set(found) == stored, "it has others in few bits than the file"
    worst = 0.0
    for name, module in found.items():
        wanted = unpack({each: checkpoint.read(f"{name}.{each}") for each in SUFFIXES}, bits).widen()
        values = module.dequantize_weight().t().float()
        worst = max(worst, float(((values - wanted).abs() / wanted.abs().clamp(min=2.0**-14)).max()))
    kinds = {type(module).__name__ for module in found.values()}
    print(f"{len(found)} matrices as {kinds}: largest difference {worst:.1e} of a value")
    return int(worst > ROUNDED)


if __name__ == "__main__":
    sys.exit(main())
