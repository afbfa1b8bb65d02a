"""The files of a model folder, as `convert` and `download` make them and `checkpoint` reads them."""

import os
from glob import escape
from shlex import quote

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Files in which older tools say what config.json leaves out, and the tool that writes each.
QUANTIZATION_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
FETCH_GGUF = (
    "GGUF files of the hub are not fetched by the server: use `hf download OWNER/NAME FILE.gguf --local-dir DIR` and"
    " give the path of the file."
)
BLOCKS = "ggml.safetensors"  # quantised blocks of a converted GGUF file: metadata gives the ggml type of each tensor


PIECES, MERGES = "`tokenizer.model`, which is read", "`vocab.json` with `merges.txt`, which are read"
# Families of which many repositories on the hub lack safetensors or a tokenizer.json: what they have.
PICKLED = {
    "OPT": MERGES,
    "Galactica": "",
    "GPT-J": "",
    "Cerebras-GPT": MERGES,
    "Dolly": "",
    "MPT": "",
    "Falcon RW": "",
    "Baichuan": PIECES,
}
TOKENIZERS = {
    "InternLM2": PIECES,
    "Llama, older copies": PIECES,
    "Kimi-K2": "`tiktoken.model`, which is refused: put a `tokenizer.json` from a converted copy into the folder, or"
    " serve token ids (`SKIP_TOKENIZER_IN_TGI`)",
}


def explain_pickles(model: str) -> str:
    """Why pickled weights are refused, and the commands that convert them. They need no code of the model."""
    is_here = os.path.isdir(os.path.expanduser(model))
    folder = os.path.expanduser(model) if is_here else model.rpartition("/")[2]
    files = os.path.join(escape(folder), "pytorch_model*.bin")
    code = (
        "import glob, torch, safetensors.torch as s; "
        "[s.save_file({k: v.clone().contiguous() for k, v in d.items()}, f[:-4] + '.safetensors', {'format': 'pt'})"
        f" for f in glob.glob({files!r}) for d in [torch.load(f, map_location='cpu', weights_only=True)]]"
    )
    # Quoted as is easiest to read, where a shell finds nothing to replace in that.
    quoted = quote(code) if any(sign in code for sign in '"$`\\!') else f'"{code}"'
    fetch = "" if is_here else f"hf download {quote(model)} --local-dir {quote(folder)} && "
    return (
        f"Pickled weights can run code when opened and are refused; many repositories of {', '.join(PICKLED)} and"
        " others have no other weights. If you trust them, convert them once (which runs no code of the model, whatever"
        f" computes it) and serve the folder {folder}: {fetch}python -c {quoted}"
    )
