"""Writes the checkpoints beside it with the library compressed-tensors: `python write.py` (0.20.0 wrote those at hand).

`forms.safetensors` has the matrices of a tiny Llama or a tiny Mixtral in each form, named `form/tensor`, and what is never
quantised, named `model/tensor`. `forms.json` has what belongs to a form: its config, a hash of each matrix that the library
makes of it, and greedy tokens of `transformers` with those matrices in float32. What the library no longer writes, groups
in the order of activations and 3 bits with 10 codes in a word, is packed here, from codes that it made.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent
PROMPTS = [[5, 9, 200, 31, 77, 8, 15, 300, 2], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]
NEW = 10
EMBEDDING = "model.embed_tokens.weight"
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "bfloat16",
}
MODELS = {
    "llama": ("LlamaForCausalLM", SIZES),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "intermediate_size": 32, "num_local_experts": 3, "num_experts_per_tok": 2}),
}  # fmt: skip

INT = {"type": "int", "symmetric": True, "dynamic": False}
GROUPS = {**INT, "strategy": "group", "group_size": 32}
ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor"}
W4, W8 = {**GROUPS, "num_bits": 4}, {**INT, "num_bits": 8, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def group(
    weights: dict | None, inputs: dict | None = None, targets: tuple[str, ...] = ("Linear",), format: str | None = None
) -> dict:
    return {"targets": list(targets), "weights": weights, "input_activations": inputs, "format": format}


def preset(name: str) -> dict:
    return {name: ["Linear"]}


MIXED = {
    "group_0": group({**W8, "num_bits": 8}, None, ("Linear",)),
    "group_1": group(W4, None, (r"re:.*self_attn\.[kv]_proj", "re:.*o_proj")),
    "group_2": group(FP8, None, ("model.layers.0.self_attn.v_proj",)),
    "group_3": group({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}, None, ("re:.*gate_proj",)),
}  # fmt: skip

# name -> model, config_groups, ignore, more
FORMS: dict[str, tuple[str, dict, list[str]]] = {
    "w4a16": ("llama", {"group_0": group(W4)}, []),
    "w4a16-asymmetric": ("llama", {"group_0": group({**W4, "symmetric": False})}, []),
    "w4a16-channel-asymmetric": ("llama", {"group_0": group({**INT, "num_bits": 4, "strategy": "channel", "symmetric": False})}, []),
    "w4a16-tensor-asymmetric": ("llama", {"group_0": group({**INT, "num_bits": 4, "strategy": "tensor", "symmetric": False})}, []),
    "w4a16-actorder": ("llama", {"group_0": group({**W4, "symmetric": False})}, []),
    "w2a16": ("llama", {"group_0": group({**GROUPS, "num_bits": 2, "symmetric": False})}, []),
    "w3a16": ("llama", {"group_0": group({**GROUPS, "num_bits": 3, "symmetric": False})}, []),
    "w3a16-whole-words": ("llama", {"group_0": group({**GROUPS, "num_bits": 3, "symmetric": False})}, []),
    "w6a16": ("llama", {"group_0": group({**GROUPS, "num_bits": 6})}, []),
    "w8a16": ("llama", {"group_0": group({**GROUPS, "num_bits": 8})}, []),
    "w8a16-int": ("llama", {"group_0": group({**W8, "symmetric": False}, format="int-quantized")}, []),
    "w8a8": ("llama", {"group_0": group(W8, ROWS)}, []),
    "w8a8-static": ("llama", {"group_0": group({**INT, "num_bits": 8, "strategy": "tensor"}, STATIC)}, []),
    "w8a8-static-asymmetric": ("llama", {"group_0": group(W8, {**STATIC, "symmetric": False})}, []),
    "w4a8": ("llama", {"group_0": group(W4, ROWS)}, []),
    "nvfp4": ("llama", preset("NVFP4"), []),
    "mxfp4": ("llama", preset("MXFP4"), []),
    "fp8-weights": ("llama", {"group_0": group(FP8)}, []),
    "mixed": ("llama", MIXED, ["re:.*up_proj"]),
    "experts-w4a16": ("mixtral", {"group_0": group({**W4, "symmetric": False})}, ["re:.*block_sparse_moe.gate$"]),
    "experts-nvfp4": ("mixtral", preset("NVFP4A16"), ["re:.*block_sparse_moe.gate$"]),
}  # fmt: skip
INPUT_SCALE, INPUT_ZERO = 0.03, -9


def make_model(model: str) -> transformers.PreTrainedModel:
    architecture, sizes = MODELS[model]
    made = getattr(transformers, architecture)
    made_model = made(made.config_class(**sizes)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in made_model.named_parameters():
            if parameter.ndim > 1:  # layers far stronger than the embedding, which is the head: tokens do not repeat
                parameter.normal_(0, 0.12 if name == EMBEDDING else 0.3)
            else:
                parameter.uniform_(0.7, 1.3)
    return made_model


def as_stored(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """By the names of checkpoints: experts each by themselves."""
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name.endswith("mlp.experts.gate_up_proj"):
            for number, pair in enumerate(value):
                for part, each in zip(("w1", "w3"), pair.chunk(2), strict=True):
                    found[
                        f"{name.removesuffix('mlp.experts.gate_up_proj')}block_sparse_moe.experts.{number}.{part}.weight"
                    ] = each
        elif name.endswith("mlp.experts.down_proj"):
            for number, each in enumerate(value):
                found[f"{name.removesuffix('mlp.experts.down_proj')}block_sparse_moe.experts.{number}.w2.weight"] = each
        elif name != "lm_head.weight":
            found[name.replace("mlp.gate.", "block_sparse_moe.gate.")] = value
    return {name: value.bfloat16().contiguous() for name, value in found.items()}


def load_stored(model: transformers.PreTrainedModel, stored: dict[str, Tensor]) -> None:
    """The other way round, in float32."""
    values: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        base = name.partition("mlp.experts.")[0] + "block_sparse_moe.experts."
        if name.endswith("mlp.experts.gate_up_proj"):
            values[name] = torch.stack(
                [torch.cat([stored[f"{base}{n}.{part}.weight"] for part in ("w1", "w3")]) for n in range(len(value))]
            )
        elif name.endswith("mlp.experts.down_proj"):
            values[name] = torch.stack([stored[f"{base}{n}.w2.weight"] for n in range(len(value))])
        elif name != "lm_head.weight":
            values[name] = stored[name.replace("mlp.gate.", "block_sparse_moe.gate.")]
    model.load_state_dict({name: value.float() for name, value in values.items()}, strict=False)
    model.tie_weights()


def find_scheme(name: str, config: QuantizationConfig) -> QuantizationScheme | None:
    """Through the library's own rules."""
    from compressed_tensors.utils.match import is_match, match_targets

    module = torch.nn.Linear(1, 1)
    by_target = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    if is_match(name, module, config.ignore):
        return None
    found = match_targets(name, module, by_target)
    return by_target[found[0]] if found else None


def find_scales(weight: Tensor, args) -> dict[str, Tensor]:
    wide = weight
    if args.strategy in ("group", "tensor_group"):
        wide = weight.unflatten(-1, (-1, args.group_size))
    axes = {"tensor": (0, 1), "channel": (1,), "group": (2,), "tensor_group": (2,)}[args.strategy]
    low, high = wide.amin(axes), wide.amax(axes)
    found: dict[str, Tensor] = {}
    if args.strategy == "tensor_group":
        found["weight_global_scale"] = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
    scale, zero = calculate_qparams(low, high, args, global_scale=found.get("weight_global_scale"))
    shape = {"tensor": (1,), "channel": (-1, 1)}.get(args.strategy, scale.shape)
    return {**found, "weight_scale": scale.reshape(shape), "weight_zero_point": zero.reshape(shape)}


def compress(weight: Tensor, scheme: QuantizationScheme) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """-> tensors, the matrix as the library has it, and the same in float32."""
    scales = find_scales(weight, scheme.weights)
    form = scheme.format or infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(getattr(form, "value", form))
    stored = compressor.compress({"weight": weight, **scales}, scheme)
    wide = compressor.decompress(stored, scheme)["weight"]
    codes = quantize(
        weight,
        scales["weight_scale"],
        scales["weight_zero_point"],
        scheme.weights,
        global_scale=scales.get("weight_global_scale"),
    )
    scale = stored["weight_scale"].float()
    if stored["weight_scale"].dtype is torch.uint8:
        scale = torch.exp2(scale - 127)
    zero = None if scheme.weights.symmetric else scales["weight_zero_point"]
    exact = dequantize(codes, scale, zero, scheme.weights, torch.float32, scales.get("weight_global_scale"))
    assert torch.equal(exact.to(wide.dtype), wide), form
    return stored, wide, exact


def with_order(weight: Tensor, scheme: QuantizationScheme, seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Groups of inputs that are anywhere, as `actorder: group` had them."""
    torch.manual_seed(seed)
    order = torch.randperm(weight.shape[1])
    back = order.argsort()
    scales = find_scales(weight[:, order].contiguous(), scheme.weights)
    stored, wide, exact = compress(weight[:, order].contiguous(), scheme)
    codes = quantize(weight[:, order], scales["weight_scale"], scales["weight_zero_point"], scheme.weights, torch.int8)
    index = (torch.arange(len(order)) // scheme.weights.group_size)[back].int()
    packed = pack_to_int32(codes[:, back].contiguous(), scheme.weights.num_bits)
    return {**stored, "weight_packed": packed, "weight_g_idx": index}, wide[:, back], exact[:, back]


def pack_whole(codes: Tensor, bits: int) -> Tensor:
    """As versions before 0.15 had it: what is left of a word is empty."""
    count = 32 // bits
    codes = torch.nn.functional.pad(codes.long() + (1 << (bits - 1)), (0, -codes.shape[1] % count))
    words = (codes.unflatten(1, (-1, count)) << (torch.arange(count) * bits)).sum(-1)
    return words.to(torch.int32)


def in_whole_words(weight: Tensor, scheme: QuantizationScheme) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    scales, bits = find_scales(weight, scheme.weights), scheme.weights.num_bits
    stored, wide, exact = compress(weight, scheme)
    codes = quantize(weight, scales["weight_scale"], scales["weight_zero_point"], scheme.weights, torch.int8)
    zeros = pack_whole(scales["weight_zero_point"].t(), bits).t().contiguous()
    return {**stored, "weight_packed": pack_whole(codes, bits), "weight_zero_point": zeros}, wide, exact


def round_inputs(
    name: str, scheme: QuantizationScheme, static: Callable[[str], float]
) -> Callable[[Tensor], Tensor] | None:
    """What our engine makes of inputs: of all integers of 8 bits alone, and with a scale of each row if there are zero points."""
    args, weights = scheme.input_activations, scheme.weights
    if args is None or args.type != "int" or weights.num_bits != 8 or weights.strategy == "group":
        return None
    if not args.dynamic and args.symmetric:
        scale = torch.tensor([static(name)])
        return lambda x: fake_quantize(x, scale, torch.zeros(1), args)
    return lambda x: (x / (s := x.abs().amax(-1, keepdim=True) / 127)).round() * s


def input_scale(name: str) -> float:
    return INPUT_SCALE * (1 + 0.1 * ("k_proj" in name) + 0.2 * ("up_proj" in name) + ("down_proj" in name))


def fused_parts(name: str) -> tuple[str, ...]:
    """With which others it is one matrix in our engine."""
    last = name.rpartition(".")[2]
    return next((f for f in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) if last in f), (last,))


def fused_input_scale(name: str) -> float:
    return max(input_scale(part) for part in fused_parts(name))


def digest(matrix: Tensor) -> str:
    return hashlib.sha256((matrix.bfloat16() + 0.0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:24]


@torch.no_grad()
def generate(model: transformers.PreTrainedModel, prompt: list[int]) -> dict[str, list]:
    tokens, scores = list(prompt), []
    for _ in range(NEW):
        logits = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        if logits.topk(2).values.diff().abs() < 1e-3:  # nearly as good: sums in another order may choose the other
            break
        tokens.append(int(logits.argmax()))
        scores.append(round(float(logits.max()), 5))
    assert len(scores) > 2
    return {"tokens": tokens[len(prompt) :], "logprobs": scores}


def write() -> None:
    models = {name: make_model(name) for name in MODELS}
    plain = {name: as_stored(model) for name, model in models.items()}
    forms: dict[str, Tensor] = {}
    described = {}
    for form, (name, groups, ignore) in FORMS.items():
        config = QuantizationConfig(config_groups=groups, ignore=ignore, quantization_status="compressed")
        model, stored, hashes = make_model(name), dict(plain[name]), {}
        formats = set()
        for tensor, weight in plain[name].items():
            module = tensor.removesuffix(".weight")
            scheme = find_scheme(module, config) if weight.ndim == 2 and tensor != EMBEDDING else None
            if scheme is None:
                if weight.ndim == 2 and tensor != EMBEDDING:
                    forms[f"{form}/{tensor}"] = weight.clone()
                continue
            if form == "w4a16-actorder":
                found, wide, exact = with_order(weight, scheme, seed=len(fused_parts(module)))
            elif form == "w3a16-whole-words":
                found, wide, exact = in_whole_words(weight, scheme)
            else:
                found, wide, exact = compress(weight, scheme)
            formats.add(
                str(getattr(scheme.format or infer_module_format(torch.nn.Linear, scheme), "value", scheme.format))
            )
            inputs = scheme.input_activations
            if inputs is not None and not inputs.dynamic:
                found["input_scale"] = torch.tensor([input_scale(module)])
                if not inputs.symmetric:
                    found["input_zero_point"] = torch.tensor([INPUT_ZERO], dtype=torch.int8)
            if form == "nvfp4":
                found["input_global_scale"] = torch.tensor([100.0])
            forms.update({f"{form}/{module}.{key}": value.contiguous() for key, value in found.items()})
            stored[tensor], hashes[module] = exact, digest(wide)
            rounding = round_inputs(module, scheme, fused_input_scale)
            if rounding is not None:
                model.get_submodule(module).register_forward_pre_hook(lambda _, args, r=rounding: (r(args[0]),))
        load_stored(model, stored)
        config.format = formats.pop() if len(formats) == 1 else "mixed-precision"
        section = json.loads(config.model_dump_json())
        if form == "w4a16-actorder":
            section["config_groups"]["group_0"]["weights"]["actorder"] = "group"
        section = {"version": "0.20.0", "quant_method": "compressed-tensors", "sparsity_config": {}, **section}
        generated = [generate(model, prompt) for prompt in PROMPTS]
        described[form] = {"model": name, "quantization_config": section, "matrices": hashes, "generated": generated}
        print(form, section["format"], generated[0]["tokens"])
    # What is plain in all forms is stored once; the models have one embedding.
    for name, tensors in plain.items():
        forms.update({f"{name}/{n}": v for n, v in tensors.items() if v.ndim == 1})
        assert torch.equal(tensors[EMBEDDING], plain["llama"][EMBEDDING])
    save_file({**forms, EMBEDDING: plain["llama"][EMBEDDING]}, HERE / "forms.safetensors")
    configs = {name: {**sizes, "architectures": [a], "model_type": name} for name, (a, sizes) in MODELS.items()}
    document = {"models": configs, "prompts": PROMPTS, "forms": described}
    (HERE / "forms.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    write()
