"""vLLM through its public interface on the rows of `bench/cuda_pictures.py`: random weights, greedy, EOS ignored.

    python bench/peers/vllm_pictures.py FOLDER FILE TEXT OUT SIZE REQUESTS ...

Knows nothing of our packages, which are not to be seen by this process. FILE is written anew after each row. Pictures
are drawn before the clock starts; what its processor does with them is inside. If vLLM does not start, why is written
beside FILE with `.error` behind its name: vLLM looks at the class of a model in a process of its own, and names what
fails there in a line of its log at best.

vLLM 0.26 imports names from transformers' file of Pixtral that transformers 5.17 has no longer; its file of Llava-Next
imports that of Pixtral, so neither can be loaded. A plugin, which vLLM loads in each of its processes, puts the names
back; what they stand for is Pixtral's tower, which no model here has.
"""

import importlib
import json
import os
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path

from picture_shapes import vocab_size
from rows import process_age

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

MARKERS = {"llava_next": ["<image>"], "qwen2_5_vl": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]}


PLUGIN = """
def register():
    from transformers.models.pixtral import modeling_pixtral as module

    def missing(*args, **kwargs):
        raise NotImplementedError("this transformers has no such thing")

    for name in ("PixtralRotaryEmbedding", "position_ids_in_meshgrid", "apply_rotary_pos_emb"):
        if not hasattr(module, name):
            setattr(module, name, missing)
"""

# What files of models that see import beside vLLM's own: that of Llava-Next imports Pixtral's, and this mistral_common
# with what it takes for pictures, and names of transformers that are not public.
NEEDED = (
    "torch",
    "transformers",
    "torchvision",
    "PIL",
    "cv2",
    "mistral_common",
    "mistral_common.tokens.tokenizers.image",
)
NEEDED_MODULES = ("clip", "siglip", "pixtral", "llava", "llava_next", "qwen2_5_vl")


def add_plugin(folder: Path) -> None:
    """For this process and those it starts."""
    about = folder / "picture_names-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (folder / "picture_names.py").write_text(PLUGIN)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: picture-names\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\npicture_names = picture_names:register\n")
    sys.path.append(str(folder))
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(folder)) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def start(folder: str, most: int):
    import vllm

    return vllm.LLM(
        model=folder,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=4096,
        gpu_memory_utilization=0.92,
        enable_prefix_caching=False,
        max_num_seqs=max(128, most),
        limit_mm_per_prompt={"image": 1},
        disable_log_stats=True,
    )


def explain(folder: str) -> str:
    """What can be imported of that which the model's class needs, and what the process that looks at it would say."""
    lines: list[str] = []
    importlib.import_module("vllm.plugins").load_general_plugins()
    for name in (*NEEDED, *(f"vllm.model_executor.models.{module}" for module in NEEDED_MODULES)):
        try:
            module = importlib.import_module(name)
            lines.append(f"{name} {getattr(module, '__version__', 'can be imported')}")
        except Exception:
            lines.append(f"{name} CANNOT BE IMPORTED\n{traceback.format_exc()}")
    (architecture,) = json.loads(Path(folder, "config.json").read_text())["architectures"]
    look = (
        "from vllm.plugins import load_general_plugins; load_general_plugins();"
        " from vllm.model_executor.models.registry import ModelRegistry;"
        f" print(ModelRegistry.models[{architecture!r}].load_model_cls())"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    lines.append(f"in a process of its own ({done.returncode}): {done.stdout[-2000:]}{done.stderr[-6000:]}")
    return "\n".join(lines)


def main() -> None:
    folder, file, text, new, size, *counts = sys.argv[1:]
    add_plugin(Path(file).resolve().parent / "plugin")
    import vllm
    from PIL import Image
    from tokenizers import Tokenizer

    side, most = int(size), max(map(int, counts))
    try:
        llm = start(folder, most)
    except Exception:
        said = f"{traceback.format_exc()}\n{explain(folder)}"
        Path(f"{file}.error").write_text(said)
        print(said, file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    found = {"peer": f"vLLM {vllm.__version__}", "ready_seconds": round(process_age(), 2), "rows": []}
    tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
    kind = json.loads(Path(folder, "config.json").read_text())["model_type"]
    marker = [tokenizer.token_to_id(word) for word in MARKERS[kind]]
    rng, top, seed = random.Random(0), min(30000, vocab_size(folder)), 0

    def ask(count: int, tokens: int, equal: bool) -> float:
        nonlocal seed
        prompts = []
        for number in range(count):
            seed += not equal or not number
            picture = Image.effect_noise((side, side), 20 + seed % 200).convert("RGB")
            picture.putpixel((0, 0), (seed % 256, seed // 256 % 256, 7))
            ids = [*marker, *rng.choices(range(300, top), k=int(text))]
            prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"image": picture}})
        params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert all(len(answer.outputs[0].token_ids) == tokens for answer in answers)
        return seconds

    ask(4, 8, False)
    for count in map(int, counts):
        for what, equal in (("pictures", False), ("equal pictures", True)):
            row = {
                "what": what,
                "requests": count,
                "first": ask(count, 1, equal),
                "seconds": ask(count, int(new), equal),
            }
            found["rows"].append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
