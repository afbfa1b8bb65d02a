"""The tokenizer that prompts are counted with: of a model folder, a GGUF file, the embedded model, or one on the hub.

Weights are neither read nor downloaded, and torch is never loaded.
"""

from pathlib import Path

from text_generation_inference.config import ServerConfig, read_environment
from text_generation_inference.errors import ModelNotFoundError, StartError, TgiError
from text_generation_inference.text.model_folder import SpecialTokens
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.text.tokenizer_files import has_tokenizer
from text_generation_inference.weights import embedded
from text_generation_inference.weights.download import download_model
from text_generation_inference.weights.gguf import GgufFile
from text_generation_inference.weights.gguf_model import read_config
from text_generation_inference.weights.gguf_tokenizer import read_tokenizer
from text_generation_inference.weights.source import hub_access, may_be_hub_id

_HUB_SETTINGS = ("offline", "huggingface_hub_cache")


def load_tokenizer(name: str, revision: str | None = None) -> Tokenizer:
    """Raises `StartError` saying which tokenizer could not be had, and why."""
    try:
        path = embedded.find_embedded() if name == embedded.NAME else Path(name).expanduser()
        if path.is_dir() and not has_tokenizer([file.name for file in path.iterdir()]):
            files = sorted(path.glob("*.gguf"))
            path = files[0] if len(files) == 1 else path
        if path.is_dir():
            return Tokenizer.load(path)
        if path.is_file() and path.suffix == ".json":
            return Tokenizer.load(path.parent)
        if path.is_file():
            file = GgufFile.open(path)
            return Tokenizer(read_tokenizer(file, read_config(file)["vocab_size"]), SpecialTokens({}, [], [], []))
        if not may_be_hub_id(name):
            raise ModelNotFoundError("there is no such file or folder")
        access = hub_access(ServerConfig(**read_environment(only=_HUB_SETTINGS)))
        return Tokenizer.load(download_model(name, revision, access, weights=False))
    except TgiError as error:
        raise StartError(f"no tokenizer {name!r}: {error} --tokenizer may name another") from None
