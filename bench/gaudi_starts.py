"""Every published command line for Gaudi, whole: the launcher with its own words, limits and number of cards, to a
first answer and a second one that begins like the first, on the stand-in of `tests/hpu_emulated` (on a card: `--card`).

    .venv/bin/python bench/gaudi_starts.py [--only EXPRESSION] [--cards N] [--timeout SECONDS]

Weights are tiny and random, of the same architecture, with as many positions as the line asks for, or as the model has;
prompts are token ids, of models that see a picture and words. FP8 lines are measured first, on the CPU. Lines that
differ in nothing but the name of a model of the same kind are one start. What fails is shown with the end of its log,
and the status is 1. Nothing is timed: the stand-in says nothing about a card's speed.
"""

import argparse
import base64
import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / folder) for folder in ("unit", "models", "devices", "api")]

from driving import random_prompts  # noqa: E402
from gaudi import STAND_IN  # noqa: E402
from gaudi_commands import COMMANDS, FP8, IMAGE, KINDS, POSITIONS, Command, launch  # noqa: E402
from gaudi_models import REFUSED, make_model, measure, sees  # noqa: E402
from serving import Server  # noqa: E402
from vision_oracle import draw  # noqa: E402

NEW = 8


def find_model(known: dict[tuple[str, int, bool], Path], command: Command, folder: Path) -> Path:
    kind, positions, is_split = KINDS[command.model], POSITIONS.get(command.model, 8192), cards_of(command) > 1
    if (kind, positions, is_split) not in known:
        place = folder / f"{kind}-{positions}-{is_split}"
        known[kind, positions, is_split] = make_model(kind, place, positions=positions, is_split=is_split)
    return known[kind, positions, is_split]


def ask(command: Command) -> list[str]:
    """Two texts, of which the second begins like the first: token ids, of a model that sees a picture and words."""
    if sees(KINDS[command.model]):
        kept = io.BytesIO()
        draw(84, 56).save(kept, "PNG")
        picture = f"![](data:image/png;base64,{base64.b64encode(kept.getvalue()).decode()})"
        return [f"{picture} What is this a picture of?", f"{picture} What is this a picture of? And what not?"]
    first = random_prompts(200, [min(command.limits[0], 300) - 4], seed=3)[0]
    return [",".join(map(str, ids)) for ids in (first, [*first, 7, 9])]


class Found(NamedTuple):
    problem: str = ""  # nothing, or what went wrong
    planned: int = 0  # shapes
    captured: int = 0  # of these, graphs


def cards_of(command: Command) -> int:
    return launch(command).config.num_shard or 1


def run(command: Command, model: Path, folder: Path, timeout: float, card: bool) -> Found:
    given = {**IMAGE, **dict(item.split("=", 1) for item in command.environment.split())}
    kind = KINDS[command.model]
    given |= {"HF_HOME": str(folder)} | ({} if sees(kind) else {"SKIP_TOKENIZER_IN_TGI": "true"})
    if FP8 in command.environment:
        given["QUANT_CONFIG"] = measure(kind, model, folder)
    if not card:
        given["PYTHONPATH"] = os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])
    words = command.arguments.split()
    running = Server("--model-id", str(model), *words, wait=False, cache=folder, **given)
    try:
        running.wait_until_serving(timeout)
        with running.client() as client:
            for text in ask(command):
                body = {"inputs": text, "parameters": {"max_new_tokens": NEW, "details": True}}
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


def what_starts(command: Command) -> tuple[object, ...]:
    """All that a start here depends on: two lines that have it in common are one start."""
    environment = tuple(sorted(word for word in command.environment.split() if "TOKEN=hf" not in word))
    return KINDS[command.model], POSITIONS.get(command.model), environment, command.arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="command lines whose name matches this expression")
    parser.add_argument("--cards", type=int, help="command lines for so many cards")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a start and for an answer")
    parser.add_argument("--card", action="store_true", help="with Intel's own software instead of the stand-in")
    options = parser.parse_args()
    known: dict[tuple[str, int, bool], Path] = {}
    started: dict[tuple[object, ...], str] = {}
    failed = 0
    print("| command line | cards | shapes | graphs | |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as root:
        for number, (name, command) in enumerate(COMMANDS.items()):
            if not command.model or options.cards not in (None, cards_of(command)):
                continue
            if not re.search(options.only, name):
                continue
            if (same := started.setdefault(what_starts(command), name)) != name:
                print(f"| {name} | {cards_of(command)} | | | the same start as `{same}` |", flush=True)
                continue
            folder = Path(root) / str(number)
            folder.mkdir()
            model = find_model(known, command, Path(root))
            found = run(command, model, folder, options.timeout, options.card)
            if KINDS[command.model] in REFUSED:
                said = "not served yet" in found.problem
                found, word = (Found(), "refused") if said else (Found(found.problem or "not refused"), "FAILED")
            else:
                word = "FAILED" if found.problem else "answered"
            failed += bool(found.problem)
            row = (name, cards_of(command), found.planned, found.captured, word)
            print(f"| {' | '.join(map(str, row))} |" + (f"\n{found.problem}" if found.problem else ""), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
