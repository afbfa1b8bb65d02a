"""Cycles are not collected while a process starts: imports and loading make some hundred thousand objects that stay."""

import gc


def pause_collection() -> None:
    """Before anything heavy is imported."""
    gc.disable()


def resume_collection() -> None:
    """What is there now is not looked at again."""
    gc.freeze()
    gc.enable()
