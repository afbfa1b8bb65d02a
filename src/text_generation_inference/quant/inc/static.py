"""Static scales: what a configuration and a measurement say of each matrix and each cache of a model.

Sits between the files (`config`, `files`), the formulas (`scales`) and the
loader, which asks for one matrix at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from text_generation_inference.errors import StartError
from text_generation_inference.kernels.fp8 import AttentionScales
from text_generation_inference.quant.inc.config import (
    FUSED_ATTENTION,
    HEAD,
    KV_CACHE,
    LINEAR,
    MATMUL,
    CalibrationConfig,
)
from text_generation_inference.quant.inc.files import Node, Nodes, read_statistics, statistics_path
from text_generation_inference.quant.inc.scales import (
    CardGeneration,
    Rule,
    Value,
    activation_scale,
    generation_of,
)

# Matrices that other engines multiply at once, and have measured under one name.
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}

_MATMULS = ("matmul_qk", "matmul_av")  # of queries and keys, of weights and values
_FUSED_OP = "fused_scaled_dot_product_attention"
_LARGEST_WEIGHT = 1.0  # relative to the largest of a row, whatever was measured of those that are divided by their sum


@dataclass(frozen=True, slots=True)
class MatrixScales:
    """Of one matrix of a checkpoint."""

    input_scale: float
    weight: Rule
    generation: CardGeneration
    measured_maximum: float | None = None  # of its values, to see that the measurement belongs to these weights


class StaticScales:
    """What quantise mode does with a model."""

    def __init__(self, config: CalibrationConfig, nodes: Nodes, generation: CardGeneration) -> None:
        self.config = config
        self.generation = generation
        self._nodes = nodes

    @classmethod
    def load(cls, config: CalibrationConfig, fp8_max: float) -> "StaticScales":
        """`fp8_max`: the largest value of the device's FP8."""
        generation = config.generation or generation_of(fp8_max)
        if generation.full_scale > fp8_max:
            raise StartError(
                f"{config.source}: `device_for_scales` {generation.name} reaches {generation.full_scale:g}, but numbers"
                f" of FP8 end at {fp8_max:g} on this device. Leave it out."
            )
        nodes: Nodes = {}
        if config.methods.need_statistics:
            nodes = read_statistics(config.stats, config.observer)
        return cls(config, nodes, generation)

    def find(self, matrices: Sequence[str]) -> list[MatrixScales] | None:
        """Of matrices that are multiplied at once, by their names without `.weight`; None: they stay as they are."""
        found = [self._find(matrix) for matrix in matrices]
        whole = [scales for scales in found if scales is not None]
        return whole if len(whole) == len(found) else None

    def find_head(self) -> list[MatrixScales] | None:
        """None: it stays as it is, also if it was not measured: many lists leave it out."""
        needs = self.config.methods.find(LINEAR, HEAD).needs_statistics
        return self.find([HEAD]) if not needs or HEAD in self._nodes else None

    def _find(self, matrix: str) -> MatrixScales | None:
        if not self.config.selects(LINEAR, matrix):
            return None
        method = self.config.methods.find(LINEAR, matrix)
        node, measured = self._node_of(matrix)
        scale = self._activation_scale(matrix, node, method.activation)
        if scale is None:
            return None
        maxima = measured.params.get("weight") if measured else None
        return MatrixScales(scale, method.weight, self.generation, max(maxima) if maxima else None)

    def _node_of(self, matrix: str) -> tuple[Node | None, Node | None]:
        """What was measured of a matrix's inputs, and of the matrix itself."""
        if matrix in self._nodes:
            return self._nodes[matrix], self._nodes[matrix]
        parent, _, last = matrix.rpartition(".")
        return self._nodes.get(f"{parent}.{_FUSED.get(last, last)}"), None

    def _activation_scale(self, path: str, node: Node | None, rule: Rule) -> float | None:
        if rule.value is Value.FIXED:
            return activation_scale(0.0, rule, self.generation)
        if node is None or not node.inputs:
            if self.config.ignores_unmeasured:
                return None
            raise StartError(
                f"{statistics_path(self.config.stats, self.config.observer)} has no inputs of {path}. Measure with the"
                " same lists, put the module on the blocklist, or set `ignore_modules_wo_measures`."
            )
        return activation_scale(max(node.inputs[0]), rule, self.generation)

    # -- keys and values -------------------------------------------------------------------------------------------

    def cache_scale(self, attention: str, side: str) -> float | None:
        """Of the keys (`side` k) or values (v) of one attention, by its path; None: nothing is known."""
        path = f"{attention}.{side}_cache"
        rule = self.config.methods.find(KV_CACHE, path).activation
        node = self._node_below(attention, f"{side}_cache")
        if node is None and rule.value is not Value.FIXED:
            return None
        return self._activation_scale(path, node, rule)

    def quantizes_cache(self, attentions: Sequence[str]) -> bool:
        """Whether keys and values go into a cache in FP8, which all layers share the form of."""
        paths = [(attention, side) for attention in attentions for side in ("k", "v")]
        if not all(self.config.selects(KV_CACHE, f"{attention}.{side}_cache") for attention, side in paths):
            return False
        if not paths:  # a model that keeps latents
            return False
        missing = [path for path in paths if self.cache_scale(*path) is None]
        if missing and len(missing) < len(paths) and not self.config.ignores_unmeasured:
            attention, side = missing[0]
            raise StartError(
                f"{statistics_path(self.config.stats, self.config.observer)} has no inputs of {attention}.{side}_cache."
                " Measure again, or put the type KVCache on the blocklist."
            )
        return not missing

    def _node_below(self, attention: str, module: str) -> Node | None:
        """Engines differ in how deep below the attention they keep its parts."""
        ending = f".{module}"
        direct = self._nodes.get(attention + ending)
        if direct is not None:
            return direct
        return next(
            (node for name, node in self._nodes.items() if name.startswith(f"{attention}.") and name.endswith(ending)),
            None,
        )

    # -- products of attention -------------------------------------------------------------------------------------

    def attention_scales(self, attention: str, softmax_scale: float) -> AttentionScales | None:
        """Of the products of one attention, by its path; None: they are computed in the model's type.

        Toolkits know them as two products, as one fused op, or both: whatever the lists leave counts.
        """
        found = [self._scales_of_matmuls(attention, softmax_scale), self._scales_of_fused(attention)]
        known = [each for each in found if each is not None]
        return AttentionScales(*map(max, zip(*known, strict=True))) if known else None

    def check_attentions(self, attentions: Sequence[str]) -> None:
        """Raise `StartError` where some of these were measured and others, which the lists leave too, were not."""
        products = [(MATMUL, name) for name in _MATMULS] + [(FUSED_ATTENTION, _FUSED_OP)]
        for kind, name in products if self.config.methods.need_statistics else ():
            asked = [each for each in attentions if self.config.selects(kind, f"{each}.{name}")]
            missing = [each for each in asked if self._node_below(each, name) is None]
            if missing and len(missing) < len(asked) and not self.config.ignores_unmeasured:
                raise StartError(
                    f"{statistics_path(self.config.stats, self.config.observer)} has no inputs of {missing[0]}.{name}."
                    f" Measure again, put the type {kind} on the blocklist, or set `ignore_modules_wo_measures`."
                )

    def _scales_of_matmuls(self, attention: str, softmax_scale: float) -> tuple[float, ...] | None:
        """Of queries, keys, weights and values."""
        first, second = _MATMULS
        # Engines that keep parts of an attention deeper below it multiply queries with the scale before, not scores.
        factor = 1.0 if f"{attention}.{first}" in self._nodes else 1 / softmax_scale
        of_scores = self._input_scales(MATMUL, attention, first, (factor, 1.0))
        mixed = self._input_scales(MATMUL, attention, second, (1.0, 1.0), (_LARGEST_WEIGHT, 0.0))
        return None if of_scores is None or mixed is None else (*of_scores, *mixed)

    def _scales_of_fused(self, attention: str) -> tuple[float, ...] | None:
        found = self._input_scales(FUSED_ATTENTION, attention, _FUSED_OP, (1.0, 1.0, 1.0))
        if found is None:
            return None
        query, key, value = found
        rule = self.config.methods.find(FUSED_ATTENTION, f"{attention}.{_FUSED_OP}").activation
        return query, key, activation_scale(_LARGEST_WEIGHT, rule, self.generation), value

    def _input_scales(
        self, kind: str, attention: str, module: str, factors: Sequence[float], least: Sequence[float] = (0.0, 0.0, 0.0)
    ) -> list[float] | None:
        """Of inputs times these factors, and of no less than `least`; None: the lists leave the module out, or nobody
        has measured it."""
        path = f"{attention}.{module}"
        if not self.config.selects(kind, path):
            return None
        rule = self.config.methods.find(kind, path).activation
        if rule.value is Value.FIXED:
            return [activation_scale(0.0, rule, self.generation)] * len(factors)
        node = self._node_below(attention, module)
        if node is None or len(node.inputs) < len(factors):
            return None
        largest = [
            max(*each, smallest / factor) * factor
            for each, factor, smallest in zip(node.inputs, factors, least, strict=False)
        ]
        return [activation_scale(each, rule, self.generation) for each in largest]
