"""Prometheus' text: samples of several replicas as one page, told apart by a label; and single values read from it.

Families stay together, as the format asks, each with its HELP and TYPE once.
"""

from collections.abc import Iterable, Mapping

LABEL = "replica"


def join(pages: Mapping[str, str]) -> str:
    """The pages of replicas by their names as one, every sample with the label `replica`."""
    heads: dict[str, list[str]] = {}  # by family, in the order of the first page that has it
    samples: dict[str, list[str]] = {}
    for name, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith("#"):
                _, kind, subject, *_ = line.split(" ", 3)
                if subject != family:
                    family = subject
                    samples.setdefault(family, [])
                head = heads.setdefault(family, [])
                if not any(known.startswith(f"# {kind} ") for known in head):
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(_with_label(line, name))
    parts = ("\n".join([*heads.get(family, []), *lines]) for family, lines in samples.items())
    return "\n\n".join(parts) + "\n" if samples else ""


def _with_label(sample: str, replica: str) -> str:
    name, brace, labels = sample.partition("{")
    if not brace:
        name, _, value = sample.partition(" ")
        return f'{name}{{{LABEL}="{replica}"}} {value}'
    if f'{LABEL}="' in labels:  # one of several engines of that replica
        return f"{name}{{{labels}".replace(f'{LABEL}="', f'{LABEL}="{replica}/', 1)
    return f'{name}{{{LABEL}="{replica}",{labels}'


def sums(page: str, names: Iterable[str]) -> dict[str, float]:
    """Values of metrics, summed where labels tell several apart; those that are not there yet are 0."""
    found = dict.fromkeys(names, 0.0)
    for line in page.splitlines():
        name = line.partition(" ")[0].partition("{")[0]
        if name in found:
            found[name] += float(line.rpartition(" ")[2])
    return found
