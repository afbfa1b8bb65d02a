"""Checkpoints in GPTQ that are made of models of every family: names, order, values, and what a killed run leaves."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from driving import Tiny, make_request, make_tiny, random_prompts, reference, run, start
from safetensors.torch import load_file, save_file
from tokenizers.models import WordLevel

from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.errors import ResourceError, StartError
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.launch.quantize_command import CALIBRATION
from text_generation_inference.launch.server_command import main
from text_generation_inference.make_quantized.make import Made, Maker, Source
from text_generation_inference.make_quantized.output import Output
from text_generation_inference.make_quantized.passes import make_batch
from text_generation_inference.make_quantized.settings import MakingSettings
from text_generation_inference.models.model import Context
from text_generation_inference.models.registry import ARCHITECTURES, build, read_config, read_quantization
from text_generation_inference.quant.choose import assign_methods
from text_generation_inference.runner import kv_cache
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.load import load_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = random_prompts(320, [32] * 3, seed=5)
# In the order of the inputs: otherwise those that hardly count come last, and are moved for the errors of all others.
EIGHT = MakingSettings(bits=8, group_size=16, static_groups=False)
# One architecture of each file of `models`.
FAMILIES = {module: each for each, module in ARCHITECTURES.items() if hasattr(transformers, each)}
# Experts, or parts of a matrix in an order of their own, that a checkpoint has in one tensor: GPTQ has no names for these.
FUSED = {
    "CodeGenForCausalLM",
    "DbrxForCausalLM",
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
}


def make(source: Path, folder: Path, settings: MakingSettings = EIGHT, **more: Any) -> Made:
    device = CpuDevice(source, custom_kernels=False)
    made = Maker(Source(source, source), Output(folder), settings, device, rows=2, **more).run(WINDOWS)
    device.close()
    return made


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def widen(weights: dict[str, torch.Tensor], name: str, bits: int) -> torch.Tensor:
    """`[out, in]` of a module, as the format says (of 4 and 8 bits)."""
    qweight, qzeros, scales, g_idx = (weights[f"{name}.{each}"] for each in ("qweight", "qzeros", "scales", "g_idx"))
    shifts = torch.arange(0, 32, bits)
    codes = (qweight[:, None, :] >> shifts[None, :, None] & (1 << bits) - 1).flatten(0, 1)  # [in, out]
    zeros = (qzeros[:, :, None] >> shifts & (1 << bits) - 1).flatten(1) + 1  # [groups, out]
    return ((codes - zeros[g_idx]).float() * scales[g_idx].float()).t()


def write_widened(source: Path, made: dict[str, torch.Tensor], folder: Path, bits: int = 8) -> Path:
    """The checkpoint `source` with the values that a made one stands for."""
    weights = read_weights(source)
    for name in weights:
        module = name.removesuffix(".weight")
        if f"{module}.qweight" in made:
            wide = widen(made, module, bits)
            is_turned = json.loads((source / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
            weights[name] = (wide.t() if is_turned else wide).contiguous()
    target = folder / "widened"
    target.mkdir()
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


@torch.inference_mode()
def compute(folder: Path) -> torch.Tensor:
    """Logits of a window, by a model that is loaded as the server does."""
    checkpoint, config = Checkpoint.open(folder), read_config(folder)
    model = build(config, Context(Ops()))
    model.adapt(checkpoint.names(), checkpoint.are_equal)
    quantization = read_quantization(config)
    if quantization is not None:
        quantization = quantization.named_as_in({name: checkpoint.shape(name) for name in checkpoint.names()})
    assign_methods(model, quantization)
    load_checkpoint(model, checkpoint, torch.float32, torch.device("cpu"), model.ignored)
    device = CpuDevice(folder, custom_kernels=False)
    caches = kv_cache.allocate(device, model.caches(torch.float32), 4)
    model.bind(caches, 32)
    return model.logits(model.forward(make_batch(WINDOWS[:1], device), caches))


@pytest.mark.parametrize("architecture", FAMILIES.values())
def test_every_family(architecture: str, tmp_path: Path) -> None:
    """In 8 bits each value is where it was; everything else is bit for bit the same."""
    tiny = make_tiny(architecture, {}, tmp_path / "plain")
    made = make(tiny.folder, tmp_path / "made")
    before, after = read_weights(tiny.folder), read_weights(tmp_path / "made")
    names = {name.removesuffix(".qweight") for name in after if name.endswith(".qweight")}
    assert len(names) == made.num_matrices
    assert {f"{name}.{each}" for name in names for each in ("qweight", "qzeros", "scales", "g_idx")} <= after.keys()
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        if module not in names:
            assert torch.equal(after[name], weight), name
            continue
        assert name not in after
        found = widen(after, module, 8)
        found = found.t() if architecture == "GPT2LMHeadModel" else found  # whose matrices lie the other way round
        error = (found - weight).norm() / weight.norm()
        assert error < 0.01, name
    assert set(after) == {name for name in before if name.removesuffix(".weight") not in names} | {
        f"{name}.{each}" for name in names for each in ("qweight", "qzeros", "scales", "g_idx")
    }
    # Of what layers multiply, routers, gates and experts in one tensor stay as they were, and config.json says so.
    config = json.loads((tmp_path / "made/config.json").read_text())
    rules = config["quantization_config"].get("dynamic", {})
    matrices = {
        name.removesuffix(".weight")
        for name, weight in before.items()
        if re.search(r"\.\d+\.", name) and weight.dim() > 1 and not re.search("vision|multi_modal|bias", name)
    }
    for name in matrices - names:
        assert any(re.match(rule.removeprefix("-:"), name) for rule in rules), name
    assert torch.allclose(compute(tmp_path / "made"), compute(write_widened(tiny.folder, after, tmp_path)), atol=1e-4)
    assert bool(FUSED & {architecture}) == any(kept.reason for kept in made.kept)
    assert json.loads((tmp_path / "made/quantize_config.json").read_text()) == config["quantization_config"]


def test_inputs_that_matter_most_first_lose_least_of_what_a_model_computes(tiny_llama: Tiny, tmp_path: Path) -> None:
    """By default, and groups are of successive inputs: nothing is sorted when the model is read."""
    expected = compute(tiny_llama.folder)
    lost: list[float] = []
    for number, more in enumerate(({}, {"static_groups": False})):
        make(tiny_llama.folder, tmp_path / str(number), MakingSettings(group_size=32, **more))
        lost.append(float((compute(tmp_path / str(number)) - expected).norm()))
        stored = read_weights(tmp_path / str(number))
        for name, index in stored.items():
            assert not name.endswith("g_idx") or torch.equal(index, torch.arange(len(index), dtype=torch.int32) // 32)
    assert lost[0] < lost[1]


def test_settings_are_told(tiny_llama: Tiny, tmp_path: Path) -> None:
    chosen = MakingSettings(bits=4, group_size=32, act_order=True, symmetric=False)
    make(tiny_llama.folder, tmp_path / "made", chosen, dtype=torch.float16)
    config = json.loads((tmp_path / "made/config.json").read_text())
    quantization = config["quantization_config"]
    expected = {"quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": 32}
    assert expected.items() <= quantization.items()
    assert (quantization["desc_act"], quantization["sym"], quantization["lm_head"]) == (True, False, False)
    assert quantization["static_groups"] is False
    assert "dynamic" not in quantization  # all matrices of layers are in codes
    assert config["dtype"] == "float16"
    weights = read_weights(tmp_path / "made")
    assert {str(each.dtype) for each in weights.values()} == {"torch.float16", "torch.int32"}
    index = weights["model.layers.0.mlp.down_proj.g_idx"]
    assert not torch.equal(index, index.sort().values)
    q, k = (weights[f"model.layers.1.self_attn.{each}_proj.g_idx"] for each in "qk")
    assert torch.equal(q, k), "matrices that are multiplied at once have one order"
    assert (tmp_path / "made/generation_config.json").exists()
    assert not (tmp_path / "made/.making").exists()


@pytest.mark.parametrize(("bits", "act_order"), [(2, False), (3, True), (4, False), (8, True)])
def test_tensors_are_those_that_readers_want(tiny_llama: Tiny, tmp_path: Path, bits: int, act_order: bool) -> None:
    """Names, types, shapes and words of config.json, as the loaders of vLLM, gptqmodel and TGI have them."""
    size = 32
    make(tiny_llama.folder, tmp_path / "made", MakingSettings(bits=bits, group_size=size, act_order=act_order))
    before, after = read_weights(tiny_llama.folder), read_weights(tmp_path / "made")
    matrices = {name.removesuffix(".weight"): tuple(weight.shape) for name, weight in before.items() if "_proj" in name}
    assert len(matrices) == 7 * 3
    for name, (outputs, inputs) in matrices.items():
        groups = -(-inputs // size)
        wanted = {
            "qweight": (torch.int32, (inputs * bits // 32, outputs)),
            "qzeros": (torch.int32, (groups, outputs * bits // 32)),
            "scales": (torch.float16, (groups, outputs)),
            "g_idx": (torch.int32, (inputs,)),
        }
        found = {each: (after[f"{name}.{each}"].dtype, tuple(after[f"{name}.{each}"].shape)) for each in wanted}
        assert found == wanted
        assert all(after[f"{name}.{each}"].is_contiguous() for each in wanted)
        counts = after[f"{name}.g_idx"].bincount(minlength=groups)
        assert counts.tolist() == [min(size, inputs - first) for first in range(0, inputs, size)]
        if bits in (4, 8):  # symmetric: every zero point less 1 is one word, which Marlin takes for granted
            assert set(after[f"{name}.qzeros"].unique().tolist()) == {0x77777777 if bits == 4 else 0x7F7F7F7F}
    said = json.loads((tmp_path / "made/config.json").read_text())["quantization_config"]
    assert said == json.loads((tmp_path / "made/quantize_config.json").read_text())
    fields = {"bits": bits, "group_size": size, "desc_act": act_order, "sym": True, "lm_head": False}
    fields["static_groups"] = not act_order  # which says nothing of how it is read
    assert {
        **fields,
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
    }.items() <= said.items()


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_served_as_the_values_it_stands_for(family: str, tmp_path: Path) -> None:
    tiny = make_tiny(family, {}, tmp_path / "plain")
    chosen = MakingSettings(bits=4, group_size=16, act_order=True, symmetric=False)
    make(tiny.folder, tmp_path / "made", chosen)
    wide = write_widened(tiny.folder, read_weights(tmp_path / "made"), tmp_path, bits=4)
    oracle = type(tiny.model).from_pretrained(wide).eval().float()
    prompts = random_prompts(320, [5, 17], seed=3)
    engine = start(tmp_path / "made", max_total_tokens=64)
    found = run(engine, [make_request(number, prompt, 12) for number, prompt in enumerate(prompts)])
    engine.close()
    assert engine.facts.quantization == "gptq, 4 bits"
    assert 0 < engine.facts.weight_bytes < sum(path.stat().st_size for path in tiny.folder.glob("*.safetensors")) / 2
    assert [each.token_ids for each in found] == [reference(oracle, prompt, 12)[0] for prompt in prompts]


def test_shards(tiny_llama: Tiny, tmp_path: Path) -> None:
    make(tiny_llama.folder, tmp_path / "one")
    made = make(tiny_llama.folder, tmp_path / "many", max_shard_bytes=100_000)
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.num_bytes
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert {name: path.name for path in files for name in load_file(path)} == index["weight_map"]
    one, many = read_weights(tmp_path / "one"), read_weights(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


class Killed(BaseException):
    pass


def kill_after(lines: int) -> Callable[[str], None]:
    """Raises where so many lines have been told."""
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == lines:
            raise Killed

    return tell


def test_a_killed_run_goes_on(tiny_llama: Tiny, tmp_path: Path) -> None:
    chosen = MakingSettings(group_size=16, act_order=True)
    make(tiny_llama.folder, tmp_path / "whole", chosen)
    with pytest.raises(Killed):
        make(tiny_llama.folder, tmp_path / "killed", chosen, tell=kill_after(1))
    assert not (tmp_path / "killed/config.json").exists()
    making = tmp_path / "killed/.making"
    assert {path.name for path in making.iterdir()} == {"lock", "about.json", "layer-00000.safetensors"}
    (making / "layer-00001.safetensors.tmp").write_bytes(b"half of it")
    for name in ("model.safetensors.tmp", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (tmp_path / "killed" / name).write_bytes(b"of files of another size")
    finished = (making / "layer-00000.safetensors").stat().st_mtime_ns
    with pytest.raises(Killed):
        make(tiny_llama.folder, tmp_path / "killed", chosen, tell=kill_after(2))
    assert (making / "layer-00000.safetensors").stat().st_mtime_ns == finished
    told: list[str] = []
    make(tiny_llama.folder, tmp_path / "killed", chosen, tell=told.append)
    assert told[:2] == ["layer 1 of 3: was finished", "layer 2 of 3: was finished"]
    assert told[2].startswith("layer 3 of 3: most is lost in ")
    whole, resumed = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir())} for name in ("whole", "killed")
    )
    assert whole == resumed


def test_what_was_begun_otherwise_is_refused(tiny_llama: Tiny, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        make(tiny_llama.folder, tmp_path / "made", tell=kill_after(1))
    with pytest.raises(StartError, match=r"made otherwise: bits 8, now 4\. Give the same"):
        make(tiny_llama.folder, tmp_path / "made", MakingSettings(bits=4, group_size=16, static_groups=False))


def test_no_space(tiny_llama: Tiny, tmp_path: Path) -> None:
    making = tmp_path / "made/.making"
    making.mkdir(parents=True)
    full = making / "layer-00001.safetensors.tmp"
    full.symlink_to("/dev/full")
    with pytest.raises(
        ResourceError, match="Not enough disk space in .*made. Free some and run the same command again"
    ):
        make(tiny_llama.folder, tmp_path / "made")
    full.unlink()
    told: list[str] = []
    make(tiny_llama.folder, tmp_path / "made", tell=told.append)
    assert told[0] == "layer 1 of 3: was finished"


def test_an_expert_that_no_token_reaches(tmp_path: Path) -> None:
    tiny = make_tiny("Mixtral", {}, tmp_path / "plain")
    made = make(tiny.folder, tmp_path / "made")
    assert any("experts got fewer than 64 tokens" in note for note in made.notes)


def test_a_later_matrix_gets_what_those_before_it_make(tiny_llama: Tiny, tmp_path: Path) -> None:
    """In 2 bits what comes after the first matrices is another: the last is solved for that."""
    chosen = MakingSettings(bits=2, group_size=16)
    make(tiny_llama.folder, tmp_path / "made", chosen)
    weights = read_weights(tiny_llama.folder)
    generator = torch.Generator().manual_seed(0)
    first = "model.layers.0.self_attn.v_proj.weight"
    weights[first] = torch.randn(weights[first].shape, generator=generator) * 0.12
    changed = tmp_path / "changed"
    changed.mkdir()
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    (changed / "config.json").write_bytes((tiny_llama.folder / "config.json").read_bytes())
    make(changed, tmp_path / "other", chosen)
    one, other = read_weights(tmp_path / "made"), read_weights(tmp_path / "other")
    same = {name for name in one if name.endswith("qweight") and torch.equal(one[name], other[name])}
    # Queries and keys come before; all others have changed inputs.
    assert same == {f"model.layers.0.self_attn.{each}_proj.qweight" for each in "qk"}


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def with_words(tiny_llama: Tiny, tmp_path: Path) -> Path:
    """A model with a tokenizer that knows numbers."""
    folder = tmp_path / "with-words"
    shutil.copytree(tiny_llama.folder, folder)
    words = tokenizers.Tokenizer(WordLevel({str(number): number for number in range(320)}, unk_token="0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    return folder


def test_command(
    with_words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(number * 7 % 320) for number in range(110)))
    arguments = ["quantize", str(with_words), str(tmp_path / "out"), "--calibration", str(text), "--groupsize", "32"]
    arguments += ["--sequence-length", "30", "--num-samples", "3", "--act-order", "--device", "cpu"]
    write = Output.write_layer

    def interrupt(output: Output, number: int, *layer: Any) -> None:
        if number == 1:
            raise KeyboardInterrupt
        write(output, number, *layer)

    with monkeypatch.context() as patched:
        patched.setattr(Output, "write_layer", interrupt)
        assert main(arguments) == 130
    error = capsys.readouterr().err
    assert "90 tokens of" in error and "in 3 windows" in error and "layer 1 of 3: most is lost in" in error
    stands = f"1 of 3 layers are finished, in {tmp_path}/out; the same command goes on after them"
    assert error.endswith(f"\ninterrupted: {stands}\n") and "Traceback" not in error
    assert main([*arguments, "--json-output"]) == 0
    found = capsys.readouterr()
    lines = [json.loads(line)["message"] for line in found.err.splitlines()]
    assert lines[1] == "layer 1 of 3: was finished"
    assert re.fullmatch(r"21 matrices are quantised; \d+ MB of weights are in .*/out\n", found.out)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (with_words / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "out/quantize_config.json").read_text())["desc_act"] is True
    assert main(arguments) == 1
    assert "holds a model already" in capsys.readouterr().err


def test_windows_that_the_model_has_no_positions_for(
    with_words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("1 2 3")

    def interrupt(maker: Maker, windows: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Maker, "run", interrupt)
    arguments = ["quantize", str(with_words), str(tmp_path / "out"), "--calibration", str(text), "--device", "cpu"]
    assert main([*arguments, "--sequence-length", "1000", "--json-output"]) == 130
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    said = "--sequence-length is 512 instead of 1000: the model has no more positions"
    assert lines[0] == {"level": "WARN", "message": said}
    assert "interrupted: 0 of 3 layers are finished" in lines[-1]["message"]


def test_the_text_that_comes_along() -> None:
    assert len(CALIBRATION.read_text(encoding="utf-8").split()) > 30_000


def test_refused(tiny_llama: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(tiny_llama.folder), str(tmp_path / "out")

    def refused(*arguments: str) -> str:
        assert main(["quantize", *arguments]) in (1, 2)
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "--groupsize must be one of" in refused(source, out, "--groupsize", "100")
    assert main(["quantize", source, out, "--bits", "5"]) == 2  # as all of a command line
    assert "cannot be read: No such file" in refused(source, out, "--calibration", str(tmp_path / "none.txt"))
    (tmp_path / "empty.txt").write_text(" \n")
    assert "is empty" in refused(source, out, "--calibration", str(tmp_path / "empty.txt"))
    assert "--dtype must be" in refused(source, out, "--dtype", "int8")
    assert "--batch-size must be >= 1" in refused(source, out, "--batch-size", "0")
    for size in ("0", "inf", "nan"):
        assert "--max-shard-gb must be a number above 0" in refused(source, out, "--max-shard-gb", size)
    for place in (tmp_path / "empty.txt", tmp_path / "empty.txt" / "out"):  # known before a model is fetched
        assert f"{tmp_path / 'empty.txt'} is no folder" in refused("org/of-the-hub", str(place))
    stored = tmp_path / "stored"
    stored.mkdir()
    config = json.loads((tiny_llama.folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (stored / "config.json").write_text(json.dumps(config))
    assert "is quantised already (fp8)" in refused(str(stored), out)  # without weights: they are not looked for
    with pytest.raises(StartError, match=r"is quantised already \(fp8\)"):
        make(stored, tmp_path / "out")
    (tmp_path / "out").mkdir()
    for name in ("model-00001-of-00002.safetensors", "config.json"):
        (tmp_path / "out" / name).write_text("{}")
        with pytest.raises(StartError, match="holds a model already"):
            make(tiny_llama.folder, tmp_path / "out")
        (tmp_path / "out" / name).unlink()
