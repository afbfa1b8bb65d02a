"""What QUANT_CONFIG makes of a configuration: an engine that measures, or one that serves with measured scales."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from text_generation_inference.config import ServerConfig
from text_generation_inference.devices.device import Device
from text_generation_inference.errors import StartError
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.models.model import Model
from text_generation_inference.quant.cache_scales import CacheScales
from text_generation_inference.quant.inc.config import CalibrationConfig, read_calibration
from text_generation_inference.quant.inc.files import check_writable, statistics_path
from text_generation_inference.quant.inc.measure import Recorder
from text_generation_inference.quant.inc.method import MeasuredFp8, MeasuredQuantization
from text_generation_inference.quant.inc.static import StaticScales
from text_generation_inference.quant.method import Matrix
from text_generation_inference.quant.quantization import Quantization

FP8_CACHE = "fp8_e4m3fn"
_SHOWN = 3  # matrices in a note


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A configuration with what follows from `quant_config`."""

    config: ServerConfig
    file: CalibrationConfig | None = None

    @property
    def measures(self) -> bool:
        return self.file is not None and self.file.mode == "MEASURE"

    def quantize(self, stored: Quantization | None, device: Device) -> Quantization | None:
        """How matrices are stored and loaded; `stored` is what the checkpoint says."""
        if self.file is None or self.file.mode == "NONE":
            return stored
        if stored is not None:
            raise StartError(
                "`quant_config` is for models in bfloat16, float16 or float32, but this one is stored in FP8"
                f" ({stored.method}). Leave QUANT_CONFIG out."
            )
        if self.measures:
            return None
        return MeasuredQuantization(StaticScales.load(self.file, device.fp8_max))

    def describe(self, quantization: Quantization | None, model: Model, ops: Ops) -> list[str]:
        """Notes for the log."""
        if self.file is None:
            return []
        path = statistics_path(self.file.stats, self.file.observer)
        static = measured_scales(quantization)
        if static is not None:
            origin = f"from {path}" if self.file.methods.need_statistics else "that are fixed"
            notes = [
                f"static scales {origin}: {_describe_matrices(static, model)}",
                *_describe_rest(static, model, ops),
            ]
        elif self.measures:
            notes = [f"measuring: the largest values go to {path}"]
        else:
            notes = ["QUANT_CONFIG has no effect: its `mode` is NONE"]
        return [*notes, *self.file.notes]


def read_quant_config(config: ServerConfig) -> Calibrated:
    """Raises `StartError` if the file cannot be used, or other settings say something else."""
    if not config.quant_config:
        return Calibrated(config)
    file = read_calibration(Path(config.quant_config))
    if file.mode != "MEASURE":
        return Calibrated(config, file)
    if config.kv_cache_dtype is not None:
        raise StartError("`kv_cache_dtype` cannot be set while measuring: values are measured before they are rounded")
    check_writable(file.stats)
    # Hooks between modules see passes that run op by op.
    changes = {"cuda_graphs": [], "enable_hpu_graph": False, "bucketing": None}
    return Calibrated(msgspec.structs.replace(config, **changes), file)


def measured_scales(quantization: Quantization | None) -> StaticScales | None:
    return quantization.scales if isinstance(quantization, MeasuredQuantization) else None


def choose_cache(config: ServerConfig, quantization: Quantization | None, model: Model) -> str | None:
    """The setting `kv_cache_dtype`, or what measured scales make of it. Scales that nothing has are refused."""
    static = measured_scales(quantization)
    if config.kv_cache_dtype is not None or static is None:
        return config.kv_cache_dtype
    attentions = _list_attentions(model)
    static.check_attentions(attentions)
    if static.quantizes_cache(attentions):
        return FP8_CACHE
    # Of another model's measurement the head alone may fit: no reason to serve with it.
    heads = [] if static.config.ignores_unmeasured else _rounded_heads(model)
    if not (heads or model.fp8_attentions() or any(map(static.find, _list_matrices(model)))):
        raise StartError(
            f"{static.config.source}: nothing of this model would be in FP8, because the lists leave nothing or the"
            " measurement has none of its modules. Leave QUANT_CONFIG out to serve the model as it is."
        )
    return None


def _list_matrices(model: Model) -> list[list[str]]:
    """The matrices of a checkpoint, each with those that it is multiplied at once with."""
    return [
        module.names(prefix)
        for prefix, module in model.walk()
        if isinstance(module, Matrix) and module.may_round and not module.only_as_stored
    ]


def _describe_matrices(static: StaticScales, model: Model) -> str:
    matrices = _list_matrices(model)
    plain = [name for names in matrices if static.find(names) is None for name in names]
    total = sum(map(len, matrices))
    text = f"{total - len(plain)} of {total} matrices are in FP8"
    if not plain:
        return text
    more = f" and {len(plain) - _SHOWN} more" if len(plain) > _SHOWN else ""
    return f"{text}; as they were stay {', '.join(plain[:_SHOWN])}{more}"


def _list_attentions(model: Model) -> list[str]:
    """Those that keep keys and values, by their paths."""
    return [prefix.removesuffix(".") for prefix, module in model.walk() if isinstance(module, CacheScales)]


def _rounded_heads(model: Model) -> list[Matrix]:
    matrices = [module for _, module in model.walk() if isinstance(module, Matrix) and module.is_head]
    return [head for head in matrices if isinstance(head.method, MeasuredFp8)]


def _describe_rest(static: StaticScales, model: Model, ops: Ops) -> list[str]:
    notes = ["the head is in FP8, apart from embeddings"] if _rounded_heads(model) else []
    count = len(_list_attentions(model))
    if found := len(model.fp8_attentions()):
        notes.append(f"products of attention are in FP8 in {found} of {count} layers")
    measured = sum(module.products is not None for _, module in model.walk() if isinstance(module, CacheScales))
    if measured > found:
        why = "" if ops.fp8_attention else " on this device"
        notes.append(
            f"products of attention stay in the model's type{why} in {measured - found} layers that have scales"
        )
    return notes


def make_recorder(calibrated: Calibrated, model: Model, block_size: int) -> Recorder | None:
    if calibrated.file is None or not calibrated.measures:
        return None
    return Recorder(model, calibrated.file, block_size)
