"""What a Gaudi card needs that can be told without one, and without the stand-in for its software."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from text_generation_inference.config import ServerConfig
from text_generation_inference.devices.lack_of_memory import is_out_of_memory
from text_generation_inference.devices.visible import card_bytes
from text_generation_inference.engine.memory import check_described
from text_generation_inference.errors import ResourceError
from text_generation_inference.kernels import fp8
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.models.registry import build, read_config
from text_generation_inference.quant.cache_scales import CacheScales
from text_generation_inference.quant.choose import assign_methods
from text_generation_inference.quant.fp8 import ON_LOADING
from text_generation_inference.runner.shapes import limits_graphs
from text_generation_inference.types import Limits
from text_generation_inference.weights.load import load_dummy
from text_generation_inference.weights.scratch import Scratch

LLAMA = """{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "vocab_size": 320,
"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
"rms_norm_eps": 1e-5, "tie_word_embeddings": false, "hidden_act": "silu", "model_type": "llama"}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(LLAMA)
    return tmp_path


# None in sys.modules makes every import of that name fail. Images for Gaudi have neither Triton nor Ray.
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules["triton"] = sys.modules["ray"] = None
import text_generation_inference as package
for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
    if found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except ImportError as error:
        print(found.name, error.name, sep=",")
"""


def test_every_module_can_be_imported_with_this_torch() -> None:
    """CI runs this with the torch of Gaudi's releases too (`make check-gaudi-torch`)."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True)
    failed = dict(line.split(",") for line in done.stdout.splitlines())
    assert {lacks.partition(".")[0] for lacks in failed.values()} == {"triton", "ray"}
    elsewhere = [name for name in failed if not name.startswith(("text_generation_inference.kernels.triton", "text_generation_inference.ray_serve"))]  # fmt: skip
    assert elsewhere == []


def test_matrices_are_put_into_fp8_on_the_host_and_each_is_waited_for(folder: Path) -> None:
    """A card whose FP8 end at 240 would clip what is quantised on it."""
    from text_generation_inference.models.model import Context

    packed: list[str] = []
    waited: list[int] = []

    def pack(weight: fp8.Fp8Weight) -> fp8.Fp8Weight:
        packed.append(weight.data.device.type)
        assert float(weight.data.float().abs().max()) > 240
        return weight

    model = build(read_config(folder), Context(ops=Ops(pack_fp8=pack)))
    assign_methods(model, ON_LOADING)
    card = torch.device("meta")  # any other than the host
    load_dummy(model, torch.bfloat16, card, 1, Scratch(settle=lambda: waited.append(1)), fp8_on_host=True)
    assert set(packed) == {"cpu"}
    kept = {value.device.type for _, module in model.walk() for value in vars(module).values() if isinstance(value, torch.Tensor)}  # fmt: skip
    assert kept == {"meta"}, "what is not in FP8 goes to the card at once"
    assert len(waited) == sum(len(module.declare()) for _, module in model.walk())


def test_scales_of_a_cache_fit_the_card() -> None:
    scales = CacheScales()
    assert scales.of(fp8.FP8, 240.0) == (1.0, 1.0)
    scales.k, scales.v = 0.5, 0.25  # from a checkpoint, made for 448
    scales.set_measured("v", 0.125)  # on the card itself
    assert scales.of(fp8.FP8, 240.0) == (0.5 * 448 / 240, 0.125)
    assert scales.of(fp8.FP8) == (0.5, 0.125)
    assert scales.of(torch.bfloat16, 240.0) == (1.0, 1.0)


def test_a_lack_of_memory_is_known_wherever_it_surfaces() -> None:
    assert is_out_of_memory(RuntimeError("[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1024"))
    assert not is_out_of_memory(RuntimeError("[Rank:0] FATAL ERROR :: MODULE:PT_BRIDGE Exception"))
    assert not is_out_of_memory(ValueError("PT_DEVMEM"))


def play_cards(folder: Path, monkeypatch: pytest.MonkeyPatch, *megabytes: int) -> None:
    program = folder / "bin" / "hl-smi"
    program.parent.mkdir(exist_ok=True)
    answer = "\n".join(f"echo {each}" for each in megabytes)
    program.write_text(f'#!/bin/sh\n[ "$*" = "-Q memory.total -f csv,noheader,nounits" ] || exit 1\n{answer}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def test_a_model_that_is_larger_than_the_cards_is_refused_by_its_description(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig(device="hpu")
    play_cards(folder, monkeypatch, 98304, 98304)
    assert card_bytes("hpu") == 96 << 30
    check_described(config, folder)
    wide = LLAMA.replace(": 128,", ": 1048576,").replace(': 64, "inter', ': 32768, "inter')  # 422 GB in all
    (folder / "config.json").write_text(wide)
    with pytest.raises(
        ResourceError, match=r"too large: its weights take \d+.* the card has 103.* Nothing was downloaded"
    ):
        check_described(config, folder)
    with pytest.raises(ResourceError, match="2 cards have 206"):
        check_described(ServerConfig(device="hpu", num_shard=2), folder)
    check_described(ServerConfig(device="hpu", num_shard=8), folder)
    check_described(ServerConfig(device="cpu"), folder)


def test_prompts_are_compiled_whatever_limits_captured_graphs() -> None:
    limits = Limits(block_size=128, dtypes=["bfloat16"], max_batch_size=1, max_batch_prefill_tokens=1, memory_share=1.0, prompt_graphs=False)  # fmt: skip
    eager = Limits(block_size=128, dtypes=["bfloat16"], max_batch_size=1, max_batch_prefill_tokens=1, memory_share=1.0, prompt_graphs=False, compiles_prompts=True)  # fmt: skip
    for asked in (None, True):
        config = ServerConfig(limit_hpu_graph=asked)
        assert limits_graphs(config, limits)
        assert not limits_graphs(config, eager)
