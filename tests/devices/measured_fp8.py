"""The pair of files of the published FP8 lines, and the measurements that the first one asks for."""

import json
from collections.abc import Sequence
from pathlib import Path

from driving import run, start

from text_generation_inference.types import GenerationRequest


def write_quant_config(
    model: Path, folder: Path, asked: Sequence[GenerationRequest], blocked: Sequence[str] = (), **more: object
) -> str:
    """The path of the second file. `asked`: what is measured, on a CPU."""
    stats = str(folder / "hqt_output" / "measure")
    for mode, name in (("MEASURE", "maxabs_measure"), ("QUANTIZE", "maxabs_quant")):
        fields = {"method": "HOOKS", "mode": mode, "observer": "maxabs", "scale_method": "maxabs_hw", **more}
        lists = {"allowlist": {"types": [], "names": []}, "blocklist": {"types": [], "names": list(blocked)}}
        (folder / f"{name}.json").write_text(json.dumps({**fields, **lists, "dump_stats_path": stats}))
    engine = start(model, device="cpu", quant_config=str(folder / "maxabs_measure.json"))
    run(engine, asked)
    engine.close()
    return str(folder / "maxabs_quant.json")
