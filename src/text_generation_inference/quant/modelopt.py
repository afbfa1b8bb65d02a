"""ModelOpt's checkpoints in FP8 or NVFP4, as config.json or hf_quant_config.json says.

Both files say the same with different words. Which matrices are stored so is told by the scales beside them; the names
that are excluded are asked where there is no checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from text_generation_inference.quant import fp8, low_bit
from text_generation_inference.quant.config_fields import Fields
from text_generation_inference.quant.fp4 import MODELOPT_NVFP4, NVFP4_GROUP, StoredFp4
from text_generation_inference.quant.fp8 import Fp8Scheme
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization

_WAY_OUT = "Use such a version of the model, one in compressed-tensors, or the unquantised one."
_SCHEMES: dict[str, Fp8Scheme | StoredFp4] = {
    "FP8": Fp8Scheme(input_scale_name="input_scale"),
    "NVFP4": StoredFp4(MODELOPT_NVFP4, drops_inputs=True),
}


@dataclass(frozen=True, slots=True)
class ModelOpt(Quantization):
    algorithm: str
    excluded: tuple[str, ...] = ()
    stored: frozenset[str] | None = None  # names of the checkpoint's tensors; None: not known yet
    has_cache_scales: bool = False
    method: str = "modelopt"
    origin: str = "this checkpoint, whose matrices are in FP8,"
    needs_fp8: bool = False

    @property
    def width_step(self) -> int:
        return NVFP4_GROUP if self.algorithm == "NVFP4" else 1

    @property
    def description(self) -> str:
        inputs = "" if self.needs_fp8 else "; inputs stay in the type of the model, which is more precise than 4 bits"
        return f"matrices in {self.algorithm}, as the checkpoint has them ({self.method}){inputs}"

    def named_as_in(self, stored: Mapping[str, tuple[int, ...]]) -> "ModelOpt":
        # A cache without scales has those of 1.
        return replace(
            self, stored=frozenset(stored), has_cache_scales=any(name.endswith("k_scale") for name in stored)
        )

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        scheme = _SCHEMES[self.algorithm]
        is_stored = [self._is_stored(matrix, name) for name in names]
        if isinstance(scheme, Fp8Scheme):
            return fp8.choose_stored(matrix, [scheme if found else None for found in is_stored])
        return low_bit.choose_stored(matrix, [scheme if found else None for found in is_stored])

    def _is_stored(self, matrix: Matrix, name: str) -> bool:
        if self.stored is None:
            return matrix.may_round and not any(fnmatchcase(name, pattern) for pattern in self.excluded)
        return f"{name}.weight_scale" in self.stored


def detect(config: Mapping[str, Any], source: str) -> ModelOpt:
    """`config` is the section of config.json, or what hf_quant_config.json has."""
    fields = Fields(config, f"{source}: `quantization_config`", _WAY_OUT)
    if fields.get("quantization") is not None:
        fields = fields.below("quantization")
    algorithm = fields.text("quant_algo", "")
    if algorithm not in _SCHEMES:
        raise fields.refuse("quant_algo", " or ".join(_SCHEMES))
    if fields.text("kv_cache_quant_algo", "FP8") != "FP8":
        raise fields.refuse("kv_cache_quant_algo", "FP8")
    cache = fields.below("kv_cache_scheme") if fields.get("kv_cache_scheme") is not None else None
    if cache is not None and (cache.integer("num_bits", 8) != 8 or cache.text("type", "float") != "float"):
        raise cache.refuse("num_bits", "8, of type float,")
    if algorithm == "NVFP4" and fields.integer("group_size", NVFP4_GROUP) != NVFP4_GROUP:
        raise fields.refuse("group_size", str(NVFP4_GROUP))
    excluded = (*fields.names("exclude_modules"), *fields.names("ignore"))
    return ModelOpt(algorithm, excluded, needs_fp8=algorithm == "FP8")
