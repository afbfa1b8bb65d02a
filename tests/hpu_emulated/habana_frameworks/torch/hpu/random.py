"""One generator for the process."""

import torch

default_generators = (torch.Generator(),)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)
