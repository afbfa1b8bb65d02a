"""The tokenizer of a GGUF file, checked against llama.cpp, `transformers` and known tokenisations."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import tiny_gguf
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from text_generation_inference.errors import ModelFormatError, ModelNotFoundError
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.weights.convert import convert_gguf
from text_generation_inference.weights.embedded import find_embedded
from text_generation_inference.weights.gguf import GgufFile
from text_generation_inference.weights.gguf_tokenizer import read_tokenizer, read_tokenizer_config

# Tokens that llama.cpp gives for the embedded model.
EMBEDDED = [
    ("Hello world, it's they're we'll I'd CAN'T", "19556 905 28 357 506 502 2316 392 3060 339 6737 27190 23 68"),
    ("  leading and trailing  ", "216 2899 284 35079 256"),
    (
        "Grüße aus Köln, ça va? ñandú",
        "27302 7170 34878 85 253 376 659 7466 34115 28 5549 117 81 46316 47 5549 126 397 16148",
    ),
    (
        "日本語のテキスト。中文字符 한국어",
        "23274 115 40993 179 120 248 26453 11100 224 10391 251 10391 134 11100 226 19076 28589 29184 36518 "
        "40562 116 216 33085 246 181 130 251 183 240 129",
    ),
    (
        "Привет, мир! Как дела? नमस्ते दुनिया مرحبا بالعالم",
        "155 249 46879 16464 32547 28 41337 7872 9175 17 5470 244 6511 13760 33427 42292 6511 47 12335 118 "
        "35090 38770 16525 26293 30581 12335 116 42990 30658 27011 32932 18075 36395 20602 44626 31462 10805 "
        "45726 22208 34966 22208 21706",
    ),
    (
        "😀👩\u200d👩\u200d👧\u200d👦🇩🇪 emoji ✨",
        "10813 242 218 10813 235 119 321 231 10813 235 119 321 231 10813 235 117 321 231 10813 235 116 10813 "
        "225 119 10813 225 120 649 33777 4636 246 118",
    ),
    (
        "def f(x):\n\treturn [x ** i for i in range(n)]  # comment\n\n\n",
        "1604 275 24 104 727 198 197 5406 933 104 1903 2056 327 2056 281 1845 24 94 8307 216 907 5189 16506",
    ),
    (
        "a\r\nb\r\n\r\n c\ttabs\t\t\tand   spaces    \n    x",
        "81 201 198 82 18682 265 197 100 7366 1656 197 397 256 5600 47213 1792",
    ),
    ("<|im_start|>user\nHi<|im_end|>\n<|endoftext|><repo_name>x", "1 4093 198 26843 2 198 0 3 104"),
    ("\x00\x01\x7f é \xa0\u3000 ﬁ", "190 191 217 297 151 219 3351 250 12109 218 40367"),
    (
        '{"key": [null, true], \'b\': <a href="http://example.com/?q=b&c=%20">}',
        "39428 2393 1799 933 18220 28 2629 1750 637 82 1539 2067 81 31680 2671 5031 1742 7434 30 824 35005 97 "
        "45 82 22 83 23446 34 32 15889 109",
    ),
    (
        "Zahlen: 7, 2024 und 1234567; pi=3.14159",
        "74 1287 4152 42 216 39 28 216 34 32 34 36 3423 216 33 34 35 36 37 38 39 43 16916 45 35 30 33 36 33 37 41",
    ),
    ("", ""),
    ("\n", "198"),
    ("3rd  42nd, ½ ²", "35 7212 256 36 34 268 28 216 16738 216 19133"),
]


def tokenizer_of(tmp_path: Path, changes: dict[str, Any] | None = None) -> Tokenizer:
    file = GgufFile.open(tiny_gguf.write(tmp_path / "a.gguf", tiny_gguf.metadata(changes)))
    return read_tokenizer(file, len(tiny_gguf.TOKENS))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text).tokens


@pytest.fixture(scope="module")
def embedded() -> Path:
    try:
        return find_embedded()
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def test_embedded_agrees_with_llama_cpp(embedded: Path) -> None:
    tokenizer = read_tokenizer(GgufFile.open(embedded), 49152)
    for text, expected in EMBEDDED:
        tokens = [int(token) for token in expected.split()]
        assert tokenizer.encode(text).ids == tokens, text
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_embedded_digits_stand_alone(embedded: Path) -> None:
    tokenizer = read_tokenizer(GgufFile.open(embedded), 49152)
    assert pieces(tokenizer, "3rd  42nd") == ["3", "rd", "ĠĠ", "4", "2", "nd"]


def test_embedded_config(embedded: Path) -> None:
    config = read_tokenizer_config(GgufFile.open(embedded), 8192)
    template = config.pop("chat_template")
    assert template.startswith("{% for message in messages %}")
    assert config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "123", ["1", "2", "3"]),
        ("gpt-2", "123", ["123"]),
        ("default", "123", ["123"]),
        ("llama-bpe", "1234", ["<|im_start|>", "123", "4"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("tekken", "123", ["<|im_start|>", "1", "2", "3"]),
        ("gpt-4o", "1234", ["123", "4"]),
        ("gpt-4o", "helloHello's", ["hello", "H", "e", "ll", "o", "'", "s"]),  # one case after the other, with its end
        ("stablelm2", "123", ["1", "2", "3"]),
        ("smollm", "hello hello", ["hello", "Ġhello"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),  # composed to one letter first
        ("deepseek-r1-qwen", "e\u0301", ["e", "Ì", "ģ"]),
        ("olmo", "e\u0301 123", ["Ã", "©", "Ġ", "123"]),  # of GPT-NeoX
        ("command-r", "e\u0301 123", ["Ã", "©", "Ġ", "1", "2", "3"]),
    ],
)
def test_text_splitting(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    assert pieces(tokenizer_of(tmp_path, {"tokenizer.ggml.pre": pre}), text) == expected


@pytest.mark.parametrize("pre", [None, "default"])
@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("gpt2", ["e", "Ì", "ģ", "123"]),
        ("gptneox", ["Ã", "©", "123"]),
        ("qwen2", ["Ã", "©", "1", "2", "3"]),
        ("starcoder2", ["e", "Ì", "ģ", "1", "2", "3"]),
    ],
)
def test_no_name_of_a_cut(tmp_path: Path, arch: str, pre: str | None, expected: list[str]) -> None:
    """Files from before there were names: those of an architecture that has one cut are cut so."""
    path = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.metadata({"tokenizer.ggml.pre": pre}, arch))
    assert pieces(read_tokenizer(GgufFile.open(path), len(tiny_gguf.TOKENS)), "e\u0301123") == expected


def test_no_name_of_a_cut_where_there_are_several(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"does not say how text is cut \(`tokenizer\.ggml\.pre`\)"):
        tokenizer_of(tmp_path, {"tokenizer.ggml.pre": None})


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        # Its signs run from colon to tilde, and so have letters among them.
        ("deepseek-llm", "Hi, Ünï\n12345 世界x ", ["Hi", ",", " Ü", "n", "ï", "\n", "12345", " ", "世界", "x", " "]),
        ("deepseek-llm", "\u0531\u0561b", ["\u0531", "\u0561", "b"]),  # a letter that it does not know for one
        ("deepseek-coder", "Hi, Ünï\n123 世界x", ["Hi", ",", " Ünï", "\n", "1", "2", "3", " ", "世界", "x"]),
        (
            "deepseek-v3",
            "_hi _name 1234世界 (x)\n\n",
            ["_hi", " _", "name", " ", "123", "4", "世界", " (", "x", ")\n\n"],
        ),
        ("falcon", "it's 12345, <b>  x", ["it", "'", "s", " ", "123", "45", ",", " ", "<", "b", ">", " ", " x"]),
        ("bloom", "Hi, it's 42。ok", ["Hi", ",", " it's", " 42", "。", "ok"]),
        ("viking", "a 42", ["a", " ", "4", "2"]),
        ("phi-2", "it's 42", ["it", "'s", " 42"]),
        ("granite-docling", "it's 42", ["it", "'s", " 42"]),
        ("refact", "it's 42", ["it", "'s", " ", "4", "2"]),
    ],
)
def test_expressions(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    """The pieces within which merges apply."""
    cutter: Any = tokenizer_of(tmp_path, {"tokenizer.ggml.pre": pre}).pre_tokenizer
    assert [text[start:end] for _, (start, end) in cutter.pre_tokenize_str(text)] == expected


def test_whole_piece_wins_over_merges(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"tokenizer.ggml.merges": tiny_gguf.MERGES[1:], "tokenizer.ggml.add_bos_token": False}
    without_rule = tokenizer_of(tmp_path, changes)
    with_rule = tokenizer_of(tmp_path, changes | {"tokenizer.ggml.pre": "llama-bpe"})
    assert pieces(without_rule, "hello") == ["h", "e", "ll", "o"]
    assert pieces(with_rule, "hello") == ["hello"]


def test_special_and_user_defined_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    tokens = tokenizer.encode("a<|im_end|><think>b").ids
    assert [tokenizer.id_to_token(token) for token in tokens] == ["a", "<|im_end|>", "<think>", "b"]
    assert tokenizer.decode(tokens) == "a<think>b"


def test_start_and_end_tokens(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = tokenizer_of(tmp_path, changes)
    assert pieces(tokenizer, "a") == ["<|im_start|>", "a", "<|im_end|>"]
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


def test_all_bytes_survive(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    text = "".join(chr(code) for code in range(0x300)) + "\uffff\U0010ffff"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SPM_PIECES = [
    "▁h",
    "el",
    "lo",
    "▁hel",
    "▁hello",
    "ab",
    "bc",
    "▁",
    "h",
    "e",
    "l",
    "o",
    "a",
    "b",
    "c",
    "<",
    "s>",
    "s",
    ">",
]
SPM_SCORES = [0.0] * 259 + [-float(rank) for rank in range(len(SPM_PIECES))]
SPM_KINDS = [2, 3, 3] + [6] * 256 + [1] * len(SPM_PIECES)


def spm(tmp_path: Path, changes: dict[str, Any] | None = None) -> tuple[Path, Tokenizer]:
    tokens = SPM_TOKENS + SPM_PIECES
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": SPM_KINDS,
        "tokenizer.ggml.scores": SPM_SCORES,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.unknown_token_id": 0,
        **(changes or {}),
    }
    path = tiny_gguf.write(tmp_path / "s.gguf", tiny_gguf.metadata(values), tiny_gguf.weights(len(tokens)))
    return path, read_tokenizer(GgufFile.open(path), len(tokens))


def test_sentencepiece(tmp_path: Path) -> None:
    _, tokenizer = spm(tmp_path)
    assert pieces(tokenizer, "hello") == ["<s>", "▁hello"]
    assert pieces(tokenizer, "abc") == ["<s>", "▁", "ab", "c"]  # "ab" scores better than "bc"
    assert pieces(tokenizer, " hello") == ["<s>", "▁", "▁hello"]
    assert pieces(tokenizer, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert pieces(tokenizer, "a<s>b") == ["<s>", "▁", "a", "<s>", "▁", "b"]
    assert tokenizer.decode(tokenizer.encode("hello é abc").ids) == "hello é abc"


def test_sentencepiece_without_space_prefix(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    _, tokenizer = spm(tmp_path, changes)
    assert pieces(tokenizer, "hello hello") == ["h", "el", "lo", "▁hello"]
    assert tokenizer.decode(tokenizer.encode(" abc").ids) == " abc"


def test_phi3_drops_space_between_turns(tmp_path: Path) -> None:
    values = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": SPM_TOKENS + SPM_PIECES}
    values |= {"tokenizer.ggml.token_type": SPM_KINDS, "tokenizer.ggml.scores": SPM_SCORES}
    path = tiny_gguf.write(tmp_path / "p.gguf", tiny_gguf.metadata({**values, "tokenizer.ggml.pre": "default"}, "phi3"))
    tokenizer = read_tokenizer(GgufFile.open(path), len(SPM_TOKENS + SPM_PIECES))
    tokens = [tokenizer.id_to_token(each) for each in tokenizer.encode("</s> \n<s> a", add_special_tokens=False).ids]
    assert tokens == ["</s>", "<s>", "▁", "▁", "a"]


def test_templates_by_name(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them: a key for each, and a list of their names."""
    path, writer = tmp_path / "named.gguf", gguf.GGUFWriter(tmp_path / "named.gguf", "llama")
    templates = [{"name": name, "template": f"{name}: {{{{ tools }}}}"} for name in ("default", "rag", "tool_use")]
    writer.add_chat_template(templates)
    kept = {key: field.value for key, field in writer.kv_data[0].items() if "chat_template" in key}
    file = GgufFile.open(tiny_gguf.write(path, tiny_gguf.metadata(kept)))
    assert read_tokenizer_config(file, 256)["chat_template"] == templates
    convert_gguf(path, tmp_path / "out")
    loaded = ChatTemplate.load(tmp_path / "out")
    assert loaded.render([{"role": "user", "content": "x"}], tools=[{}]) == "tool_use: [{}]"
    assert loaded.render([{"role": "user", "content": "x"}]).startswith("default")
    without = GgufFile.open(tiny_gguf.write(tmp_path / "x.gguf", tiny_gguf.metadata({"tokenizer.chat_template": None})))
    assert "chat_template" not in read_tokenizer_config(without, 256)
    wrong = GgufFile.open(tiny_gguf.write(tmp_path / "y.gguf", tiny_gguf.metadata({"tokenizer.chat_template.rag": 3})))
    with pytest.raises(ModelFormatError, match=r"`tokenizer.chat_template.rag` should be a string"):
        read_tokenizer_config(wrong, 256)


def test_sentencepiece_agrees_with_transformers(tmp_path: Path) -> None:
    path, tokenizer = spm(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in ["hello", "hello hello  hello", "abc cba", "é日本", "hel lo", "a b  c\n"]:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokens == reference(text, add_special_tokens=False)["input_ids"], text


def test_saved_tokenizer_loads_the_same(tmp_path: Path) -> None:
    path, tokenizer = spm(tmp_path)
    convert_gguf(path, tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ["hello", " hello abc", "a<s>b é"]:
        assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert (loaded.bos_token, loaded.eos_token, loaded.unk_token) == ("<s>", "</s>", "<unk>")
    assert loaded.model_max_length == 256
