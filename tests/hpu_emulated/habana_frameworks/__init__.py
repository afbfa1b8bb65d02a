"""A stand-in for Intel's package of this name, for tests on machines without Gaudi cards.

Everything computes on the CPU in plain torch, on tensors of the device `hpu` (`torch/_card.cpp`). The names, the order of
arguments and the rules are those of the public bridge (software 1.19 to 1.22); what is not listed there does not exist
here, so that a wrong call fails. It knows nothing of speed. As newer releases it is eager unless it is told otherwise,
and is loaded by torch then: the folder beside this one says so.
"""

import os


def load_with_torch() -> None:
    """torch calls it at the end of its own import."""
    if os.environ.get("PT_HPU_LAZY_MODE", "0") == "0":
        import habana_frameworks.torch  # noqa: F401
