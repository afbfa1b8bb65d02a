"""The files of a measurement: names, layout, reading and writing.

`<prefix>_hooks_<observer>[_<rank>_<world>].json` holds the largest values of each module's tensors, and
`..._mod_list.json` the modules. Toolkits write an `.npz` with the same content as a pickle beside it: that is never
opened, and none is written.
"""

import json
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from text_generation_inference.errors import ResourceError, StartError

Maxima = list[float]  # of one tensor: a single one, or one per channel
_DEEPEST = 8  # lists around a number
_SHOWN = 40  # characters of a wrong value in an error
_LARGEST = (2 - 2**-23) * 2.0**127  # of float32


@dataclass(slots=True)
class Node:
    """What was measured of one module."""

    inputs: list[Maxima] = field(default_factory=list[Maxima])
    outputs: list[Maxima] = field(default_factory=list[Maxima])
    params: dict[str, Maxima] = field(default_factory=dict[str, Maxima])


Nodes = dict[str, Node]  # by path of the module


def statistics_path(stats: Path, observer: str, suffix: str = "") -> Path:
    return stats.with_name(f"{stats.name}_hooks_{observer}{suffix}.json")


def write_statistics(stats: Path, observer: str, nodes: Nodes) -> Path:
    """Write the statistics of a single rank, whole or not at all."""
    path = statistics_path(stats, observer)
    content = {
        "GlobalRank": None,
        "LocalRank": None,
        "Mode": "DynamicRange",
        "Nodes": {name: _to_json(node) for name, node in nodes.items()},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, content)
        _replace(path.with_name(f"{path.stem}_mod_list.json"), list(nodes))
    except OSError as error:
        raise ResourceError(
            f"the measured values cannot be written to {path}: {error.strerror}. `dump_stats_path` in the configuration"
            " says where they go."
        ) from None
    return path


def check_writable(stats: Path) -> None:
    """Raise `ResourceError` now rather than when everything is measured."""
    try:
        stats.parent.mkdir(parents=True, exist_ok=True)
        probe = stats.with_name(f".{stats.name}.{os.getpid()}")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ResourceError(f"`dump_stats_path` {stats}: nothing can be written there: {error.strerror}") from None


def move_away(stats: Path, now: float | None = None) -> Path | None:
    """Put the files of an earlier measurement into a folder beside them; None: there are none."""
    found = sorted(stats.parent.glob(f"{_escape(stats.name)}_hooks_*"))
    if not found:
        return None
    day = time.strftime("%d-%m_%H-%M-%S", time.localtime(now))
    folder = stats.with_name(f"backup_{stats.name}_{day}")
    number = 1
    while folder.exists():
        number += 1
        folder = stats.with_name(f"backup_{stats.name}_{day}_{number}")
    try:
        folder.mkdir()
        for file in found:
            file.rename(folder / file.name)
    except OSError as error:
        raise ResourceError(f"files of an earlier measurement cannot be moved to {folder}: {error.strerror}") from None
    return folder


def read_statistics(stats: Path, observer: str) -> Nodes:
    """What was measured: of one rank, or of all ranks of a measurement, the largest values of each tensor."""
    path = statistics_path(stats, observer)
    try:
        is_there = path.is_file()
    except OSError as error:  # of a folder that somebody else may look into, for one
        raise _unreadable(path, error) from None
    if is_there:
        return _read(path)
    pattern = re.compile(rf"{re.escape(stats.name)}_hooks_{re.escape(observer)}_(\d+)_(\d+)\.json")
    found = [(match, file) for file in sorted(stats.parent.glob("*.json")) if (match := pattern.fullmatch(file.name))]
    if not found:
        raise StartError(_explain_missing(path))
    worlds = {int(match[2]) for match, _ in found}
    if len(worlds) > 1:
        raise StartError(
            f"{stats.parent} has measurements of {' and '.join(map(str, sorted(worlds)))} ranks. Keep those of one."
        )
    world = worlds.pop()
    if observer == "maxabs_per_channel":
        raise StartError(f"{stats.parent} has values per channel of {world} ranks, which cannot be joined. Use maxabs.")
    missing = set(range(world)) - {int(match[1]) for match, _ in found}
    if missing:
        lacking = statistics_path(stats, observer, f"_{min(missing)}_{world}")
        raise StartError(f"{lacking} is missing: the files of all {world} ranks belong together")
    nodes: Nodes = {}
    for _, file in found:
        for name, node in _read(file).items():
            nodes[name] = _largest(nodes[name], node, f"{file}: {name}") if name in nodes else node
    return nodes


def _explain_missing(path: Path) -> str:
    text = f"there is no {path}, which a measurement writes."
    if any(path.parent.glob(f"{_escape(path.stem)}*.npz")):
        return f"{text} There is an .npz, but it holds a pickle, which is never opened: copy the .json from beside it."
    return (
        f"{text} Run `text-generation-server measure` with a configuration that has the same `dump_stats_path` first."
    )


def _read(path: Path) -> Nodes:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise StartError(f"{path} is not JSON: {error}. Measure again.") from None
    nodes = content.get("Nodes") if isinstance(content, dict) else None
    if not isinstance(nodes, dict) or content.get("Mode") != "DynamicRange":
        raise StartError(f"{path} holds no measurement: it must have `Mode` DynamicRange and `Nodes`")
    return {name: _from_json(value, f"{path}: {name}") for name, value in nodes.items()}


def _unreadable(path: Path, error: OSError) -> StartError:
    return StartError(f"{path} cannot be read: {error.strerror}")


def _to_json(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if node.inputs:
        found["inputs"] = [_columns(maxima) for maxima in node.inputs]
    if node.outputs:
        found["outputs"] = [_columns(maxima) for maxima in node.outputs]
    if node.params:
        found["params"] = {name: _columns(maxima) for name, maxima in node.params.items()}
    return found


def _columns(maxima: Maxima) -> list[list[float]]:
    return [[value] for value in maxima]


def _from_json(value: Any, place: str) -> Node:
    if not isinstance(value, dict):
        raise StartError(f"{place} must be an object")
    inputs, outputs, params = value.get("inputs") or [], value.get("outputs") or [], value.get("params") or {}
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not isinstance(params, dict):
        raise StartError(f"{place} must have `inputs` and `outputs` as lists and `params` as an object")
    return Node(
        [_maxima(tensor, f"{place}: inputs") for tensor in inputs],
        [_maxima(tensor, f"{place}: outputs") for tensor in outputs],
        {name: _maxima(tensor, f"{place}: {name}") for name, tensor in params.items()},
    )


def _maxima(value: Any, place: str, depth: int = 0) -> Maxima:
    """A number, or numbers in lists: tools differ in how many they put around one."""
    if isinstance(value, list) and value and depth < _DEEPEST:
        return [number for item in value for number in _maxima(item, place, depth + 1)]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        given = repr(value)[:_SHOWN]
        raise StartError(f"{place} holds {given}, but largest values are numbers from 0 to 3.4e38. Measure again.")
    return [float(value)]


def _largest(one: Node, other: Node, place: str) -> Node:
    def join(first: Maxima, second: Maxima) -> Maxima:
        if len(first) != len(second):
            raise StartError(f"{place}: ranks have different numbers of channels and cannot be joined")
        return [max(pair) for pair in zip(first, second, strict=True)]

    if (len(one.inputs), len(one.outputs), one.params.keys()) != (
        len(other.inputs),
        len(other.outputs),
        other.params.keys(),
    ):
        raise StartError(f"{place}: ranks have measured different tensors")
    return Node(
        [join(*pair) for pair in zip(one.inputs, other.inputs, strict=True)],
        [join(*pair) for pair in zip(one.outputs, other.outputs, strict=True)],
        {name: join(maxima, other.params[name]) for name, maxima in one.params.items()},
    )


def _replace(path: Path, content: object) -> None:
    """Whoever reads the file finds all of it, old or new."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=1), encoding="utf-8")
    part.replace(path)


def _escape(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)
