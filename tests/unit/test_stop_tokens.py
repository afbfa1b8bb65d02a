"""The tokens that end a text, family by family, from folders as their publishers fill them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.text.ids_as_text import IdsAsText
from text_generation_inference.text.prepare import prepare_request
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import ModelFacts, SamplingParams

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA3 = "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>{% endfor %}"
GEMMA = "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
PHI3 = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
COHERE = "{% for m in messages %}<|START_OF_TURN_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>{% endfor %}"
IDEFICS = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end_of_utterance>\n{% endfor %}Assistant:"
NEMOTRON = "<extra_id_0>System\n{% for m in messages %}<extra_id_1>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
WITH_EOS = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}<|call|>"
)


def write(folder: Path, tokens: list[str], **files: Any) -> Path:
    """A model folder whose vocabulary is `tokens`, in this order; each of them is one special token."""
    backend = Backend(models.WordLevel({"word": 0}, unk_token="word"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


# By family: its tokens, what its files say, and what must end a text.
FAMILIES: dict[str, tuple[list[str], dict[str, Any], set[str]]] = {
    "gemma": (
        ["<eos>", "<end_of_turn>"],
        {"generation_config": {"eos_token_id": [1, 2]}, "config": {"eos_token_id": 1}},
        {"<eos>", "<end_of_turn>"},
    ),
    "gemma, whose files name one": (
        ["<eos>", "<end_of_turn>"],
        {
            "generation_config": {"eos_token_id": 1},
            "tokenizer_config": {"eos_token": "<eos>", "chat_template": GEMMA},
        },
        {"<eos>", "<end_of_turn>"},
    ),
    "gemma base": (
        ["<eos>", "<end_of_turn>"],
        {"generation_config": {"eos_token_id": 1}, "tokenizer_config": {"eos_token": "<eos>"}},
        {"<eos>"},
    ),
    "gemma3 with images": (
        ["<eos>", "<end_of_turn>"],
        {"config": {"eos_token_id": [1, 2], "text_config": {"eos_token_id": 1}}},
        {"<eos>", "<end_of_turn>"},
    ),
    "named inside alone": (["<eos>"], {"config": {"text_config": {"eos_token_id": 1}}}, {"<eos>"}),
    "named inside what is for generating": (
        ["<eos>", "<end_of_turn>"],
        {
            "generation_config": {"text_config": {"eos_token_id": 2}},
            "tokenizer_config": {"eos_token": "<eos>"},
        },
        {"<eos>", "<end_of_turn>"},
    ),
    "a list inside what is for generating": (
        ["<eos>", "<end_of_turn>"],
        {
            "generation_config": {"text_config": {"eos_token_id": [2]}},
            "tokenizer_config": {"eos_token": "<eos>"},
        },
        {"<end_of_turn>"},
    ),
    "phi3": (
        ["<|endoftext|>", "<|assistant|>", "<|end|>"],
        {
            "config": {"eos_token_id": 1},
            "tokenizer_config": {"eos_token": "<|endoftext|>", "chat_template": PHI3},
        },
        {"<|endoftext|>", "<|end|>"},
    ),
    "qwen3": (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        {
            "config": {"eos_token_id": 3},
            "generation_config": {"eos_token_id": [3, 1]},
            "tokenizer_config": {"eos_token": "<|im_end|>", "chat_template": CHATML},
        },
        {"<|endoftext|>", "<|im_end|>"},
    ),
    "qwen3 base": (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        {"generation_config": {"eos_token_id": 1}, "tokenizer_config": {"eos_token": "<|endoftext|>"}},
        {"<|endoftext|>"},
    ),
    "a fine-tune that kept the list of its base": (
        ["<|end_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"],
        {
            "generation_config": {"eos_token_id": [1, 2]},
            "tokenizer_config": {"eos_token": "<|im_end|>", "chat_template": CHATML},
        },
        {"<|end_of_text|>", "<|eot_id|>", "<|im_end|>"},
    ),
    "llama3 as it was first published": (
        ["<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        {
            "config": {"eos_token_id": 1},
            "generation_config": {"eos_token_id": 1},
            "tokenizer_config": {"eos_token": "<|end_of_text|>", "chat_template": LLAMA3},
        },
        {"<|end_of_text|>", "<|eot_id|>"},
    ),
    "llama31": (
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        {"generation_config": {"eos_token_id": [1, 2, 3]}, "tokenizer_config": {"eos_token": "<|eot_id|>"}},
        {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"},
    ),
    "idefics3, which kept the list of its base": (
        ["<|end_of_text|>", "<|eot_id|>", "<end_of_utterance>"],
        {
            "generation_config": {"eos_token_id": [1, 2]},
            "tokenizer_config": {"eos_token": "<|eot_id|>"},
            "chat_template": {"chat_template": IDEFICS},
        },
        {"<|end_of_text|>", "<|eot_id|>", "<end_of_utterance>"},
    ),
    "nemotron": (
        ["</s>", "<extra_id_0>", "<extra_id_1>"],
        {
            "generation_config": {"eos_token_id": 1},
            "tokenizer_config": {"eos_token": "</s>", "chat_template": NEMOTRON},
        },
        {"</s>", "<extra_id_1>"},
    ),
    "cohere": (
        ["<BOS>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"],
        {"config": {"eos_token_id": 3}, "tokenizer_config": {"chat_template": COHERE}},
        {"<|END_OF_TURN_TOKEN|>"},
    ),
    "deepseek": (
        ["<begin>", "<｜end▁of▁sentence｜>"],
        {
            "config": {"eos_token_id": 2},
            "generation_config": {"eos_token_id": 2},
            "tokenizer_config": {"eos_token": {"content": "<｜end▁of▁sentence｜>"}, "chat_template": WITH_EOS},
        },
        {"<｜end▁of▁sentence｜>"},
    ),
    "gpt-oss": (
        ["<|endoftext|>", "<|return|>", "<|channel|>", "<|end|>", "<|call|>"],
        {
            "config": {"eos_token_id": 2},
            "generation_config": {"eos_token_id": [2, 1, 5]},
            "tokenizer_config": {"eos_token": "<|return|>", "chat_template": HARMONY},
        },
        {"<|endoftext|>", "<|return|>", "<|call|>"},
    ),
    "gpt-oss without its list": (
        ["<|return|>", "<|channel|>", "<|end|>", "<|call|>"],
        {"tokenizer_config": {"eos_token": "<|return|>", "chat_template": HARMONY}},
        {"<|return|>", "<|call|>"},
    ),
    "opt": (["</s>"], {"config": {"bos_token_id": 1, "eos_token_id": 1}}, {"</s>"}),
    "gpt2": (["<|endoftext|>"], {"config": {"eos_token_id": 1}}, {"<|endoftext|>"}),
    "nothing named": (["<|endoftext|>"], {"config": {"model_type": "gpt2"}}, set()),
    "a template of several": (
        ["</s>", "<|im_end|>"],
        {
            "tokenizer_config": {
                "eos_token": "</s>",
                "chat_template": [
                    {"name": "default", "template": WITH_EOS},
                    {"name": "tool_use", "template": CHATML},
                ],
            }
        },
        {"</s>", "<|im_end|>"},
    ),
    "a template with a token that the vocabulary lacks": (
        ["</s>"],
        {"tokenizer_config": {"eos_token": "</s>", "chat_template": CHATML}},
        {"</s>"},
    ),
    "a template that cannot be read": (
        ["</s>"],
        {"tokenizer_config": {"eos_token": "</s>", "chat_template": 3}},
        {"</s>"},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    tokens, files, expected = FAMILIES[family]
    tokenizer = Tokenizer.load(write(tmp_path, tokens, **files))
    assert {tokenizer.token_of(token_id) for token_id in tokenizer.eos_ids} == expected
    by_ids = IdsAsText.load(tmp_path)
    assert by_ids.eos_ids == tokenizer.eos_ids, "ids in place of text end where text does"


def test_templates_in_files_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, ["</s>", "<end_of_turn>", "<|eot_id|>"], tokenizer_config={"eos_token": "</s>"})
    (tmp_path / "chat_template.jinja").write_text(GEMMA)
    assert Tokenizer.load(tmp_path).eos_ids == {1, 2}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(LLAMA3)
    assert Tokenizer.load(tmp_path).eos_ids == {1, 2, 3}


def _facts(vocab_size: int) -> ModelFacts:
    return ModelFacts(
        model_id="m",
        dtype="float32",
        vocab_size=vocab_size,
        max_input_tokens=8,
        max_total_tokens=16,
        num_blocks=9,
        block_size=16,
        device="cpu",
    )


def test_ids_that_the_model_lacks_end_nothing(tmp_path: Path) -> None:
    """A request that named them would be refused by the engine."""
    tokenizer = Tokenizer.load(write(tmp_path, ["</s>", "<far>"], generation_config={"eos_token_id": [1, 2, 70_000]}))
    assert tokenizer.eos_ids == {1, 2, 70_000}
    for vocab_size, expected in ((2, [1]), (3, [1, 2]), (80_000, [1, 2, 70_000])):
        request = prepare_request(1, [0], SamplingParams(max_new_tokens=1), tokenizer, _facts(vocab_size))
        assert request.stop_token_ids == expected
    ignoring = SamplingParams(max_new_tokens=1, ignore_eos=True, stop_token_ids=[0])
    assert prepare_request(1, [0], ignoring, tokenizer, _facts(3)).stop_token_ids == [0]


@pytest.mark.parametrize("value", [-1, "</s>", [1, None], True, 2**40])
def test_what_is_no_id_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    write(tmp_path, ["</s>"], config={"text_config": {"eos_token_id": value}})
    with pytest.raises(ModelFormatError, match=r"config\.json: `eos_token_id`"):
        Tokenizer.load(tmp_path)
