"""`Model`: what the engine and the runner ask of a model, and `Context`: what one is built for."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.layers.attention import Attention
from text_generation_inference.layers.cache import AnyCacheSpec
from text_generation_inference.models.vision.padded import PaddedTower
from text_generation_inference.models.vision.sight import Sight
from text_generation_inference.parallel import SINGLE, Parallel
from text_generation_inference.pictures.rule import Normalisation
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.weights.declare import Module

_CPU = torch.device("cpu")
Caches = list[tuple[Tensor, ...]]  # of each layer of the whole model what its spec says: mostly keys and values


@dataclass(frozen=True, slots=True)
class Context:
    """Without a device a model can be described, but not computed."""

    ops: Ops = field(default_factory=Ops)
    parallel: Parallel = SINGLE
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32  # of hidden states and logits
    trusts_code: bool = False  # modelling code that comes with a model may be run
    width_step: int = 1  # where ranks may cut the widths of feed-forwards: blocks that stay whole


class Model(Module, ABC):
    """Token ids in, logits out. Built before anything is loaded; the loader fills the tensors that it declares."""

    vocab_size: int
    max_positions: int  # longest sequence it was made for
    may_be_longer: bool = (
        False  # positions are no table that ends: longer sequences are served where they are asked for
    )
    ignored: tuple[str, ...] = ()  # patterns of checkpoint tensors that it does not need
    is_capturable: bool = True  # a pass may be captured as a graph and replayed
    notes: tuple[str, ...] = ()  # what a user should know of how it is served
    sight: Sight | None = None  # of a model that sees pictures
    experts: tuple[int, int, int] | None = (
        None  # that are no modules of ours: all, of a token, parameters of the others
    )
    lost: tuple[str, ...] = ()  # what other models have and this one has not, for how it is computed

    exceeds_float16: bool = False  # trained in a type of more range, which its hidden states need

    def describe_type(self, dtype: torch.dtype) -> list[str]:
        """What a user should know of it in this type."""
        note = "made for bfloat16: in float16 its hidden states may overflow, and its texts fall apart (`dtype`)"
        return [note] if self.exceeds_float16 and dtype is torch.float16 else []

    @property
    def vocabulary(self) -> VocabularyPart:
        """The ids whose logits this rank computes."""
        return VocabularyPart.whole(self.vocab_size)

    def adapt(self, names: Collection[str], are_equal: Callable[[str, str], bool] | None = None) -> None:
        """A checkpoint has tensors of these names: settle which of the names that a family has had are meant.

        `are_equal`: whether two of its tensors have the same values; None: they are not at hand.
        """

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of hidden states and logits, whatever matrices and caches are stored in."""

    @abstractmethod
    def caches(self, dtype: torch.dtype) -> Sequence[AnyCacheSpec]:
        """What each layer keeps on this rank, keys and values in this type."""

    def split_head(self) -> None:
        """A head that is the embedding reads its tensor by itself, so that it may be held in another form."""

    def fp8_attentions(self) -> Sequence[Attention]:
        """Those whose products are computed in FP8."""
        return ()

    @abstractmethod
    def bind(self, caches: Caches, num_positions: int) -> None:
        """Called with the caches that every pass will use, when the weights are loaded."""

    @abstractmethod
    def unbind(self) -> None:
        """Forget the caches: they will be allocated anew."""

    def look_through(self, normalisation: Normalisation, shape: Sequence[int]) -> None:
        """How pixels are scaled before the tower of a model with `sight` sees them, and which shape those of some
        picture have."""

    def encode(
        self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]], layout: Any = None
    ) -> Generator[None, None, list[Tensor]]:
        """Features of pictures, of a model with `sight`, in `Sight.num_parts` parts: see `Tower.in_parts`."""
        raise NotImplementedError

    def lay_out_pictures(
        self, shapes: Sequence[tuple[int, ...]], grids: Sequence[tuple[int, ...]], device: torch.device
    ) -> Any | None:
        """What `encode` needs to be captured: see `Tower.lay_out`."""
        raise NotImplementedError

    @property
    def padded_tower(self) -> PaddedTower | None:
        """Its tower, where that has passes which can be padded."""
        return None

    def keep_pictures(self, features: Tensor, blocks: Tensor, inside: Tensor, caches: Caches) -> None:
        """Keys and values of features `[rows, width]` go to these blocks `[rows]` of the caches of layers that read
        pictures by cross-attention, and places in them."""
        raise NotImplementedError

    @abstractmethod
    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        """Hidden states `[logit tokens, hidden]` of the tokens whose logits are needed."""

    @abstractmethod
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`[tokens, hidden]` -> `[tokens, vocab]` of this rank's ids, into `out` if there is one (float32)."""

    @abstractmethod
    def shallow(self) -> Self:
        """The same model with few layers: enough to meet every kernel, and the most memory of a step."""

    @abstractmethod
    def without_shortcuts(self) -> None:
        """From now on every token goes through every layer, op by op: for those who look at what comes by."""
