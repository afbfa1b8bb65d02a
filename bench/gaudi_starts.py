"""Every published command line for Gaudi, whole: the launcher with its own words, limits and number of cards, to a
first answer and a second one that begins like the first, on the stand-in of `tests/hpu_emulated` (on a card: `--card`).

    .venv/bin/python bench/gaudi_starts.py [--only TEXT] [--cards N] [--timeout SECONDS]

Weights are tiny and random, of the same architecture, with as many positions as the line asks for; prompts are token
ids. FP8 lines are measured first, on the CPU. What fails is shown with the end of its log, and the status is 1. Nothing
is timed: the stand-in says nothing about a card's speed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / folder) for folder in ("unit", "models", "devices", "api")]

from driving import make_tiny, random_prompts  # noqa: E402
from gaudi import STAND_IN  # noqa: E402
from gaudi_commands import ARCHITECTURE, COMMANDS, FP8, IMAGE, Command, launch  # noqa: E402
from serving import Server  # noqa: E402
from test_gaudi_starts import measure  # noqa: E402
from vision_oracle import make_oracle  # noqa: E402

NEW = 8
POSITIONS = {"max_position_embeddings": 8192}
HEADS = {"num_attention_heads": 8, "hidden_size": 64}  # one for each of eight cards


def find_model(known: dict[str, Path], architecture: str, folder: Path) -> Path:
    if architecture not in known:
        overrides = {"n_positions": 8192} if architecture == "GPTBigCode" else dict(POSITIONS)
        if architecture in ("Llama", "Falcon", "Qwen2"):
            overrides |= HEADS
        if architecture == "LlavaNext":
            known[architecture] = with_positions(make_oracle("llava_next", folder / architecture, HEADS).folder)
        else:
            known[architecture] = make_tiny(architecture, overrides, folder / architecture).folder
    return known[architecture]


def with_positions(folder: Path) -> Path:
    """As many as the line asks for: rotations have no weights."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= POSITIONS
    path.write_text(json.dumps(config))
    return folder


class Found(NamedTuple):
    problem: str = ""  # nothing, or what went wrong
    planned: int = 0  # shapes
    captured: int = 0  # of these, graphs


def cards_of(command: Command) -> int:
    return launch(command).config.num_shard or 1


def run(command: Command, model: Path, folder: Path, timeout: float, card: bool) -> Found:
    given = {**IMAGE, **dict(item.split("=", 1) for item in command.environment.split())}
    given |= {"SKIP_TOKENIZER_IN_TGI": "true", "HF_HOME": str(folder)}
    if FP8 in command.environment:
        given["QUANT_CONFIG"] = measure(model, folder)
    if not card:
        given["PYTHONPATH"] = os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])
    words = command.arguments.split()
    running = Server("--model-id", str(model), *words, wait=False, cache=folder, **given)
    try:
        running.wait_until_serving(timeout)
        longest = min(command.limits[0], 300)
        prompt = random_prompts(200, [longest - 4], seed=3)[0]
        with running.client() as client:
            for ids in (prompt, [*prompt, 7, 9]):
                body = {"inputs": ",".join(map(str, ids)), "parameters": {"max_new_tokens": NEW, "details": True}}
                answer = client.post("/generate", json=body, timeout=timeout)
                if answer.status_code != 200 or not answer.json()["details"]["generated_tokens"]:
                    return Found(answer.text)
        deadline = time.monotonic() + 30
        while "tgi_bucket_unplanned" not in (metrics := running.metrics()) and time.monotonic() < deadline:
            time.sleep(0.5)  # the engine tells its figures now and then
        unplanned = metrics["tgi_bucket_unplanned"]
        shapes = [int(metrics[f'tgi_bucket_shapes{{state="{state}"}}']) for state in ("planned", "captured")]
        return Found(f"{unplanned} shapes were not warmed up" if unplanned else "", *shapes)
    except Exception as error:
        return Found(f"{error}\n" + "\n".join(running.log.splitlines()[-5:]))
    finally:
        running.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="command lines whose name has this text")
    parser.add_argument("--cards", type=int, help="command lines for so many cards")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a start and for an answer")
    parser.add_argument("--card", action="store_true", help="with Intel's own software instead of the stand-in")
    options = parser.parse_args()
    known: dict[str, Path] = {}
    failed = 0
    print("| command line | cards | shapes | graphs | |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as root:
        for number, (name, command) in enumerate(COMMANDS.items()):
            if options.only not in name or not command.model or options.cards not in (None, cards_of(command)):
                continue
            folder = Path(root) / str(number)
            folder.mkdir()
            model = find_model(known, ARCHITECTURE[command.model], Path(root))
            found = run(command, model, folder, options.timeout, options.card)
            failed += bool(found.problem)
            row = (name, cards_of(command), found.planned, found.captured, "FAILED" if found.problem else "answered")
            print(f"| {' | '.join(map(str, row))} |" + (f"\n{found.problem}" if found.problem else ""), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
