"""The decoder that most families share: embedding, layers of attention and feed-forward, norm, head.

A family describes itself with a `DecoderSpec`; what no spec can say is a module of its own file.
"""

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.fp8 import apply_scales
from text_generation_inference.kernels.fused_decode import FusedDecode
from text_generation_inference.kernels.matrices import Product
from text_generation_inference.layers.attention import Attention, TemperatureSpec
from text_generation_inference.layers.cache import AnyCacheSpec
from text_generation_inference.layers.embedding import HeadBias, LearnedPositions, RowsOf, VocabWeight
from text_generation_inference.layers.experts import Experts
from text_generation_inference.layers.latent_attention import LatentAttention
from text_generation_inference.layers.linear import Linear
from text_generation_inference.layers.norm import Norm, RMSNorm, make_norm
from text_generation_inference.layers.rotary import RopeSpec, build_table, mix_axes
from text_generation_inference.models.layer import LAYERS, DecoderLayer, enter
from text_generation_inference.models.model import Caches, Context, Model
from text_generation_inference.models.spec import DecoderSpec, TensorNames
from text_generation_inference.models.vision.padded import PaddedTower
from text_generation_inference.models.vision.tower import Parts, Tower
from text_generation_inference.pictures.rule import Normalisation
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.weights.declare import Module, Part

_MOST_FURTHER = 16  # layers that predict further tokens


class Decoder(Module):
    def __init__(self, context: Context, spec: DecoderSpec) -> None:
        ops, parallel, names, hidden_size = context.ops, context.parallel, spec.names, spec.hidden_size
        size = spec.embedding_size or hidden_size
        self.name = names.decoder[0]
        self.embedding: VocabWeight | RowsOf = VocabWeight(
            ops, parallel, names.embedding, spec.vocab_size, size, spec.tied
        )
        self.positions: LearnedPositions | None = None
        self.embedding_norm: Norm | None = None
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        if spec.learned_positions is not None:
            self.positions = LearnedPositions(
                ops, names.positions, spec.max_positions, spec.learned_positions, hidden_size
            )
        if names.embedding_norm:
            self.embedding_norm = make_norm(ops, spec.norm, names.embedding_norm, hidden_size)
        if size != hidden_size:
            self.project_in = Linear(ops, [Part(f"{names.project_in}.weight", (hidden_size, size))])
            self.project_out = Linear(ops, [Part(f"{names.project_out}.weight", (size, hidden_size))])
        self.factor = torch.tensor(spec.embedding_factor, dtype=context.dtype).item()
        self.layers = [LAYERS[layer.join](context, spec, layer, number) for number, layer in enumerate(spec.layers)]
        # Nothing after it evens its errors out: half of what FP8 cost SmolLM2 in perplexity is its last layer.
        self.layers[-1].mlp.keep_precise()
        self.norm = make_norm(ops, spec.norm, names.norm, hidden_size) if spec.has_final_norm else None

    def embed(self, batch: Batch) -> Tensor:
        """The stream that the first layer reads."""
        x = self.embedding.look_up(batch.input_ids)
        if self.project_in is not None:
            x = self.project_in.forward(x)
        if self.factor != 1:
            x = x * self.factor
        if batch.features is not None:
            x = put_features(x, batch, 0)
        if self.positions is not None:
            x = x + self.positions.look_up(batch.positions)
        return x if self.embedding_norm is None else cast(Tensor, self.embedding_norm.forward(x))

    def leave(self, x: Product, residual: Tensor | None) -> Tensor:
        """What the head reads."""
        if self.norm is None:
            x = apply_scales(x) if residual is None else residual + apply_scales(x)
        else:
            x = cast(Tensor, enter(self.norm, x, residual, None)[0])
        return x if self.project_out is None else self.project_out.forward(x)


class CausalLM(Model):
    """A decoder with its head."""

    def __init__(self, spec: DecoderSpec, context: Context) -> None:
        self.spec = spec
        self.vocab_size = spec.vocab_size
        self.max_positions = spec.max_positions
        self.exceeds_float16 = spec.exceeds_float16
        self.may_be_longer = spec.may_be_longer
        self.ops = context.ops
        self.parallel = context.parallel
        self.device = context.device
        self.computes_in = context.dtype
        self.fused_decode: FusedDecode | None = None  # all layers as one op, where the device can
        self._computes_all = False  # else the last layer computes what logits need
        self.model = Decoder(context, spec)
        self.head: VocabWeight | None = None
        self.head_bias: HeadBias | None = None
        if spec.head_bias:
            vocabulary = cast(VocabWeight, self.model.embedding).vocabulary
            self.head_bias = HeadBias(spec.names.head[0], spec.vocab_size, vocabulary)
        self.ignored = spec.names.ignored
        if spec.tied:
            self._tie()
        else:
            self._untie(spec.names.head[0])
        self.tower: Tower | None = None  # of a model with `sight`
        self.tables: list[Tensor]  # cosines and sines of the positions that are served, by layer; set by `bind`
        self._axes: Tensor  # which position in three dimensions turns which frequency; set by `bind`

    @property
    def dtype(self) -> torch.dtype:
        return self.computes_in

    def adapt(self, names: Collection[str], are_equal: Callable[[str, str], bool] | None = None) -> None:
        if self.tower is not None:
            self.tower.adapt(names)
            self.ignored = (*self.ignored, *self.tower.ignored)
        decoder, embedding = self.spec.names.decoder, self.spec.names.embedding
        stored, names = names, _with_weights(names)
        stems = {each: f"{each}.{embedding}.weight".removeprefix(".") for each in decoder}
        found = next((each for each, stem in stems.items() if stem in names), None)
        self.model.name = decoder[0] if found is None else found
        for layer in self.model.layers:
            if isinstance(layer.mlp, Experts):
                layer.mlp.adapt(f"{self.model.name}.{layer.name}.".removeprefix("."), names)
        head = next((each for each in self.spec.names.head if f"{each}.weight" in names), None)
        if head is not None and self.head_bias is not None:
            self.head_bias.rename(head)
        if head is None:
            if self.head is not None and self.spec.ties_without_head:
                self._tie()
        elif self.head is not None:
            self.head.rename(head)
        elif found is None:  # of two tensors that are one, some writers keep the first by name
            self.model.embedding = RowsOf(self._untie(head))
        elif any(name not in stored for name in (f"{head}.weight", stems[found])) or (
            are_equal is not None and not are_equal(f"{head}.weight", stems[found])
        ):  # trained apart, whatever the config says, or quantised apart
            self._untie(head)
        self.ignored = (*self.ignored, *self._further(names))

    def _further(self, names: Collection[str]) -> list[str]:
        """Patterns of the tensors of layers behind the computed ones that predict further tokens."""
        if not self.spec.names.further:
            return []
        count, prefix = len(self.spec.layers), f"{self.model.name}.".removeprefix(".")
        layer, most = prefix + self.spec.names.layer, count + _MOST_FURTHER
        stems = [layer.format(number) for number in range(count, most)]
        return [f"{stem}.*" for stem in stems if f"{stem}.{self.spec.names.further}.weight" in names]

    def split_head(self) -> None:
        embedding = self.model.embedding
        if self.head is None and isinstance(embedding, VocabWeight):
            (name,) = embedding.names(f"{self.model.name}." if self.model.name else "")
            ignored = self.ignored
            self._untie(name)
            self.ignored = ignored

    def fp8_attentions(self) -> list[Attention]:
        if self.sight is not None and (self.sight.whole_runs or self.sight.whole_prompts):
            return []  # tokens see each other both ways: passes with such are computed by the definition
        attentions = (layer.attention for layer in self.model.layers)
        return [each for each in attentions if isinstance(each, Attention) and each.multiplies_in_fp8]

    def rename(self, names: TensorNames) -> None:
        """The same tensors under other names."""
        self.spec = replace(self.spec, names=names)
        self.model.name = names.decoder[0]
        self.ignored = names.ignored
        if self.head is None:
            self._tie()
        else:
            self.head.rename(names.head[0])
        if self.head_bias is not None:
            self.head_bias.rename(names.head[0])

    def _tie(self) -> None:
        self.head = None
        embedding = cast(VocabWeight, self.model.embedding)
        embedding.is_multiplied, embedding.is_head = True, False
        self.ignored = (*self.ignored, *(f"{head}.weight*" for head in self.spec.names.head))

    def _untie(self, name: str) -> VocabWeight:
        spec = self.spec
        self.head = VocabWeight(
            self.ops,
            self.parallel,
            name,
            spec.vocab_size,
            spec.embedding_size or spec.hidden_size,
            is_head=True,
            is_normed=spec.normed_head,
        )
        cast(VocabWeight, self.model.embedding).is_multiplied = False
        self.ignored = spec.names.ignored
        return self.head

    def caches(self, dtype: torch.dtype) -> list[AnyCacheSpec]:
        return [layer.attention.cache_spec(dtype) for layer in self.model.layers]

    def shallow(self) -> Self:
        """With the last layer, which may compute less, and one of each kind before it."""
        *others, last = self.model.layers
        kinds = {layer.kind: layer for layer in reversed(others)}
        found = copy(self)
        found.model = copy(self.model)
        found.model.layers = [*reversed(kinds.values()), last]
        return found

    def without_shortcuts(self) -> None:
        self.fused_decode = None
        self._computes_all = True

    def bind(self, caches: Caches, num_positions: int) -> None:
        ropes = [layer.attention.rope for layer in self.spec.layers]
        tables: dict[RopeSpec, Tensor] = {}
        for rope in ropes:
            if rope not in tables:
                tables[rope] = build_table(rope, num_positions, self.device)
        self.tables = [tables[rope] for rope in ropes]
        if self.sight is not None and (axes := self.sight.rope_axes):  # made here: captured passes bring nothing
            self._axes = torch.tensor((*axes, *axes), device=self.device)
        temperatures: dict[TemperatureSpec, Tensor] = {}
        for layer in self.model.layers:
            attention, spec = layer.attention, layer.spec.attention
            if not isinstance(attention, Attention):
                continue
            if (chunk := spec.attention_chunk) is not None:  # one that nobody reaches the end of is none
                chunk = chunk if chunk < num_positions else None
                attention.heads = replace(attention.heads, attention_chunk=chunk)
            if spec.temperature is not None:
                if spec.temperature not in temperatures:
                    temperatures[spec.temperature] = spec.temperature.build_table(num_positions, self.device)
                attention.temperatures = temperatures[spec.temperature]
        for layer in self.model.layers:
            if caches and layer.attention in self.fp8_attentions():
                cast(Attention, layer.attention).bind(caches[layer.number][0].dtype)
        self.fused_decode = self._fuse(caches)

    def unbind(self) -> None:
        self.fused_decode = None

    def _fuse(self, caches: Caches) -> FusedDecode | None:
        """All layers as one op, if the device has one and layers differ in nothing but windows, caches and tables."""
        norm = self.model.norm
        if self.ops.make_fused_decode is None or self.parallel.world > 1 or not isinstance(norm, RMSNorm):
            return None
        layers = [layer.as_fused_layer(caches[layer.number]) for layer in self.model.layers]
        whole = [layer for layer in layers if layer is not None]
        if len(whole) < len(layers) or self.model.project_out is not None:
            return None
        ways = {_way(layer) for layer in self.model.layers}
        if len(ways) > 1:
            return None
        scale, activation, eps, heads = ways.pop()
        if eps not in (None, norm.eps):
            return None
        tables = [self.tables[layer.number] for layer in self.model.layers]
        if any(table is not tables[0] for table in tables):
            whole = [replace(layer, cos_sin=table) for layer, table in zip(whole, tables, strict=True)]
        return self.ops.make_fused_decode(
            whole,
            norm.weight,
            tables[0],
            heads=heads,
            eps=norm.eps,
            scale=scale,
            activation=activation,
        )

    def look_through(self, normalisation: Normalisation, shape: Sequence[int]) -> None:
        assert self.tower is not None
        self.tower.normalisation = normalisation
        self.tower.look_at(shape)

    @property
    def padded_tower(self) -> PaddedTower | None:
        return self.tower if isinstance(self.tower, PaddedTower) else None

    def encode(
        self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]], layout: Any = None
    ) -> Parts[list[Tensor]]:
        assert self.tower is not None
        return self.tower.in_parts(pixels, grids, layout)

    def lay_out_pictures(
        self, shapes: Sequence[tuple[int, ...]], grids: Sequence[tuple[int, ...]], device: torch.device
    ) -> Any | None:
        assert self.tower is not None
        return self.tower.lay_out(shapes, grids, device)

    def keep_pictures(self, features: Tensor, blocks: Tensor, inside: Tensor, caches: Caches) -> None:
        for layer in self.model.layers:
            layer.keep_pictures(features, blocks, inside, caches[layer.number])

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        x = self.model.embed(batch)
        tables, num_levels = self.tables, 1
        has_pictures = batch.features is not None or batch.visible_ends is not None
        if batch.grid_positions is not None:
            tables, batch = self._rotate_by_grid(batch)
            has_pictures = True
        if batch.features is not None:
            num_levels = batch.features.shape[1] // x.shape[1]
        if self.fused_decode is not None and not has_pictures:
            done = self.fused_decode(x, batch)
            if done is not None:
                return done if batch.logit_tokens is None else done[batch.logit_tokens]
        residual, run, windowed = None, self.ops.run_layer, batch.for_windows()
        last = self.model.layers[-1]
        computes_all = self._computes_all or num_levels > last.number  # features are added to all tokens
        for layer in self.model.layers:
            number = layer.number
            wanted = batch.logit_tokens if layer is last and not computes_all else None
            seen = windowed if layer.reads_window else batch
            about = (x, residual, seen, tables[number], caches[number], wanted)
            x, residual = layer.forward(*about) if run is None else run(layer, *about)
            if number + 1 < num_levels:
                residual = add_features(residual, batch, number + 1)
        hidden = self.model.leave(x, residual)
        return hidden[batch.logit_tokens] if computes_all and batch.logit_tokens is not None else hidden

    def _rotate_by_grid(self, batch: Batch) -> tuple[list[Tensor], Batch]:
        """Tables with a row for each token, in order, and the batch that reads them so."""
        assert batch.grid_positions is not None
        by_grid = {id(table): mix_axes(table, batch.grid_positions, self._axes) for table in self.tables}
        order = torch.arange(batch.input_ids.shape[0], device=batch.input_ids.device)
        return [by_grid[id(table)] for table in self.tables], replace(batch, positions=order)

    @property
    def vocabulary(self) -> VocabularyPart:
        return self._multiplied.vocabulary

    @property
    def _multiplied(self) -> VocabWeight:
        return self.head or cast(VocabWeight, self.model.embedding)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits, spec = self._multiplied.logits(hidden, out), self.spec
        if self.head_bias is not None:
            logits.add_(self.head_bias.bias)
        if spec.logits_factor != 1:
            logits.mul_(spec.logits_factor)
        if spec.logits_softcap is not None:
            logits.div_(spec.logits_softcap).tanh_().mul_(spec.logits_softcap)
        return logits


def put_features(x: Tensor, batch: Batch, level: int) -> Tensor:
    """x `[tokens, hidden]` with features in the place of some tokens."""
    features, index = batch.features, batch.feature_index
    assert features is not None and index is not None
    width = x.shape[1]
    placed = features[:, level * width : (level + 1) * width][index.clamp(min=0)]
    return torch.where((index >= 0)[:, None], placed, x)


def add_features(x: Tensor | None, batch: Batch, level: int) -> Tensor:
    """x `[tokens, hidden]` with features of a later level added to some tokens."""
    assert x is not None
    return x + put_features(torch.zeros_like(x), batch, level)


def _way(layer: DecoderLayer) -> tuple[float, str, float | None, int]:
    """What all layers of a fused pass have in common: scale, activation, epsilon of norms on heads, heads."""
    attention = cast(Attention | LatentAttention, layer.attention)
    eps = None
    if isinstance(attention, Attention) and attention.q_norm is not None:
        eps = attention.q_norm.spec.norm.eps
    return attention.heads.scale, layer.spec.feed_forward.activation, eps, attention.heads.num_heads


def _with_weights(names: Collection[str]) -> set[str]:
    """With the plain name of what is stored in several tensors, whatever those are called."""
    return {*names, *(f"{name.rpartition('.')[0]}.weight" for name in names if not name.endswith(".bias"))}
