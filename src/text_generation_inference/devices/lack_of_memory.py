"""How a lack of memory on a device is told: by torch's own error, or in words of what does not use its allocator."""

import torch

_WORDS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "[CUDA]: out of memory",
    "PT_DEVMEM",  # Gaudi's, at whatever next waits for the card: what lacked memory was launched long before
)
_KNOWN_TO_CLIENTS = "CUDA out of memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device lacked memory, after which it still works."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def known_words(error: BaseException) -> str:
    """The words that clients look for, where the error has them; else nothing."""
    return _KNOWN_TO_CLIENTS if _KNOWN_TO_CLIENTS in str(error) else ""
