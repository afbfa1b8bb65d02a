"""What `/info` and `tgi check` say of a quantised model."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from text_generation_inference.api.info import info
from text_generation_inference.config import ServerConfig
from text_generation_inference.quant.choose import ON_LOADING, name_quantization
from text_generation_inference.types import ModelFacts


@pytest.mark.parametrize(
    ("fields", "asked", "words"),
    [
        ({}, None, None),
        ({}, "bitsandbytes-nf4", "bitsandbytes-nf4, 4 bits, on loading"),
        ({"quant_method": "gptq", "bits": 3}, None, "gptq, 3 bits"),
        ({"quant_method": "gptq", "bits": 4}, "gptq", "gptq, 4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, None, "bitsandbytes, 8 bits"),
        ({"quant_method": "mxfp4"}, None, "mxfp4, 4 bits"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, None, "fp8, 8 bits"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None, "modelopt, 4 bits"),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 3}}}, None, "hqq, 3 bits"),
        ({"quant_method": "torchao", "quant_type": {}}, None, "torchao"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}},
            None,
            "compressed-tensors, 4 bits",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {"weights": {"num_bits": 4}}, "c": 7},
            },
            None,
            "compressed-tensors, 4 and 8 bits",
        ),
    ],
)
def test_names(fields: dict[str, Any], asked: str | None, words: str | None) -> None:
    assert name_quantization({"quantization_config": fields}, asked) == words


def test_all_that_is_done_on_loading_has_its_bits() -> None:
    for asked in ON_LOADING:
        assert "bits, on loading" in str(name_quantization({}, asked))


@pytest.mark.parametrize("quantization", [None, "gptq, 4 bits"])
def test_info(quantization: str | None) -> None:
    facts = ModelFacts(
        model_id="m", dtype="float32", vocab_size=9, max_input_tokens=8, max_total_tokens=9, num_blocks=3, block_size=16,
        device="cpu", quantization=quantization, weight_bytes=12345,
    )  # fmt: skip
    sent: list[Any] = []

    async def respond(answer: Any) -> None:
        sent.append(answer)

    engines = SimpleNamespace(are_several=False)
    about = {"config": ServerConfig(), "facts": facts, "engines": engines, "pictures": None}
    service = SimpleNamespace(model_name="m", **about)
    asyncio.run(info(SimpleNamespace(service=service, connection=SimpleNamespace(respond=respond))))  # type: ignore
    found = json.loads(sent[0].body)
    told = {name: found[name] for name in ("quantization", "weight_bytes") if name in found}
    assert told == ({"quantization": quantization, "weight_bytes": 12345} if quantization else {})
