"""The decoder that most families share: embedding, layers of attention and gated feed-forward, norm, head.

A family describes itself with a `DecoderSpec`; what no spec can say it passes by composition.
"""

from copy import copy

import torch
from torch import Tensor

from text_generation_inference.devices.device import Ops
from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.fused_decode import FusedLayer
from text_generation_inference.layers.attention import Attention, HeadLayout
from text_generation_inference.layers.embedding import VocabWeight
from text_generation_inference.layers.linear import Linear, bias_parts, column_parts, row_linear
from text_generation_inference.layers.norm import RMSNorm
from text_generation_inference.layers.rotary import build_table
from text_generation_inference.models.spec import DecoderSpec
from text_generation_inference.parallel import Parallel
from text_generation_inference.quant.method import Product, Rows
from text_generation_inference.weights.declare import Module


class GatedMlp(Module):
    name = "mlp"

    def __init__(self, ops: Ops, parallel: Parallel, spec: DecoderSpec) -> None:
        width = spec.intermediate_size
        kept = parallel.split(width, "the feed-forward width")
        names, sizes, ranges = ["gate_proj", "up_proj"], [width, width], [kept, kept]
        biases = bias_parts(names, sizes, ranges) if spec.mlp_bias else None
        self.gate_up = Linear(ops, column_parts(names, sizes, spec.hidden_size, ranges), biases)
        self.down = row_linear(ops, parallel, "down_proj", width, spec.hidden_size, kept, spec.mlp_bias)
        activations = {"silu": ops.silu_mul, "gelu_pytorch_tanh": ops.gelu_tanh_mul}
        if spec.activation not in activations:
            raise ModelFormatError(f"activation {spec.activation!r} is not supported; known: {', '.join(activations)}")
        self.activate = activations[spec.activation]

    def forward(self, x: Rows) -> Product:
        gated = self.activate(self.gate_up.linear_unscaled(x), quantize_for=self.down.input_form)
        return self.down.linear_unscaled(gated)


def build_attention(ops: Ops, parallel: Parallel, spec: DecoderSpec, layer: int) -> Attention:
    """Attention with the tensors q_proj, k_proj, v_proj and o_proj, split by head."""
    dim = spec.head_dim
    heads = parallel.split(spec.num_heads, "the number of attention heads")
    kv_heads = parallel.split_kv_heads(spec.num_kv_heads)
    sizes = [spec.num_heads * dim, spec.num_kv_heads * dim, spec.num_kv_heads * dim]
    ranges = [(start * dim, end * dim) for start, end in (heads, kv_heads, kv_heads)]
    names = ["q_proj", "k_proj", "v_proj"]
    biases = bias_parts(names, sizes, ranges) if spec.qkv_bias else None
    qkv = Linear(ops, column_parts(names, sizes, spec.hidden_size, ranges), biases)
    out = row_linear(ops, parallel, "o_proj", sizes[0], spec.hidden_size, ranges[0], spec.out_bias)
    layout = HeadLayout(heads[1] - heads[0], kv_heads[1] - kv_heads[0], dim, spec.scale, spec.windows[layer])
    return Attention(ops, "self_attn", qkv, out, layout)


class DecoderLayer(Module):
    def __init__(self, ops: Ops, parallel: Parallel, spec: DecoderSpec, layer: int) -> None:
        self.name = f"layers.{layer}"
        self.attention_norm = RMSNorm(ops, "input_layernorm", spec.hidden_size, spec.norm_eps)
        self.attention = build_attention(ops, parallel, spec, layer)
        self.mlp_norm = RMSNorm(ops, "post_attention_layernorm", spec.hidden_size, spec.norm_eps)
        self.mlp = GatedMlp(ops, parallel, spec)

    def forward(
        self,
        x: Product,
        residual: Tensor | None,
        batch: Batch,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        wanted: Tensor | None = None,
    ) -> tuple[Product, Tensor]:
        """x is what the layer before adds to the residual stream; the first layer gets the stream itself as x.

        Of tokens that are not `wanted` only keys and values come about.
        """
        if residual is None:
            assert isinstance(x, Tensor)
            normed, residual = self.attention_norm.forward(x, self.attention.qkv.input_form), x
        else:
            normed, residual = self.attention_norm.add(x, residual, self.attention.qkv.input_form)
        x = self.attention.forward(normed, batch, cos_sin, k_cache, v_cache, wanted)
        if wanted is not None:
            residual = residual[wanted]
        normed, residual = self.mlp_norm.add(x, residual, self.mlp.gate_up.input_form)
        return self.mlp.forward(normed), residual

    @property
    def kind(self) -> tuple[object, ...]:
        """Layers of the same kind run the same kernels."""
        matrices = (self.attention.qkv, self.attention.out, self.mlp.gate_up, self.mlp.down)
        return (self.attention.heads, *(matrix.kind for matrix in matrices))

    def as_fused_layer(self, k_cache: Tensor, v_cache: Tensor) -> FusedLayer:
        attention, mlp = self.attention, self.mlp
        return FusedLayer(
            input_norm=self.attention_norm.weight,
            qkv=attention.qkv.weight,
            o=attention.out.weight,
            post_norm=self.mlp_norm.weight,
            gate_up=mlp.gate_up.weight,
            down=mlp.down.weight,
            k_cache=k_cache,
            v_cache=v_cache,
            qkv_bias=attention.qkv.bias,
            o_bias=attention.out.bias,
            gate_up_bias=mlp.gate_up.bias,
            down_bias=mlp.down.bias,
            window=attention.heads.window,
            kv_scales=attention.cache_scales.of(k_cache.dtype),
        )


class Decoder(Module):
    name = "model"

    def __init__(self, ops: Ops, parallel: Parallel, spec: DecoderSpec) -> None:
        self.embedding = VocabWeight(ops, parallel, "embed_tokens", spec.vocab_size, spec.hidden_size, spec.tied)
        self.layers = [DecoderLayer(ops, parallel, spec, layer) for layer in range(spec.num_layers)]
        # Nothing after it evens its errors out: half of what FP8 cost SmolLM2 in perplexity is its last layer.
        self.layers[-1].mlp.down.is_delicate = True
        self.norm = RMSNorm(ops, "norm", spec.hidden_size, spec.norm_eps)


class CausalLM(Module):
    """A decoder with its head: token ids in, logits out."""

    ignored = ("*.rotary_emb.inv_freq",)  # tables that old checkpoints carry

    def __init__(self, ops: Ops, parallel: Parallel, spec: DecoderSpec, device: torch.device) -> None:
        self.spec = spec
        self.ops = ops
        self.parallel = parallel
        self.fused_decode: object | None = None  # all layers as one op, where the device can
        self._computes_all = False  # else the last layer computes what logits need
        self.model = Decoder(ops, parallel, spec)
        self.head = None
        if spec.tied:
            self.ignored = (*self.ignored, "lm_head.weight*")
        else:
            self.head = VocabWeight(ops, parallel, "lm_head", spec.vocab_size, spec.hidden_size, True)
        self.device = device
        self.cos_sin: Tensor  # positions that are served, set by `bind`

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states and logits, whatever the matrices and the cache are stored in."""
        return self.model.norm.weight.dtype

    def shallow(self) -> "CausalLM":
        """The same model with the last layer, which may compute less, and one of each kind before it.

        Enough to meet every kernel, and the most memory of a step.
        """
        *others, last = self.model.layers
        kinds = {layer.kind: layer for layer in reversed(others)}
        found = copy(self)
        found.model = copy(self.model)
        found.model.layers = [*reversed(kinds.values()), last]
        return found

    def without_shortcuts(self) -> None:
        """From now on every token goes through every layer, op by op: for those who look at what comes by."""
        self.fused_decode = None
        self._computes_all = True

    def bind(self, kv_cache: list[tuple[Tensor, Tensor]], num_positions: int) -> None:
        """Called once with the cache that every pass will use, when the weights are loaded."""
        self.cos_sin = build_table(self.spec.rope, num_positions, self.device)
        capped = any(layer.attention.heads.softcap is not None for layer in self.model.layers)
        if (
            self.ops.make_fused_decode is not None and self.parallel.world == 1 and not capped
        ):  # no fused pass caps its scores
            pairs = zip(self.model.layers, kv_cache, strict=True)
            self.fused_decode = self.ops.make_fused_decode(
                [layer.as_fused_layer(k_cache, v_cache) for layer, (k_cache, v_cache) in pairs],
                self.model.norm.weight,
                self.cos_sin,
                heads=self.spec.num_heads,
                eps=self.spec.norm_eps,
                scale=self.spec.scale,
                activation={"gelu_pytorch_tanh": "gelu_tanh"}.get(self.spec.activation, self.spec.activation),
            )

    def forward(self, batch: Batch, kv_cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden states `[logit tokens, hidden]` of the tokens whose logits are needed."""
        x = self.model.embedding.look_up(batch.input_ids)
        if self.fused_decode is not None and self.ops.run_fused_decode is not None:
            done = self.ops.run_fused_decode(x, self.fused_decode, batch)
            if done is not None:
                return done if batch.logit_tokens is None else done[batch.logit_tokens]
        residual = None
        last = self.model.layers[-1]
        for layer, (k_cache, v_cache) in zip(self.model.layers, kv_cache, strict=True):
            wanted = batch.logit_tokens if layer is last and not self._computes_all else None
            x, residual = layer.forward(x, residual, batch, self.cos_sin, k_cache, v_cache, wanted)
        assert residual is not None
        normed = self.model.norm.add(x, residual)[0]
        assert isinstance(normed, Tensor)
        return normed[batch.logit_tokens] if self._computes_all and batch.logit_tokens is not None else normed

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`[tokens, hidden]` -> `[tokens, vocab]`, into `out` if there is one."""
        return (self.head or self.model.embedding).logits(hidden, out)
