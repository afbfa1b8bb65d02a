"""The published command lines for Gaudi, from their words to a first answer, on the stand-in: tiny random weights of the
same architecture, and smaller limits. Lines that differ in nothing that is started are started once; `bench/gaudi_starts.py`
starts each whole, with its own limits and cards."""

import os
from pathlib import Path

import msgspec
import pytest
from driving import make_request, run, start
from gaudi import STAND_IN, use_stand_in
from gaudi_commands import COMMANDS, FP8, IDEFICS, IMAGE, KINDS, LLAMA2_70B, SHARDED, Command, launch
from gaudi_models import BLOCKED, NEW, PROMPTS, REFUSED, WITH_OUTPUTS, make_model, measure, sees
from serving import Server

from text_generation_inference.config import ServerConfig, choose_strategy
from text_generation_inference.engine.build import start_engine
from text_generation_inference.errors import StartError
from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.layers.attention import Attention
from text_generation_inference.models.registry import judge
from text_generation_inference.quant.method import Matrix

MOST = {"max_input_tokens": 160, "max_total_tokens": 192, "max_batch_size": 2, "max_batch_prefill_tokens": 192}


def kind_of(command: Command) -> tuple[object, ...]:
    """What of a command line decides which code runs, with small limits."""
    config = launch(command).config
    strategy = choose_strategy(config)
    return KINDS[command.model], FP8 in command.environment, config.pt_hpu_lazy_mode, strategy


# Of those in FP8 the ones whose layers differ: plain ones, with layer norms and biases, experts, latents, pictures; and
# the ones with files of their own.
IN_FP8 = ("Llama", "GPTBigCode", "llava_next", *BLOCKED, *WITH_OUTPUTS)
STARTS = {
    kind_of(command): name
    for name, command in reversed(COMMANDS.items())
    if command.model
    and KINDS[command.model] not in REFUSED
    and (FP8 not in command.environment or KINDS[command.model] in IN_FP8)
}


@pytest.fixture(scope="module")
def models() -> dict[str, Path]:
    """Folders of the architectures met so far, each with its measurements."""
    use_stand_in()
    return {}


def find_model(models: dict[str, Path], kind: str, folder: Path) -> Path:
    if kind not in models:
        models[kind] = make_model(kind, folder / kind, positions=2048 if sees(kind) else 512)
    return models[kind]


def scale_down(config: ServerConfig, **changes: object) -> ServerConfig:
    limits = {name: min(getattr(config, name) or most, most) for name, most in MOST.items()}
    sizes = ("batch_bucket_size", "prefill_batch_bucket_size", "pad_sequence_to_multiple_of")
    small = {name: None if getattr(config, name) is None else min(getattr(config, name), 64) for name in sizes}
    rest = {"max_batch_total_tokens": None, "num_shard": 1, "sharded": False, "prof_step": 0}
    return msgspec.structs.replace(config, **{**limits, **small, **rest, **changes})


@pytest.mark.parametrize("name", STARTS.values())
def test_a_published_command_answers(name: str, models: dict[str, Path], tmp_path: Path, device_name: str) -> None:
    command = COMMANDS[name]
    if device_name != "cpu" or "LAZY_MODE=0" in command.environment:
        pytest.skip("with the stand-in, in lazy mode; test_hpu.py has eager mode")
    kind = KINDS[command.model]
    folder = find_model(models, kind, tmp_path)
    judge(folder, num_ranks=min(2, launch(command).config.num_shard or 1))
    changes: dict[str, object] = {"model_id": str(folder), "cache_dir": str(tmp_path)}
    is_fp8 = FP8 in command.environment
    changes |= {"quant_config": measure(kind, folder, tmp_path)} if is_fp8 else {"dtype": "float32"}
    config = scale_down(launch(command).config, **changes)
    asked = [make_request(n, prompt, NEW) for n, prompt in enumerate(PROMPTS)]
    again = [make_request(10, [*PROMPTS[0], 7, 9], NEW)]  # begins like the first
    engine = start_engine(config)
    count = engine.rank.device.bridge.count_fall_backs
    fallen = count()
    try:
        found = [*run(engine, asked), *run(engine, again)]
        assert count() == fallen, "done on the host"
        assert [len(output.token_ids) for output in found] == [NEW] * 4
        assert [output.reason for output in found] == ["length"] * 4
        assert any(f"bucket plan, {choose_strategy(config)}" in note for note in engine.notes)
        assert engine.facts.device == "hpu (emulated)" and engine.rank.bucket_stats.num_unplanned == 0
        assert engine.loop.scheduler.stats.num_cached_prompt_tokens == 128
        if is_fp8:
            modules = [module for _, module in engine.rank.runner.model.walk()]
            assert sum(isinstance(getattr(module, "weight", None), Fp8Weight) for module in modules) > 4
            attentions = [module for module in modules if isinstance(module, Attention)]  # none where latents are kept
            blocked = BLOCKED.get(kind, ())
            left_out = {"self_attn", "matmul_qk"} & {*blocked}
            assert all((attention.in_fp8 is None) == bool(left_out) for attention in attentions)
            heads = [module for module in modules if isinstance(module, Matrix) and module.is_head]
            in_fp8 = [
                head for head in heads if isinstance(head.weight, Fp8Weight)
            ]  # a tied one that is left out is none
            assert len(in_fp8) == ("lm_head" not in blocked)
            return
    finally:
        engine.close()
    plain = start(folder, device="cpu", custom_kernels=False)
    assert [output.token_ids for output in found] == [output.token_ids for output in run(plain, asked + again)]
    plain.close()


MANY = sorted({KINDS[command.model] for command in COMMANDS.values() if command.model and SHARDED in command.arguments})


@pytest.mark.parametrize("kind", MANY)
def test_models_of_eight_cards_can_be_split(kind: str, tmp_path: Path) -> None:
    judge(make_model(kind, tmp_path / kind, is_split=True), num_ranks=8)


def test_a_published_model_that_is_not_served_says_so(models: dict[str, Path], tmp_path: Path) -> None:
    command = COMMANDS[f"3.2 {IDEFICS} bf16"]
    folder = make_model(KINDS[IDEFICS], tmp_path / "idefics")
    with pytest.raises(StartError, match="reads images in a way that is not served yet"):
        start_engine(scale_down(launch(command).config, model_id=str(folder)))


def test_a_model_that_is_missing_is_an_error(models: dict[str, Path], tmp_path: Path) -> None:
    """Never the embedded one in its place."""
    config = scale_down(launch(COMMANDS["3.2 first start"]).config, model_id=str(tmp_path / "not-there"))
    with pytest.raises(StartError, match="there is no such file or folder"):
        start_engine(config)
    nameless = COMMANDS["2.0.4 no model"]
    with pytest.raises(StartError, match="--model-id is missing"):
        launch(nameless)


@pytest.mark.one_rank
def test_a_whole_command(models: dict[str, Path], tmp_path: Path, device_name: str) -> None:
    """The launcher with the published words, but for limits and the number of cards: HCCL's part is played by gloo."""
    if device_name != "cpu":
        pytest.skip("with the stand-in")
    command = COMMANDS[f"3.2 {LLAMA2_70B} fp8"]
    folder = find_model(models, "Llama", tmp_path)
    words = command.arguments.replace(SHARDED, "--sharded true --num-shard 2").split()
    for flag, most in (("input-tokens", 160), ("total-tokens", 192), ("batch-size", 2), ("batch-prefill-tokens", 256)):
        words[words.index(f"--max-{flag}") + 1] = str(most)
    given = {**IMAGE, **dict(item.split("=", 1) for item in command.environment.split())}
    given |= {"SKIP_TOKENIZER_IN_TGI": "true", "QUANT_CONFIG": measure("Llama", folder, tmp_path)}
    given |= {"MAX_TOTAL_TOKENS": "192", "BATCH_BUCKET_SIZE": "2", "HF_HOME": str(tmp_path)}
    paths = os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])
    running = Server("--model-id", str(folder), *words, cache=tmp_path, **{**given, "PYTHONPATH": paths})
    try:
        with running.client() as client:
            body = {"inputs": ",".join(map(str, PROMPTS[0])), "parameters": {"max_new_tokens": NEW, "details": True}}
            answer = client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["details"]["generated_tokens"] == NEW
            assert client.get("/info").json()["model_id"] == folder.name
        running.wait_for(lambda: "tgi_bucket_unplanned" in running.metrics(), "the engine's figures")
        assert running.metrics()["tgi_bucket_unplanned"] == 0
    finally:
        status = running.stop()
    assert status == 0, running.log[-3000:]
