"""Architectures without a file of their own, computed by the modelling code of `transformers` over our paged cache.

All requests of a step go through the model as one row of tokens, with the positions that each has; attention goes to
`transformers_hook`. Code that comes with a model is run only where the operator says so (`remote_code`); weights are
read from safetensors alone. A model is refused by name where this would give other tokens than `transformers`: by what
its config says, by a trial pass over tensors without values when it is described, and by comparing a few tokens with
the model's own attention when it is loaded.
"""

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor

from text_generation_inference.devices.device import Ops
from text_generation_inference.errors import ModelFormatError, StartError
from text_generation_inference.files import shorten
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.layers.cache import CacheSpec
from text_generation_inference.models import remote_code
from text_generation_inference.models import transformers_hook as hook
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Caches, Context, Model
from text_generation_inference.models.transformers_hook import NotServed
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Declared, Parts, Read, Storage

INSTALL = "pip install 'text-generation-inference[transformers]'"
NOTE = "served through transformers: op by op, without captured steps"
LOST = (
    "captured steps and fused passes: every op is launched on its own",
    "`--quantize` and quantised checkpoints",
    "several ranks",
    "graphs of padded shapes",
    "a fast start: `transformers` reads the weights",
)

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")  # experts of a token
_ATTENDING = ("attention", "full_attention", "sliding_attention")  # types of layers
_BATCH_WIDE_ROPE = ("dynamic", "longrope", "su")
_TRIAL = ((11, 5, 3, 17, 2, 13, 7), (4, 19, 8, 1, 6))  # tokens of two prompts
_CLOSE = 0.05  # of the range of the logits: what rounding may do, in 16 bits


def build(config: Config, context: Context) -> Model:
    name = shorten(config.fields["architectures"][0])
    try:
        return TransformersModel(config, context)
    except NotServed as reason:
        raise ModelFormatError(f"{config.source}: architecture {name} is not supported: {reason}") from None


class TransformersModel(Model):
    ignored = ("*",)  # the loader of `transformers` says what is missing and what is left over
    is_capturable = False
    notes = (NOTE,)
    lost = LOST

    def __init__(self, config: Config, context: Context) -> None:
        self._class = _find(config, context.trusts_code)
        with remote_code.refused(self._class):
            self._describe(config, context)

    def _describe(self, config: Config, context: Context) -> None:
        self._config = _make_config(self._class, config)
        if remote_code.came_along(self._class):
            self.notes = (NOTE, f"code that came with the model is run: {self._class.__module__.rpartition('.')[2]}.py")
        if context.parallel.world > 1:
            raise NotServed("models that are served through transformers are not split over ranks")
        self._folder = Path(config.source).parent
        self._ops, self._device = context.ops, context.device
        hook.register()
        with torch.device("meta"):  # the type is one in which every op has a shape
            described = _make(self._class, self._config, torch.bfloat16)
        self._num_parameters = sum(parameter.numel() for parameter in described.parameters())
        self.experts = _count_experts(described, self._config)
        self._takes_logit_tokens = "logits_to_keep" in described.forward.__code__.co_varnames
        head = described.get_output_embeddings()
        self.vocab_size = self._config.vocab_size if head is None else head.weight.shape[0]
        self.max_positions = _max_positions(self._config)
        _check_modules(described)
        self._layers = hook.look(lambda: _try(described), self._config.num_hidden_layers)
        self.module: Any = described  # until it is loaded
        self._no_rotation: Tensor  # set by `bind`

    # -- loading -----------------------------------------------------------------------------------------------------

    def declare(self) -> list[Declared]:
        return [_Whole("module", [], _Loaded(self._class, self._config), self._num_parameters)]

    def finish(self) -> None:
        with remote_code.refused(self._class):  # here: what is made while reading is in memory that is given back
            self.module = self.module.to(self._device)
        try:
            with remote_code.refused(self._class, RuntimeError, ValueError, IndexError):
                self._compare()
        except torch.OutOfMemoryError:
            raise
        except (NotServed, RuntimeError, ValueError, IndexError) as reason:
            raise ModelFormatError(f"{self._folder}: {self._class.__name__} is not supported: {reason}") from reason

    # -- what the engine asks ------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    def caches(self, dtype: torch.dtype) -> list[CacheSpec]:
        return [CacheSpec(layer.num_kv_heads, layer.head_dim, dtype, layer.window) for layer in self._layers]

    def bind(self, caches: Caches, num_positions: int) -> None:
        self._no_rotation = _no_rotation(num_positions, self._device)

    def unbind(self) -> None:
        pass

    def shallow(self) -> Self:
        return self

    def without_shortcuts(self) -> None:
        pass

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        """Logits: what a model does to them beside the product of its head is part of its own `forward`."""
        return self._forward(batch, caches, self._ops, self._no_rotation)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return hidden if out is None else out.copy_(hidden)

    def _forward(self, batch: Batch, caches: Caches, ops: Ops, no_rotation: Tensor) -> Tensor:
        wanted = batch.logit_tokens
        keep = {"logits_to_keep": wanted} if wanted is not None and self._takes_logit_tokens else {}
        with hook.attending(hook.Pass(ops, self._layers, batch, batch.for_windows(), caches, no_rotation)):
            found = self.module(
                input_ids=batch.input_ids[None], position_ids=batch.positions[None], use_cache=False, **keep
            ).logits[0]
        return found if keep or wanted is None else found[wanted]

    # -- the comparison ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _compare(self) -> None:
        """Two prompts as a step may have them, one cut in two, beside what the model's own attention gives for each."""
        first, second = ([token % self.vocab_size for token in tokens][: self.max_positions] for tokens in _TRIAL)
        cut = len(second) // 2
        caches = [
            tuple(
                torch.zeros((3, 16, layer.num_kv_heads, layer.head_dim), dtype=self.dtype, device=self._device)
                for _ in range(2)
            )
            for layer in self._layers
        ]
        ops, no_rotation = Ops(), _no_rotation(16, self._device)

        def compute(rows: list[tuple[int, list[int], int]]) -> Tensor:
            return self._forward(_batch(rows, self._device), caches, ops, no_rotation).float()  # pyright: ignore

        together = compute([(1, first, 0), (2, second[:cut], 0)])
        found = [together[len(first) - 1], compute([(2, second[cut:], cut)])[-1]]
        self.module.set_attn_implementation("eager")
        try:
            expected = [
                self.module(input_ids=torch.tensor([tokens], device=self._device), use_cache=False)
                .logits[0, -1]
                .float()
                for tokens in (first, second)
            ]
        finally:
            self.module.set_attn_implementation(hook.NAME)
        for ours, theirs in zip(found, expected, strict=True):
            spread = float(theirs.max() - theirs.min())
            difference = float((ours - theirs).abs().max())
            if not difference <= _CLOSE * spread and math.isfinite(spread):
                raise NotServed(
                    "its logits depend on more than the tokens and positions of a request (in a trial they differ by"
                    f" {difference:.3g} of {spread:.3g})"
                )


class _Whole(Declared):
    """A whole module, which its storage makes."""

    __slots__ = ("num_parameters",)

    def __init__(self, attribute: str, parts: list[Any], storage: Storage, num_parameters: int) -> None:
        super().__init__(attribute, parts, storage)
        object.__setattr__(self, "num_parameters", num_parameters)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_parameters,)  # pyright: ignore


class _Loaded(Storage):
    def __init__(self, model_class: Any, config: Any) -> None:
        self.model_class, self.config = model_class, config

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> "list[Wanted]":  # pyright: ignore
        return []  # `transformers` reads its files itself

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        def load() -> tuple[Any, dict[str, Any]]:
            return self.model_class.from_pretrained(
                checkpoint.folder,
                config=self.config,
                dtype=dtype,
                attn_implementation=hook.NAME,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are in the report
                output_loading_info=True,
            )

        try:
            with remote_code.refused(self.model_class, OSError, ValueError, RuntimeError, KeyError, TypeError):
                module, report = _quietly(load)
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            raise ModelFormatError(f"{checkpoint.folder}: transformers cannot load the weights: {error}") from error
        for what, kind in (("lacks", "missing_keys"), ("holds what is not used:", "unexpected_keys")):
            if names := sorted(report.get(kind) or ()):
                raise ModelFormatError(f"{checkpoint.folder} {what} the tensor {names[0]} ({len(names)} in all)")
        mismatched: list[tuple[str, Any, Any]] = sorted(report.get("mismatched_keys") or [])
        for name, stored, wanted in mismatched:
            raise ModelFormatError(
                f"tensor {name} in {checkpoint.folder} has shape {list(stored)}, config.json makes it {list(wanted)}"
            )
        with remote_code.refused(self.model_class):
            return module.eval()

    def make(self, parts: Parts, make: Read, dtype: torch.dtype) -> Any:
        return _make(self.model_class, self.config, dtype).eval()


def _make(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    try:
        return _quietly(lambda: model_class._from_config(config, attn_implementation=hook.NAME, dtype=dtype))
    except StartError:
        raise
    except Exception as error:  # whatever a class makes of wrong fields
        raise ModelFormatError(f"transformers makes no {model_class.__name__} of this config: {error}") from error


def _find(config: Config, trusts_code: bool) -> Any:
    """The class of an architecture that `transformers` has, or that the model brings along."""
    name = config.fields["architectures"][0]
    if find_spec("transformers") is None:
        raise NotServed(f"only `transformers` may have it, which is not installed ({INSTALL})")
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = getattr(transformers, name) if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else None
    if found is None or not hasattr(found, "is_backend_compatible"):
        if not remote_code.names_code(config):
            raise NotServed(f"transformers {transformers.__version__} has no such causal language model")
        if not trusts_code:
            raise NotServed(f"it brings its own modelling code, which is run only with {remote_code.FLAG}")
        found = remote_code.import_class(config)
    return found


def _make_config(found: Any, config: Config) -> Any:
    """The config object of a class that can be served."""
    if not found.is_backend_compatible():
        raise NotServed("it does not attend through the interface of transformers")
    for size in _SIZES:
        if size in config.fields:
            config.integer(size)  # of a size that can be described
    if found.config_class is None:
        raise NotServed(f"{found.__name__} names no class of its config")
    if "text_config" in getattr(found.config_class, "sub_configs", ()):
        raise NotServed("it reads more than text, and its text model is only a part of it")
    try:
        made = found.config_class.from_dict(_with_floats(dict(config.fields)))
    except Exception as error:  # whatever a class makes of wrong fields
        raise ModelFormatError(f"{config.source}: {found.config_class.__name__} refuses it: {error}") from error
    if getattr(found, "_is_stateful", False) and not _attends_throughout(made):
        raise NotServed("it keeps a state that is no cache of keys and values")
    if getattr(made, "is_encoder_decoder", False):
        raise NotServed("it has an encoder")
    for rope in _ropes(made):
        if rope in _BATCH_WIDE_ROPE:
            raise NotServed(f"rope type {rope} depends on the longest request of a batch")
    return made


def _with_floats(value: Any) -> Any:
    """Numbers that JSON has no form for, as `transformers` writes them: `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [_with_floats(each) for each in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    fields = cast(dict[str, Any], value)
    if fields.keys() == {"__float__"} and fields["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(fields["__float__"])
    return {name: _with_floats(each) for name, each in fields.items()}


def _attends_throughout(config: Any) -> bool:
    """Whether all layers of a family that has recurrent ones too are of attention, as in the small Granite 4."""
    types = cast(object, getattr(config, "layer_types", None))
    return isinstance(types, list) and bool(types) and all(each in _ATTENDING for each in cast(list[object], types))


def _ropes(config: Any) -> list[str]:
    given = getattr(config, "rope_parameters", None) or {}
    groups = [given, *(each for each in given.values() if isinstance(each, dict))]
    return [str(group["rope_type"]) for group in groups if "rope_type" in group]


def _count_experts(module: torch.nn.Module, config: Any) -> tuple[int, int, int] | None:
    """How many there are, how many a token goes to, and the parameters of those it does not go to; None: not known."""
    chosen = next((found for name in _CHOSEN if isinstance(found := getattr(config, name, None), int)), None)
    sizes = dict[int, int]()  # of all experts of a module, by their number
    for each in module.modules():
        count = getattr(each, "num_experts", None)
        stacked = [parameter for parameter in each.parameters(recurse=False) if parameter.ndim == 3]
        if isinstance(count, int) and stacked and all(parameter.shape[0] == count for parameter in stacked):
            sizes[count] = sizes.get(count, 0) + sum(parameter.numel() for parameter in stacked)
    if not sizes or chosen is None:
        return None
    return max(sizes), chosen, sum(size // count * max(0, count - chosen) for count, size in sizes.items())


def _max_positions(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2048


def _check_modules(module: torch.nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, torch.nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
            raise NotServed("it keeps a state that is no cache of keys and values")


def _try(module: Any) -> None:
    """A pass of two tokens without values. The mask of ones keeps it from asking for the values of positions, and has
    values: that nothing is padding is known."""
    ids, ones = (torch.ones((1, 2), dtype=torch.int64, device=device) for device in ("meta", "cpu"))
    try:
        module(input_ids=ids, attention_mask=ones, position_ids=torch.arange(2, device="meta")[None], use_cache=False)
    except NotServed:
        raise
    except Exception as error:
        if "meta tensor" in str(error):
            raise NotServed("its code looks at values on the way to decide what to compute") from error
        raise NotServed(f"a trial pass failed: {type(error).__name__}: {str(error)[:200]}") from error


def _quietly(work: Callable[[], Any]) -> Any:
    """Without the bars and advice of the library."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return work()
    except ImportError as error:
        raise StartError(f"this model needs a package that is not installed: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _no_rotation(num_positions: int, device: torch.device) -> Tensor:
    """A table for rotating by an angle of 0."""  # [positions, 2] float32
    return torch.tensor([1.0, 0.0], device=device).repeat(num_positions, 1)


def _batch(rows: list[tuple[int, list[int], int]], device: torch.device) -> Batch:
    """Chunks of prompts: block, tokens, position of the first."""
    positions = torch.cat([torch.arange(start, start + len(tokens)) for _, tokens, start in rows])
    kv_index = torch.cat([block * 16 + torch.arange(start, start + len(tokens)) for block, tokens, start in rows])
    ends = [start + len(tokens) for _, tokens, start in rows]
    meta = PagedMeta(
        block_tables=torch.tensor([[block] for block, _, _ in rows], dtype=torch.int32, device=device),
        num_decode=0,
        chunk_starts_cpu=[start for _, _, start in rows],
        chunk_ends_cpu=ends,
        max_seq_len=max(ends),
    )
    ids = torch.tensor([token for _, tokens, _ in rows for token in tokens])
    return Batch(
        input_ids=ids.to(device),
        positions=positions.to(device),
        kv_index=kv_index.to(device),
        seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
        meta=meta,
    )
