"""How many ranks a model can be split over, known from its description before anything is loaded."""

from collections.abc import Iterator

from text_generation_inference.errors import StartError
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.model import Model
from text_generation_inference.models.spec import DecoderSpec, DenseSpec


def check_ranks(model: Model, world: int, expert_parallel: bool = False) -> None:
    """Raise `StartError`, which says with how many it would work, if a model cannot be split over so many ranks."""
    if world == 1:
        return
    if not isinstance(model, CausalLM):
        raise StartError("a model that is served through transformers is not split over ranks: use one")
    problem = find_problem(model.spec, world, expert_parallel)
    if problem is not None:
        most = most_ranks(model.spec, expert_parallel)
        works = f"any number up to {most} works" if most > 1 else "use one"
        raise StartError(f"the model cannot be split over {world} ranks: {problem}; {works}")


def most_ranks(spec: DecoderSpec, expert_parallel: bool = False) -> int:
    """Every number up to this one is possible."""
    world = 1
    while find_problem(spec, world + 1, expert_parallel) is None:
        world += 1
    return world


def find_problem(spec: DecoderSpec, world: int, expert_parallel: bool = False) -> str | None:
    """Why so many ranks are too many; None: they are not."""
    for what, size in _sizes(spec, expert_parallel):
        if size < world:
            return f"it has {what.format(size)}, of which each rank needs a part"
    if (world - 1) * -(-spec.vocab_size // world) >= spec.vocab_size:
        return f"the last of them would have nothing of its vocabulary of {spec.vocab_size}"
    return None


def _sizes(spec: DecoderSpec, expert_parallel: bool) -> Iterator[tuple[str, int]]:
    """What is split so that each rank has some, in words with a place for the number."""
    for attention in dict.fromkeys(layer.attention for layer in spec.layers):
        yield "{} attention heads", attention.num_heads
    for feed_forward in dict.fromkeys(layer.feed_forward for layer in spec.layers):
        if isinstance(feed_forward, DenseSpec):
            yield "a feed-forward {} wide", feed_forward.width
            continue
        if expert_parallel:
            yield "{} experts", feed_forward.num_experts
        else:
            yield "experts {} wide", feed_forward.width
        if feed_forward.shared is not None:
            yield "a shared expert {} wide", feed_forward.shared.width
