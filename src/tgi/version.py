"""The version of the installed project.

Level 0.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("text-generation-inference")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"
