"""What QUANT_CONFIG makes of a configuration: an engine that measures, or one that serves with measured scales.

Level 7.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from tgi.config import ServerConfig
from tgi.devices.device import Device
from tgi.errors import StartError
from tgi.models.decoder import CausalLM
from tgi.models.spec import DecoderSpec
from tgi.runner.measure import Recorder
from tgi.weights.calibration import StaticScales
from tgi.weights.calibration_config import CalibrationConfig, read_calibration
from tgi.weights.calibration_files import statistics_path
from tgi.weights.quantization import Quantization

FP8_CACHE = "fp8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A configuration with what follows from `quant_config`."""

    config: ServerConfig
    file: CalibrationConfig | None = None

    @property
    def measures(self) -> bool:
        return self.file is not None and self.file.mode == "MEASURE"

    @property
    def quantizes(self) -> bool:
        return self.file is not None and self.file.mode == "QUANTIZE"

    def describe(self) -> list[str]:
        """Notes for the log."""
        if self.file is None:
            return []
        path = statistics_path(self.file.stats, self.file.observer)
        notes = {
            "MEASURE": f"measuring: the largest values go to {path}",
            "QUANTIZE": f"static scales from {path}",
            "NONE": "QUANT_CONFIG has no effect: its `mode` is NONE",
        }
        return [notes[self.file.mode], *self.file.notes]


def read_quant_config(config: ServerConfig) -> Calibrated:
    """Raises `StartError` if the file cannot be used, or other settings say something else."""
    if not config.quant_config:
        return Calibrated(config)
    file = read_calibration(Path(config.quant_config))
    if file.mode != "MEASURE":
        return Calibrated(config, file)
    if config.kv_cache_dtype is not None:
        raise StartError("`kv_cache_dtype` cannot be set while measuring: values are measured before they are rounded")
    # Hooks between modules see passes that run op by op.
    changes = {"cuda_graphs": [], "enable_hpu_graph": False, "bucketing": None}
    return Calibrated(msgspec.structs.replace(config, **changes), file)


def quantize_spec(calibrated: Calibrated, spec: DecoderSpec, device: Device) -> Quantization | None:
    """How matrices are stored and loaded."""
    file, stored = calibrated.file, spec.quantization
    if file is None or file.mode == "NONE":
        return stored
    if stored is not None:
        raise StartError(
            "`quant_config` is for models in bfloat16, float16 or float32, but this one is stored in FP8"
            f" ({stored.method}). Leave QUANT_CONFIG out."
        )
    if calibrated.measures:
        return None
    scales = StaticScales.load(file, getattr(device, "fp8_max", 448.0))
    return Quantization("static", on_loading=True, static=scales)


def choose_cache(config: ServerConfig, spec: DecoderSpec, model: CausalLM) -> str | None:
    """The setting `kv_cache_dtype`, or what measured scales make of it."""
    static = spec.quantization.static if spec.quantization is not None else None
    if config.kv_cache_dtype is not None or static is None:
        return config.kv_cache_dtype
    attentions = [f"model.{layer.name}.{layer.attention.name}" for layer in model.model.layers]
    return FP8_CACHE if static.quantizes_cache(attentions) else None


def make_recorder(calibrated: Calibrated, model: CausalLM, block_size: int) -> Recorder | None:
    if calibrated.file is None or not calibrated.measures:
        return None
    return Recorder(model, calibrated.file, block_size)
