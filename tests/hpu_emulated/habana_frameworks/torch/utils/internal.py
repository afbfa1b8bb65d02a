from habana_frameworks.torch._emulation import LAZY


def is_lazy() -> bool:
    return LAZY
