"""The version of the installed project, and that of the TGI whose API it serves."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("text-generation-inference")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

TGI_VERSION = "3.3.6"  # the last one of TGI
