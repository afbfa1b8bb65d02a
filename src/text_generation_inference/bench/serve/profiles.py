"""How long prompts and answers are: the profiles of Hugging Face's inference-benchmarker, and lengths of one's own.

Pure Python. A length is drawn from a normal distribution, cut to a whole number and moved into its bounds, as
inference-benchmarker does; what it calls `variance` is the standard deviation.
"""

import random
import re

import msgspec

from text_generation_inference.errors import StartError

MOST_TOKENS = 10_000_000
_FIELDS = {"num_tokens": "mean", "min_tokens": "lowest", "max_tokens": "highest", "variance": "spread"}


class Lengths(msgspec.Struct, frozen=True):
    """In tokens."""

    mean: int
    lowest: int
    highest: int
    spread: int = 0  # standard deviation

    def draw(self, rng: random.Random) -> int:
        if not self.spread:
            return min(max(self.mean, self.lowest), self.highest)
        return min(max(int(rng.gauss(self.mean, self.spread)), self.lowest), self.highest)

    def __str__(self) -> str:
        if self.lowest == self.highest:
            return str(self.lowest)
        return f"{self.mean} ± {self.spread} ({self.lowest} to {self.highest})"


def exactly(num_tokens: int) -> Lengths:
    return Lengths(num_tokens, num_tokens, num_tokens)


class LengthProfile(msgspec.Struct, frozen=True):
    prompt: Lengths
    output: Lengths


# For a first look that ends within a minute or two on a CPU as well.
QUICK = LengthProfile(exactly(64), exactly(32))
PROFILES = {
    "fixed-length": LengthProfile(exactly(200), Lengths(800, 50, 800, 100)),
    # inference-benchmarker takes the prompts of `chat` from a file of conversations; without one, lengths of our own.
    "chat": LengthProfile(Lengths(200, 20, 1000, 150), Lengths(800, 50, 800, 100)),
    "code-generation": LengthProfile(Lengths(4096, 3000, 6000, 1000), Lengths(50, 30, 80, 10)),
    "classification": LengthProfile(Lengths(10000, 8000, 12000, 5000), Lengths(50, 30, 80, 10)),
}


def parse_lengths(text: str, flag: str) -> Lengths:
    """`200`, or `num_tokens=200,min_tokens=180,max_tokens=220,variance=10`. Raises `StartError`."""
    if re.fullmatch(r"[0-9]{1,8}", text, re.ASCII):
        return _checked(exactly(int(text)), text, flag)
    given: dict[str, int] = {}
    for item in text.split(","):
        found = re.fullmatch(r"\s*([a-z_]+)\s*=\s*([0-9]{1,8})\s*", item, re.ASCII)
        if found is None or found[1] not in _FIELDS:
            raise StartError(
                f"{flag} {text!r} is neither a number of tokens nor a list like"
                " num_tokens=200,min_tokens=180,max_tokens=220,variance=10"
            )
        given[_FIELDS[found[1]]] = int(found[2])
    if "mean" not in given:
        raise StartError(f"{flag} {text!r} must name num_tokens")
    spread = given.get("spread", 0)
    lowest = given.get("lowest", 1 if spread else given["mean"])
    highest = given.get("highest", given["mean"] + 4 * spread)
    return _checked(Lengths(given["mean"], lowest, highest, spread), text, flag)


def _checked(lengths: Lengths, text: str, flag: str) -> Lengths:
    if not 1 <= lengths.lowest <= lengths.highest <= MOST_TOKENS or lengths.mean < 1:
        raise StartError(f"{flag} {text!r} must hold 1 <= min_tokens <= max_tokens <= {MOST_TOKENS}")
    return lengths
