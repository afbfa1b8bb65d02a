#!/usr/bin/env python3
"""Write the table of architectures in docs/models.md again, from the registry and the files of the families."""

from importlib import import_module
from pathlib import Path

import transformers

from text_generation_inference.models.refused import REFUSED, Unserved
from text_generation_inference.models.registry import ARCHITECTURES, SEEING
from text_generation_inference.weights.gguf_architectures import ARCHITECTURES as GGUF
from text_generation_inference.weights.model_files import PICKLED, TOKENIZERS, explain_pickles

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
START, END = "<!-- architectures: tools/models_table.py -->\n", "<!-- end of architectures -->\n"
REFUSED_START, REFUSED_END = "<!-- refused: tools/models_table.py -->\n", "<!-- end of refused -->\n"
HUB_START, HUB_END = "<!-- hub: tools/models_table.py -->\n", "<!-- end of hub -->\n"


def table() -> str:
    """Every architecture with the file that builds it, what that is, its names in GGUF files, and how it is proven."""
    titles = ("Architecture", "File", "What it is", "GGUF", "Variants tested", "Proven against")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += [row(architecture) for architecture in sorted(ARCHITECTURES, key=str.lower)]
    lines += [seeing_row(architecture) for architecture in sorted(SEEING, key=str.lower)]
    return "\n".join(lines) + "\n"


def seeing_row(architecture: str) -> str:
    name = f"vision.{SEEING[architecture]}"
    family = import_module(f"text_generation_inference.models.{name}")
    about = (family.__doc__ or "").strip().partition("\n")[0]
    return f"| `{architecture}` | `{name}` | {about} | | with pictures | `transformers`, all paths |"


def row(architecture: str) -> str:
    name = ARCHITECTURES[architecture]
    family = import_module(f"text_generation_inference.models.{name}")
    about = (family.__doc__ or "").strip().partition("\n")[0]
    is_known = hasattr(transformers, architecture)
    is_alone = is_known and architecture not in getattr(family, "TINIES", {})
    variants = ", ".join(getattr(family, "VARIANTS", {})) if is_alone else ""
    proof = "`transformers`, all paths" if is_known else "rewritten checkpoints or formulas, one pass"
    return f"| `{architecture}` | `{name}` | {about} | {_gguf_names(architecture)} | {variants} | {proof} |"


def _gguf_names(architecture: str) -> str:
    return ", ".join(f"`{name}`" for name, each in GGUF.items() if each.class_name == architecture)


def refused_table() -> str:
    """Every reason with the architectures that it is of."""
    names: dict[Unserved, list[str]] = {}
    for name, refusal in REFUSED.items():
        names.setdefault(refusal, []).append(f"`{name}`")
    rows = [f"| {', '.join(found)} | {each.reason}. {each.instead} |" for each, found in names.items()]
    return "\n".join(["| Architectures | Why, and what to use instead |", "|---|---|", *rows]) + "\n"


def hub_table() -> str:
    """Families whose repositories lack files that others have, and the command that converts their weights."""
    rows = [f"| {name} | pickled: convert them once | {text or '`tokenizer.json`'} |" for name, text in PICKLED.items()]
    rows += [f"| {name} | safetensors | {text} |" for name, text in TOKENIZERS.items()]
    command = explain_pickles("ORGANISATION/NAME").partition("serve the folder NAME: ")[2].replace(" && ", "\n")
    lines = ["| Family | Weights | Tokenizer |", "|---|---|---|", *rows, "", "```bash", command, "```"]
    return "\n".join(lines) + "\n"


def write() -> None:
    parts = (
        (START, END, table()),
        (REFUSED_START, REFUSED_END, refused_table()),
        (HUB_START, HUB_END, hub_table()),
    )
    for start, end, text in parts:
        before, _, rest = PAGE.read_text().partition(start)
        PAGE.write_text(before + start + text + end + rest.partition(end)[2])


if __name__ == "__main__":
    write()
