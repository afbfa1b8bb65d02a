"""What a quantised checkpoint is made like. The command line fills it; a resumed run must have the same."""

import msgspec

from text_generation_inference.errors import StartError

BITS = (2, 3, 4, 8)
GROUP_SIZES = (-1, 16, 32, 64, 128, 256, 512, 1024)  # -1: all inputs of an output are one group


class MakingSettings(msgspec.Struct, frozen=True):
    bits: int = 4
    group_size: int = 128
    act_order: bool = False  # inputs that matter most are rounded first, and groups are of those (`desc_act`)
    symmetric: bool = True
    percdamp: float = 0.01  # of the mean of a Hessian's diagonal, added to it
    clip: bool = True  # scales are those with the least error, rather than those that hold the largest weight
    static_groups: bool = True  # inputs that matter most are rounded first, and groups are of successive ones
    num_samples: int = 128  # windows of the text, at most
    sequence_length: int = 2048  # tokens of a window

    def check(self) -> None:
        """Raise `StartError` for what no reader takes."""
        if self.bits not in BITS:
            raise StartError(f"--bits must be one of {', '.join(map(str, BITS))}. Given: {self.bits}")
        if self.group_size not in GROUP_SIZES:
            listed = ", ".join(map(str, GROUP_SIZES))
            raise StartError(f"--groupsize must be one of {listed}, which readers have. Given: {self.group_size}")
        if not 0 < self.percdamp < 1:
            raise StartError(f"--percdamp must be between 0 and 1. Given: {self.percdamp}")
        for flag, value, least in (("num-samples", self.num_samples, 1), ("sequence-length", self.sequence_length, 2)):
            if value < least:
                raise StartError(f"--{flag} must be >= {least}. Given: {value}")

    @property
    def has_static_groups(self) -> bool:
        return self.static_groups and not self.act_order

    @property
    def largest_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def word_codes(self) -> int:
        """Codes that fill whole words of 32 bits: inputs and outputs of a matrix come in multiples of it."""
        return 32 if self.bits == 3 else 32 // self.bits
