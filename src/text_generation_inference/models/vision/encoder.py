"""`Encoder`: the part of a tower that sees pictures of one size, behind which families put their own connectors."""

from abc import abstractmethod
from collections.abc import Collection, Sequence

from torch import Tensor

from text_generation_inference.files import shorten
from text_generation_inference.models.config import Config
from text_generation_inference.models.vision.blocks import Block
from text_generation_inference.models.vision.tower import Parts, settle
from text_generation_inference.pictures.rule import Normalisation
from text_generation_inference.weights.declare import Module


class Encoder(Module):
    num_class_tokens: int = 0  # before the patches of a picture
    hidden_size: int
    num_states: int  # that it gives of a picture
    side: int  # patches of a row, and rows
    ignored: tuple[str, ...]  # patterns of tensors that nobody needs, relative to it
    blocks: list[Block]

    @abstractmethod
    def states(self, pixels: Tensor, normalisation: Normalisation) -> Parts[list[Tensor]]:
        """uint8 `[pictures, height, width, 3]` -> each state that was asked for, `[pictures, tokens, hidden]`.

        A part is a block.
        """

    def adapt(self, spellings: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
        """Take the name that a checkpoint has; what it may leave unread."""
        settle(self, spellings, names)
        return tuple(f"{self.name}.{pattern}" for pattern in self.ignored)


def read_feature_layers(config: Config, num_layers: int) -> list[int]:
    """`vision_feature_layer`, one or several, as numbers of blocks before the state."""
    found = config.get("vision_feature_layer")
    listed: Sequence[object] = found if isinstance(found, Sequence) and found else [-2 if found is None else found]
    numbers: list[int] = []
    for each in listed:
        if isinstance(each, bool) or not isinstance(each, int) or not -num_layers - 1 <= each <= num_layers:
            raise config.wrong("vision_feature_layer", f"is {shorten(found)}, but there are {num_layers} layers")
        numbers.append(each % (num_layers + 1))
    return numbers
