"""`tgi check` as a user has it: in a process of its own, on the embedded model, tiny models, a hub and garbage."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fake_hub import running_hub
from terminal import run_on_terminal
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import start_engine
from text_generation_inference.errors import StartError
from text_generation_inference.launch.arguments import build_parser, read_arguments
from text_generation_inference.launch.check import check_model, main
from text_generation_inference.launch.check_report import KvLayers, render
from text_generation_inference.layers.cache import TOKEN_ID_BYTES
from text_generation_inference.models import deepseek_v2, gemma2, mixtral
from text_generation_inference.models.registry import judge
from text_generation_inference.weights.hub_access import HubAccess
from text_generation_inference.weights.source import resolve_model
from unit import tiny_gguf

TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
KV_BYTES = 2 * 3 * 2 * 16  # elements of a token


def check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from text_generation_inference.cli import main; import sys; sys.exit(main())",
            "check",
            *arguments,
        ],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def report(*arguments: str) -> dict[str, Any]:
    """In this process: torch is loaded once."""
    options = build_parser("check", "").parse_args(["--model-id", *arguments])
    found = check_model(read_arguments(options, {}).config)
    return {name: getattr(found, name) for name in found.__struct_fields__}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).save_pretrained(folder)
    words = {f"word{number}": number for number in range(TINY["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def copy(folder: Path, to: Path, **config: Any) -> Path:
    """The same model with other entries in its config."""
    to.mkdir(exist_ok=True)
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    fields = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**fields, **config}))
    return to


@pytest.mark.one_rank  # figures of the whole model
def test_embedded(tmp_path: Path) -> None:
    done = check("embedded", "--json", "--max-batch-total-tokens", "4096", TGI_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] and found["problems"] == [] and found["architecture"] == "LlamaForCausalLM"
    assert found["parameters"] == 134_515_008  # of the published model
    assert found["weight_bytes_by_dtype"]["bfloat16"] == 2 * 134_515_008
    assert found["weight_bytes"] < 134_515_008  # its blocks have 5 bits a weight
    assert found["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 4 + 4  # and its id
    assert found["kv_cache_tokens"] == 4096
    assert found["limits"]["max_total_tokens"] == 4096
    assert found["reasons"]["max_total_tokens"] == "tokens in the KV cache"
    assert found["tokenizer"] and found["chat_template"]
    assert list(tmp_path.iterdir()) == []  # nothing was converted or built


def test_readable(tiny: Path) -> None:
    done = check(str(tiny), "--max-best-of", "3", "--cuda-graphs", "0")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == str(tiny) and lines[-1].split() == ["verdict", "it", "fits"]
    assert any(line.split()[:3] == ["architecture", "LlamaForCausalLM,", "supported"] for line in lines)
    assert any(line.split() == ["max_total_tokens", "512", "(positions", "of", "the", "model)"] for line in lines)
    assert "  note: --cuda-graphs has no effect: the CPU captures no graphs" in lines


def test_folder(tiny: Path) -> None:
    parameters = sum(tensor.numel() for tensor in load_file(tiny / "model.safetensors").values())
    found = report(str(tiny), "--dtype", "bfloat16", "--max-total-tokens", "100")
    assert found["parameters"] == parameters and found["weight_bytes"] == 2 * parameters
    assert found["weight_bytes_by_dtype"] == {
        "float32": 4 * parameters,
        "bfloat16": 2 * parameters,
        "float16": 2 * parameters,
    }
    assert found["kv_bytes_per_token"] == 2 * KV_BYTES + 4
    assert found["limits"]["max_input_tokens"] == 99 and found["reasons"]["max_total_tokens"] == "as given"


def describe(folder: Path, architecture: str, tiny: dict[str, Any]) -> dict[str, Any]:
    """The report on a config alone, and its lines."""
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **tiny}))
    config = ServerConfig(model_id=str(folder), load_format="dummy", dtype="bfloat16", device="cpu")
    found = check_model(config)
    return {**{name: getattr(found, name) for name in found.__struct_fields__}, "shown": render(found)}


def test_experts_and_windows(tmp_path: Path) -> None:
    found = describe(tmp_path, "MixtralForCausalLM", mixtral.TINY)
    expert = 3 * mixtral.TINY["intermediate_size"] * mixtral.TINY["hidden_size"]
    layers = mixtral.TINY["num_hidden_layers"]
    assert found["experts"] == [6, 2] and found["parameters"] - found["active_parameters"] == layers * 4 * expert
    assert "which goes to 2 of 6 experts" in found["shown"]
    (group,) = found["kv_layers"]
    assert group == KvLayers("keys and values", layers, found["kv_bytes_per_token"] - 4, mixtral.TINY["sliding_window"])
    assert f"{layers} layers keep keys and values and read the last 24 tokens" in found["shown"]


def test_layers_that_keep_different_things(tmp_path: Path) -> None:
    found = describe(tmp_path, "Gemma2ForCausalLM", gemma2.TINY)
    windows = {group.window: group.num_layers for group in found["kv_layers"]}
    assert windows.keys() == {None, gemma2.TINY["sliding_window"]}
    assert sum(windows.values()) == gemma2.TINY["num_hidden_layers"]
    assert found["active_parameters"] is None and found["experts"] == []
    assert "read all tokens" in found["shown"] and "our own decoder (models/gemma2.py)" in found["shown"]


def test_latents(tmp_path: Path) -> None:
    found = describe(tmp_path, "DeepseekV2ForCausalLM", deepseek_v2.TINY)
    width = deepseek_v2.TINY["kv_lora_rank"] + deepseek_v2.TINY["qk_rope_head_dim"]
    assert found["kv_layers"] == [KvLayers("latents", 3, 3 * 2 * width, None)]
    expert = 3 * deepseek_v2.TINY["moe_intermediate_size"] * deepseek_v2.TINY["hidden_size"]
    assert found["parameters"] - found["active_parameters"] == 2 * 5 * expert  # one layer is dense, shared ones count


def test_words(tiny: Path, tmp_path: Path) -> None:
    """What the tokenizer and the chat template say of texts."""
    folder = copy(tiny, tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{{ tools }}<think></think><tool_call>")
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    found = report(str(folder))
    assert found["stop_tokens"] == ["word3", "word5"]
    assert (found["tool_calls"], found["thinking"]) == ("hermes", "<think> ... </think>")
    plain = report(str(tiny))
    assert (plain["tool_calls"], plain["thinking"]) == ("json", None)


def test_gguf(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf", quantise="Q4_0")
    for name in (path, tmp_path):
        found = report(str(name))
        assert found["fits"], found["problems"]
        assert found["weight_bytes"] < found["weight_bytes_by_dtype"]["bfloat16"]
        assert found["chat_template"] and found["limits"]["max_total_tokens"] == 256
        assert (found["stop_tokens"], found["tool_calls"], found["thinking"]) == (["<|im_end|>"], "json", None)
    plain = report(str(path), "--disable-custom-kernels")
    assert plain["weight_bytes"] == plain["weight_bytes_by_dtype"]["float32"]


def test_without_weights_the_cache_is_told(tiny: Path, tmp_path: Path) -> None:
    folder = copy(tiny, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    found = report(str(folder), "--dtype", "float32")
    assert not found["fits"] and "holds no .safetensors file" in found["problems"][0]
    assert found["kv_bytes_per_token"] == 4 * KV_BYTES + TOKEN_ID_BYTES and len(found["kv_layers"]) == 1


def test_dummy_weights_need_no_weights(tiny: Path, tmp_path: Path) -> None:
    folder = copy(tiny, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert "holds no .safetensors file" in report(str(folder))["problems"][0]
    assert report(str(folder), "--load-format", "dummy")["fits"]
    assert report(str(folder), "--weights-cache-override", str(tiny))["fits"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["FrobForCausalLM"]}, "architecture 'FrobForCausalLM' is not supported: transformers"),
        ({"architectures": None}, "`architectures` is missing"),
        ({"hidden_size": -1}, "`hidden_size` must be a positive integer"),
        ({"vocab_size": 321}, "has shape [320, 64], config.json makes it [321, 64]"),
        ({"num_hidden_layers": 4}, "lacks the tensor model.layers.3."),
        ({"num_hidden_layers": 2}, "does not use: model.layers.2."),
        ({"hidden_size": 2**14, "head_dim": 2**12, "vocab_size": 2**20, "num_hidden_layers": 3}, "has shape"),
        ({"head_dim": 2**18}, "`head_dim` must be at most 16384, it is 262144"),
        ({"quantization_config": {"quant_method": "gptq"}}, "there is no tensor whose name ends in .qweight"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 5}},
            "`bits` 5 is not supported, 2 or 3 or 4 or 8 is",
        ),
        ({"quantization": {"group_size": 64, "bits": 4}}, "`quant_method` 'mlx' is not supported"),
    ],
)
def test_why_not(tiny: Path, tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    found = report(str(copy(tiny, tmp_path / "m", **changes)))
    assert not found["fits"] and len(found["problems"]) == 1 and problem in found["problems"][0]


@pytest.mark.parametrize(
    ("config", "beside", "name"),
    [
        ({"quantization_config": {"quant_method": "exl2", "bits": 4.65}}, {}, "exl2"),
    ],
)
def test_quantised_checkpoints_that_are_not_read(
    tiny: Path, tmp_path: Path, config: dict, beside: dict, name: str
) -> None:
    """Their weights look like nothing that is known, and may be missing: the method is what must be said, first."""
    folder = copy(tiny, tmp_path / "m", **config)
    for file, content in beside.items():
        (folder / file).write_text(json.dumps(content))
    (folder / "model.safetensors").unlink()
    found = report(str(folder))
    assert found["quantization"] == name and not found["quantization_is_supported"] and found["is_supported"]
    (problem,) = found["problems"]
    assert f"`quant_method` '{name.split(',')[0]}' is not supported" in problem
    shown = render(check_model(ServerConfig(model_id=str(folder))))
    assert "LlamaForCausalLM, supported" in shown and f"{name}: not supported" in shown
    with pytest.raises(StartError, match=f"`quant_method` '{name.split(',')[0]}' is not supported"):
        start_engine(ServerConfig(model_id=str(folder)))


def test_unsupported_comes_before_missing_weights(tiny: Path, tmp_path: Path) -> None:
    folder = copy(tiny, tmp_path / "m", architectures=["FrobForCausalLM"])
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").unlink()
    (problem,) = report(str(folder))["problems"]
    assert "architecture 'FrobForCausalLM' is not supported" in problem
    config = ServerConfig(model_id=str(folder), weights_cache_override=str(tmp_path / "absent"))
    with pytest.raises(StartError, match="architecture 'FrobForCausalLM' is not supported"):
        start_engine(config)


def test_the_launcher_judges_a_model_before_fetching_it(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    with running_hub() as hub:
        hub.files = {path.name: path.read_bytes() for path in tiny.iterdir()}
        odd = {**json.loads((tiny / "config.json").read_text()), "architectures": ["FrobForCausalLM"]}
        hub.files["config.json"] = json.dumps(odd).encode()
        access = HubAccess(cache_dir=tmp_path, endpoint=hub.url)
        with pytest.raises(StartError, match="architecture 'FrobForCausalLM' is not supported"):
            resolve_model(
                "org/model",
                tmp_path,
                hub_cache=access.cache_dir,
                endpoint=access.endpoint,
                judge=judge,
            )
        assert not any("model.safetensors" in line for line in hub.asked if "/resolve/" in line)


@pytest.mark.parametrize("width", [30, 59, 80])
def test_the_report_fits_the_terminal(tiny: Path, width: int) -> None:
    command = [sys.executable, "-m", "text_generation_inference.launch.check", str(tiny), "--cuda-graphs", "0"]
    status, shown = run_on_terminal(command, width)
    lines = shown.splitlines()
    assert status == 0 and max(map(len, lines[1:])) <= width  # the first one is the model's path
    assert "--cuda-graphs has no effect: the CPU captures no graphs" in " ".join(shown.split())


def test_too_large(tiny: Path, tmp_path: Path) -> None:
    folder = copy(tiny, tmp_path / "m", num_hidden_layers=100, intermediate_size=2**22)
    found = report(str(folder), "--load-format", "dummy")
    assert not found["fits"] and "its weights take " in found["problems"][0]
    found = report(str(tiny), "--max-batch-total-tokens", str(10**12))
    assert not found["fits"] and "Not enough memory for a KV cache" in found["problems"][0]


def test_text_is_missing(tiny: Path, tmp_path: Path) -> None:
    folder = copy(tiny, tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    found = report(str(folder))
    assert found["fits"] and found["notes"] == ["there is no chat template: chat requests will be refused"]
    (folder / "tokenizer.json").unlink()
    found = report(str(folder))
    assert not found["fits"] and "there is no tokenizer.json" in found["problems"][0]
    assert found["limits"]  # the rest is told all the same


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("config.json", b"{not json", "is not valid JSON"),
        ("config.json", b"[]", "must hold a JSON object"),
        ("model.safetensors", b"\xff" * 100, "is not a sound safetensors file"),
        ("model.safetensors", b"", "is not a sound safetensors file"),
        ("chat_template.jinja", b"{% for %}", "/chat_template.jinja: the chat template is broken: Expected"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja"),
    ],
)
def test_garbage(tiny: Path, tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    folder = copy(tiny, tmp_path / "m")
    (folder / name).write_bytes(content)
    found = report(str(folder))
    assert not found["fits"] and problem in found["problems"][0]


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    garbage = tmp_path / "x.gguf"
    garbage.write_bytes(b"GGUF" + bytes(100))
    done = check(str(garbage))
    assert done.returncode == 1 and "it cannot be served" in done.stdout and "Traceback" not in done.stderr
    assert main([str(tmp_path / "absent")]) == 1
    assert main(["embedded", "--port", "x"]) == 2
    assert main(["embedded", "another"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_model_on_the_hub(tiny: Path, tmp_path: Path) -> None:
    with running_hub() as hub:
        hub.files = {path.name: path.read_bytes() for path in tiny.iterdir()}
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        done = check("org/model", "--json", **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        large = {
            name: len(hub.files[name]) for name in ("model.safetensors", "tokenizer.json", "generation_config.json")
        }
        assert found["fits"] and found["tokenizer"] and found["download_bytes"] == sum(large.values())
        fetched = [line for line in hub.asked if line.startswith("GET") and "/resolve/" in line]
        assert not any("tokenizer.json" in line for line in fetched)
        assert hub.ranges and all(line.startswith("model.safetensors bytes=0-") for line in hub.ranges)
        missing = check("org/absent", **variables)
        assert missing.returncode == 1 and "is not on the hub" in missing.stdout
        del hub.files["model.safetensors"]
        hub.files["pytorch_model.bin"] = b"pickle"
        pickled = check("org/model", **{**variables, "HF_HOME": str(tmp_path / "other")})
        assert pickled.returncode == 1 and "Pickled weights" in pickled.stdout


def test_sharded_weights(tiny: Path, tmp_path: Path) -> None:
    folder = copy(tiny, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, kept in parts.items():
        save_file({name: tensors[name] for name in kept}, folder / file)
    index = {"weight_map": {name: file for file, kept in parts.items() for name in kept}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert report(str(folder))["fits"]
    (folder / "b.safetensors").unlink()
    assert "is listed in model.safetensors.index.json but missing" in report(str(folder))["problems"][0]


@pytest.mark.parametrize(
    ("config", "beside", "name"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, {}, "gptq, 4 bits"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, {}, "awq, 4 bits"),
        ({}, {"quantize_config.json": {"bits": 8, "group_size": 128}}, "gptq, 8 bits"),
        ({}, {"quant_config.json": {"w_bit": 4, "version": "GEMM"}}, "awq, 4 bits"),
    ],
)
def test_quantised_checkpoints_that_are_read(tiny: Path, tmp_path: Path, config: dict, beside: dict, name: str) -> None:
    folder = copy(tiny, tmp_path / "m", **config)
    for file, content in beside.items():
        (folder / file).write_text(json.dumps(content))
    found = report(str(folder), "--load-format", "dummy")
    assert (found["quantization"], found["quantization_is_supported"], found["problems"]) == (name, True, [])
    assert found["weight_bytes"] < 0.5 * found["weight_bytes_by_dtype"]["float32"]


def test_a_setting_that_the_checkpoint_is_not(tiny: Path) -> None:
    found = report(str(tiny), "--quantize", "gptq")
    assert (found["quantization"], found["quantization_is_supported"], found["fits"]) == (None, False, False)
    assert "`quantize` gptq is for checkpoints in GPTQ or AWQ, which this one is not" in found["problems"][0]


def test_what_ranks_hold(tiny: Path) -> None:
    whole = check_model(ServerConfig(model_id=str(tiny), device="cpu", custom_kernels=False))
    report = check_model(ServerConfig(model_id=str(tiny), device="cpu", custom_kernels=False, num_shard=4))
    assert report.fits, report.problems
    assert (report.num_shard, report.parameters) == (4, whole.parameters)
    assert whole.kv_bytes_per_token is not None and whole.weight_bytes is not None
    # Two key/value heads for four ranks: each has one of them, and so half of the cache, not a quarter.
    [kv_bytes] = {part.kv_bytes_per_token for part in report.ranks}
    assert kv_bytes == report.kv_bytes_per_token == (whole.kv_bytes_per_token - TOKEN_ID_BYTES) // 2 + TOKEN_ID_BYTES
    assert report.weight_bytes == max(part.weight_bytes for part in report.ranks)
    assert whole.weight_bytes < sum(part.weight_bytes for part in report.ranks) < 2 * whole.weight_bytes
    assert whole.free_bytes is not None and report.free_bytes is not None
    assert report.free_bytes < 0.3 * whole.free_bytes  # of this machine, which they share
    text = render(report)
    assert f"ranks 0, 1, 2, 3: weights 0.00 GB, KV cache {kv_bytes:,} bytes per token" in text, text


def test_too_many_ranks_are_refused_before_anything_is_fetched(tiny: Path) -> None:
    report = check_model(ServerConfig(model_id=str(tiny), device="cpu", custom_kernels=False, num_shard=5))
    words = "the model cannot be split over 5 ranks: it has 4 attention heads"
    assert not report.fits and words in report.problems[-1] and "up to 4" in report.problems[-1]
    with pytest.raises(StartError, match=words):  # whoever fetches a model asks this once the description is there
        judge(tiny, num_ranks=5)
    with pytest.raises(StartError, match=words):
        start_engine(ServerConfig(model_id=str(tiny), device="cpu", num_shard=5))
