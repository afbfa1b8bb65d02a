"""The files of a model folder, as `convert` and `download` make them and `checkpoint` reads them."""

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Files in which older tools say what config.json leaves out, and the tool that writes each.
QUANTIZATION_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
BLOCKS = "ggml.safetensors"  # quantised blocks of a converted GGUF file: metadata gives the ggml type of each tensor


def explain_pickles(model: str) -> str:
    """Why pickled weights are refused, and the command that converts them."""
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"[C.from_pretrained({model!r}).save_pretrained({model + '-safetensors'!r}) for C in (M, T)]"
    )
    return (
        "Pickled weights can run code when opened and are refused. If you trust them, convert them once and serve the "
        f'new folder {model}-safetensors: python -c "{code}"'
    )
