"""Files of a measurement: our own read back, those of the toolkits as documented, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from text_generation_inference.errors import ResourceError, StartError
from text_generation_inference.quant.inc.config import CalibrationConfig, ScaleMethods, Selection
from text_generation_inference.quant.inc.files import (
    Node,
    check_writable,
    move_away,
    read_statistics,
    statistics_path,
    write_statistics,
)
from text_generation_inference.quant.inc.scales import GAUDI2, GAUDI3, METHODS
from text_generation_inference.quant.inc.static import StaticScales

ATTENTION = "model.layers.0.self_attn"
NODES = {
    f"{ATTENTION}.q_proj": Node([[3.5]], [], {"weight": [0.75]}),
    f"{ATTENTION}.k_cache": Node([[20.25]], [[20.25]]),
    "lm_head": Node([[0.1, 0.2, 0.3]], [], {"weight": [1.0, 2.0]}),
}


def write_inc(folder: Path, nodes: dict, name: str = "measure_hooks_maxabs.json", rank: int | None = None) -> Path:
    """As Intel Neural Compressor leaves it."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(json.dumps({"GlobalRank": rank, "LocalRank": rank, "Mode": "DynamicRange", "Nodes": nodes}))
    return path


def test_ours_is_read_back(tmp_path: Path) -> None:
    stats = tmp_path / "out" / "measure"
    path = write_statistics(stats, "maxabs", NODES)
    assert path == tmp_path / "out" / "measure_hooks_maxabs.json"
    assert read_statistics(stats, "maxabs") == NODES
    content = json.loads(path.read_text())
    assert content["Mode"] == "DynamicRange" and {"GlobalRank", "LocalRank", "Nodes"} <= content.keys()
    assert content["Nodes"][f"{ATTENTION}.q_proj"] == {"inputs": [[[3.5]]], "params": {"weight": [[0.75]]}}
    assert content["Nodes"]["lm_head"]["inputs"] == [[[0.1], [0.2], [0.3]]]  # a column of channels
    listed = json.loads((tmp_path / "out" / "measure_hooks_maxabs_mod_list.json").read_text())
    assert listed == list(NODES)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "measure_hooks_maxabs.json",
        "measure_hooks_maxabs_mod_list.json",
    ]


def test_theirs_is_read(tmp_path: Path) -> None:
    """One rank, with modules that have two inputs or outputs."""
    nodes = {
        f"{ATTENTION}.q_proj": {"inputs": [[[3.5]]], "params": {"weight": [[0.75]]}},
        f"{ATTENTION}.matmul_qk": {"inputs": [[[11.0]], [[20.25]]], "outputs": [[[80.0]]]},
        f"{ATTENTION}.k_cache": {"inputs": [[[20.25]]], "outputs": [[[20.25]]]},
    }
    write_inc(tmp_path, nodes)
    found = read_statistics(tmp_path / "measure", "maxabs")
    assert found[f"{ATTENTION}.q_proj"] == Node([[3.5]], [], {"weight": [0.75]})
    assert found[f"{ATTENTION}.matmul_qk"] == Node([[11.0], [20.25]], [[80.0]])


def test_ranks_are_joined(tmp_path: Path) -> None:
    name = f"{ATTENTION}.o_proj"
    for rank, (inputs, weight) in enumerate([(1.0, 0.5), (4.0, 0.25)]):
        node = {"inputs": [[[inputs]]], "params": {"weight": [[weight]]}}
        write_inc(tmp_path, {name: node}, f"measure_hooks_maxabs_{rank}_2.json", rank)
    assert read_statistics(tmp_path / "measure", "maxabs") == {name: Node([[4.0]], [], {"weight": [0.5]})}
    (tmp_path / "measure_hooks_maxabs_1_2.json").unlink()
    with pytest.raises(StartError, match=r"measure_hooks_maxabs_1_2.json is missing"):
        read_statistics(tmp_path / "measure", "maxabs")
    write_inc(tmp_path, {}, "measure_hooks_maxabs_0_4.json", 0)
    with pytest.raises(StartError, match=r"measurements of 2 and 4 ranks"):
        read_statistics(tmp_path / "measure", "maxabs")


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    np.savez(tmp_path / "measure_hooks_maxabs.npz", np.array([Bomb()], dtype=object))
    with pytest.raises(StartError, match=r"pickle, which is never opened: copy the .json"):
        read_statistics(tmp_path / "measure", "maxabs")
    assert not (tmp_path / "exploded").exists()


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"measure_hooks_maxabs.json, which a measurement writes. Run `text-gen"):
        read_statistics(tmp_path / "measure", "maxabs")


def test_a_folder_that_cannot_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of another user, who is not in the container."""

    def refuse(*given: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.stat", refuse)
    with pytest.raises(StartError, match=r"measure_hooks_maxabs\.json cannot be read: Permission denied"):
        read_statistics(tmp_path / "measure", "maxabs")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no measurement"),
        ('{"Mode": "Scale", "Nodes": {}}', "holds no measurement"),
        ('{"Mode": "DynamicRange", "Nodes": {"a": 1}}', "a must be an object"),
        ('{"Mode": "DynamicRange", "Nodes": {"a": {"inputs": [[[-1]]]}}}', "largest values are numbers"),
        ('{"Mode": "DynamicRange", "Nodes": {"a": {"inputs": [[[NaN]]]}}}', "largest values are numbers"),
        ('{"Mode": "DynamicRange", "Nodes": {"a": {"inputs": [["x"]]}}}', "largest values are numbers"),
        ('{"Mode": "DynamicRange", "Nodes": {"a": {"inputs": [[[1e39]]]}}}', "largest values are numbers"),
        (f'{{"Mode": "DynamicRange", "Nodes": {{"a": {{"inputs": [1{"0" * 400}]}}}}}}', "largest values are numbers"),
        (
            f'{{"Mode": "DynamicRange", "Nodes": {{"a": {{"inputs": {"[" * 99 + "1" + "]" * 99}}}}}}}',
            "largest values are",
        ),
        ('{"Mode": "DynamicRange", "Nodes": {"a": {"inputs": 3}}}', "`inputs` and `outputs` as lists"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_damaged_files(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "measure_hooks_maxabs.json").write_text(text)
    with pytest.raises(StartError, match=words):
        read_statistics(tmp_path / "measure", "maxabs")


def test_earlier_files_are_moved_away(tmp_path: Path) -> None:
    stats = tmp_path / "measure"
    assert move_away(stats) is None
    for _ in range(2):
        path = write_statistics(stats, "maxabs", NODES)
        (tmp_path / "other_hooks_maxabs.json").touch()
        folder = move_away(stats, now=0.0)
        assert folder is not None and folder.name.startswith("backup_measure_01-01_")
        assert not path.exists()
        assert (folder / path.name).exists() and (folder / "measure_hooks_maxabs_mod_list.json").exists()
    assert (tmp_path / "other_hooks_maxabs.json").exists()
    assert len(list(tmp_path.glob("backup_measure_*"))) == 2


def test_no_place_to_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for function in (check_writable, lambda stats: write_statistics(stats, "maxabs", NODES)):
        with pytest.raises(ResourceError, match=r"dump_stats_path"):
            function(tmp_path / "file" / "measure")


# -- scales from them ----------------------------------------------------------------------------------------------


def scales(tmp_path: Path, nodes: dict, fp8_max: float = 448.0, **settings: object) -> StaticScales:
    write_inc(tmp_path, nodes)
    return StaticScales.load(CalibrationConfig("config.json", stats=tmp_path / "measure", **settings), fp8_max)


def linear(inputs: float, weight: float = 1.0) -> dict:
    return {"inputs": [[[inputs]]], "params": {"weight": [[weight]]}}


def test_scales_of_a_matrix(tmp_path: Path) -> None:
    found = scales(tmp_path, {"a.o_proj": linear(100.0, 0.5)}).find(["a.o_proj"])
    assert found is not None
    assert (found[0].input_scale, found[0].measured_maximum, found[0].generation) == (1.0, 0.5, GAUDI3)  # 100 / 112
    found = scales(tmp_path, {"a.o_proj": linear(100.0)}, fp8_max=240.0).find(["a.o_proj"])
    assert found is not None and (found[0].input_scale, found[0].generation) == (16.0, GAUDI2)  # 100 / 60
    found = scales(tmp_path, {"a.o_proj": linear(100.0)}, generation=GAUDI2).find(["a.o_proj"])
    assert found is not None and found[0].input_scale == 16.0
    with pytest.raises(StartError, match=r"`device_for_scales` GAUDI3 reaches 448.* end at 240 on this device"):
        scales(tmp_path, {"a.o_proj": linear(100.0)}, fp8_max=240.0, generation=GAUDI3)


def test_matrices_that_are_multiplied_at_once(tmp_path: Path) -> None:
    nodes = {"a.q_proj": linear(1.0), "a.k_proj": linear(2.0), "a.v_proj": linear(3.0)}
    names = list(nodes)
    assert scales(tmp_path, nodes).find(names) is not None
    assert scales(tmp_path, nodes, blocked=Selection(names=("k_proj",))).find(names) is None


def test_fused_names_of_other_engines(tmp_path: Path) -> None:
    nodes = {"a.qkv_proj": linear(7.0), "m.gate_up_proj": linear(3.0), "a.attn.impl.k_cache": linear(5.0)}
    nodes["a.attn.impl.v_cache"] = linear(6.0)
    found = scales(tmp_path, nodes)
    for matrix, inputs in (("a.v_proj", 7.0), ("m.up_proj", 3.0)):
        one = found.find([matrix])
        assert one is not None and one[0].measured_maximum is None
        assert one[0].input_scale == 2.0 ** (-4 if inputs == 7.0 else -5)  # 7 / 112 and 3 / 112
    assert found.cache_scale("a", "k") == found.cache_scale("a", "v") == 0.0625
    assert found.quantizes_cache(["a"])


def test_unmeasured_modules(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"has no inputs of a.down_proj.*blocklist"):
        scales(tmp_path, {}).find(["a.down_proj"])
    assert scales(tmp_path, {}, ignores_unmeasured=True).find(["a.down_proj"]) is None


def test_cache(tmp_path: Path) -> None:
    side = {"inputs": [[[14.0]]]}
    whole = {"l.0.k_cache": side, "l.0.v_cache": side, "l.1.k_cache": side, "l.1.v_cache": side}
    layers = ["l.0", "l.1"]
    assert scales(tmp_path, whole).quantizes_cache(layers)
    assert scales(tmp_path, whole).cache_scale("l.1", "v") == 0.125
    assert not scales(tmp_path, whole, blocked=Selection(types=("KVCache",))).quantizes_cache(layers)
    assert not scales(tmp_path, whole, blocked=Selection(names=(r"l\.1",))).quantizes_cache(layers)
    assert not scales(tmp_path, whole, allowed=Selection(types=("Linear",))).quantizes_cache(layers)
    assert not scales(tmp_path, {}).quantizes_cache(layers)  # measured without such a cache
    del whole["l.1.v_cache"]
    with pytest.raises(StartError, match=r"has no inputs of l.1.v_cache"):
        scales(tmp_path, whole).quantizes_cache(layers)


def test_files_have_documented_names(tmp_path: Path) -> None:
    assert statistics_path(Path("out/measure"), "maxabs", "_3_8").name == "measure_hooks_maxabs_3_8.json"


# -- products of attention -------------------------------------------------------------------------------------------

MATMULS = {
    f"{ATTENTION}.matmul_qk": Node([[12.0], [24.0]], []),
    f"{ATTENTION}.matmul_av": Node([[1.0], [6.0]], []),
}
FUSED = {f"{ATTENTION}.attn.fused_scaled_dot_product_attention": Node([[12.0], [48.0], [3.0]], [[5.0], [0.5]])}
_FULL = 448 * 0.25  # with the margin of inputs


def find_scales(
    nodes: dict[str, Node], types: tuple[str, ...] = (), names: tuple[str, ...] = ()
) -> tuple[float, ...] | None:
    """Those of queries, keys, weights and values, as largest values. `types`, `names`: that are blocked."""
    exact = ScaleMethods(METHODS["maxabs_arbitrary"])
    config = CalibrationConfig("c", "QUANTIZE", blocked=Selection(types, names), methods=exact)
    found = StaticScales(config, nodes, GAUDI3).attention_scales(ATTENTION, 0.125)
    if found is None:
        return None
    return tuple(round(each * _FULL, 4) for each in (found.query, found.key, found.weight, found.value))


def test_products_of_attention() -> None:
    """As two products, as one fused op, or both: then whatever is larger. The largest weight is 1 here, whatever it was
    where all are divided by their sum."""
    assert find_scales(MATMULS) == (12.0, 24.0, 1.0, 6.0)
    assert find_scales(FUSED) == (12.0, 48.0, 1.0, 3.0)
    small = {**MATMULS, f"{ATTENTION}.matmul_av": Node([[0.01], [6.0]], [])}
    assert find_scales(small) == find_scales(MATMULS)
    assert find_scales(MATMULS | FUSED) == (12.0, 48.0, 1.0, 6.0)
    first, second = ({name: node} for name, node in MATMULS.items())
    assert find_scales(first) is None and find_scales(second) is None and find_scales(NODES) is None
    assert find_scales(second | {f"{ATTENTION}.matmul_qk": Node([[12.0]], [])}) is None
    assert find_scales(MATMULS, types=("Matmul",)) is None
    assert find_scales(MATMULS | FUSED, types=("Matmul",)) == find_scales(FUSED)
    assert find_scales(MATMULS | FUSED, names=("self_attn",)) is None


def test_queries_that_were_scaled_before_they_were_measured() -> None:
    """Engines that have the products deeper below the attention multiply queries, not scores, with the scale (1/8)."""
    deeper = {name.replace("self_attn.", "self_attn.attn.impl."): node for name, node in MATMULS.items()}
    assert find_scales(deeper) == (96.0, 24.0, 1.0, 6.0)


def test_all_layers_or_none() -> None:
    other = "model.layers.1.self_attn"
    both = MATMULS | {name.replace("layers.0", "layers.1"): node for name, node in MATMULS.items()}

    def check(nodes: dict[str, Node], **more: Any) -> None:
        StaticScales(CalibrationConfig("c", "QUANTIZE", **more), nodes, GAUDI3).check_attentions([ATTENTION, other])

    check(both), check(NODES), check(MATMULS, ignores_unmeasured=True)
    check(MATMULS, blocked=Selection(names=(r"layers\.1\.",)))
    with pytest.raises(StartError, match=r"has no inputs of model.layers.1.self_attn.matmul_qk. .* type Matmul"):
        check(MATMULS)


def test_the_head() -> None:
    """Left as it is by those who have not measured it, as many published lists say."""
    config = CalibrationConfig("c", "QUANTIZE")
    assert StaticScales(config, NODES, GAUDI3).find_head() is not None
    assert StaticScales(config, MATMULS, GAUDI3).find_head() is None
    blocked = CalibrationConfig("c", "QUANTIZE", blocked=Selection(names=("lm_head",)))
    assert StaticScales(blocked, NODES, GAUDI3).find_head() is None
