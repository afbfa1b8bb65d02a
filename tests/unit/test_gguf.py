"""The GGUF format reader: agrees with the reference reader, and refuses every damaged file with one clear line."""

import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from text_generation_inference.errors import ModelFormatError, ModelNotFoundError, TgiError
from text_generation_inference.weights.gguf import GgufFile, to_float32
from text_generation_inference.weights.gguf_model import plan_tensors, read_config, read_generation_config
from text_generation_inference.weights.gguf_tokenizer import read_tokenizer, read_tokenizer_config


def read_all(path: Path) -> None:
    """Everything conversion does before it writes."""
    file = GgufFile.open(path)
    config = read_config(file)
    for plan in plan_tensors(file, config):
        if plan.source is not None:
            to_float32(file.rows(plan.source)[:1], plan.source.type_name)
    read_tokenizer(file, config["vocab_size"])
    read_tokenizer_config(file, config["max_position_embeddings"])
    read_generation_config(file, config["vocab_size"])


def header(num_tensors: int, num_keys: int, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + body


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def tensor_entry(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize("quantise", ["", "Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_agrees_with_the_reference_reader(tmp_path: Path, quantise: str) -> None:
    path = tiny_gguf.write(tmp_path / "a.gguf", quantise=quantise)
    file, reference = GgufFile.open(path), gguf.GGUFReader(path)
    keys = {key: field for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata.keys() == keys.keys()
    for key, field in keys.items():
        value = file.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
    assert file.tensors.keys() == {tensor.name for tensor in reference.tensors}
    for tensor in reference.tensors:
        mine = file.tensors[tensor.name]
        assert mine.shape == tuple(int(size) for size in tensor.shape[::-1])
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(mine.shape)
        assert np.array_equal(to_float32(file.rows(mine), mine.type_name).reshape(mine.shape), expected)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"none\.gguf: there is no such file"):
        GgufFile.open(tmp_path / "none.gguf")


def test_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="is a folder, not a file"):
        GgufFile.open(tmp_path)


KEY = string("a") + struct.pack("<I", 4) + struct.pack("<I", 7)
SOUND = tensor_entry("t", (8,), 0, 0)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "holds 0 bytes"),
        (b"GGUF", "holds 4 bytes"),
        (b"GGML" + bytes(40), "not a GGUF file"),
        (header(0, 0, bytes(64), version=1), "version 1"),
        (header(0, 0, bytes(64), version=99), "version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(2**62, 0, bytes(64)), "claims 0 metadata keys and 4611686018427387904 tensors"),
        (header(0, 2**63, bytes(64)), "claims 9223372036854775808 metadata keys"),
        (header(1000, 0, bytes(64)), "0 dimensions"),
        (header(0, 1000, bytes(64)), "appears twice"),
        (header(0, 1), "ends inside its header"),
        (header(0, 1, struct.pack("<Q", 2**63) + b"abc"), "ends inside its header"),
        (header(0, 1, string("a") + struct.pack("<I", 77) + bytes(8)), "unknown type 77"),
        (header(0, 1, string("a") + struct.pack("<IIQ", 9, 4, 2**61)), "ends inside its header"),
        (header(0, 1, string("a") + struct.pack("<IIQ", 9, 8, 2**40)), "claims 1099511627776 strings"),
        (header(0, 1, string("a") + struct.pack("<IIQ", 9, 9, 2)), "array of the unsupported type 9"),
        (header(0, 2, KEY + KEY), "appears twice"),
        (header(0, 1, struct.pack("<Q", 2) + b"\xff\xfe" + KEY[9:]), "not UTF-8"),
        (header(1, 0, tensor_entry("t", (8,) * 5, 0, 0)), "has 5 dimensions"),
        (header(1, 0, string("t") + struct.pack("<I", 2**31)), "has 2147483648 dimensions"),
        (header(1, 0, tensor_entry("t", (0,), 0, 0)), "impossible shape"),
        (header(1, 0, tensor_entry("t", (33,), 2, 0)), "impossible shape"),
        (header(1, 0, tensor_entry("t", (2**63, 2**63), 0, 0)), "truncated or damaged"),
        (header(1, 0, tensor_entry("t", (8,), 0, 2**60)), "truncated or damaged"),
        (header(1, 0, tensor_entry("t", (8,), 999, 0)), "unknown type 999"),
        (header(1, 0, tensor_entry("t", (8,), 24, 0)), "unsupported type I8"),
        (header(2, 0, SOUND + SOUND) + bytes(256), "overlaps|appears twice"),
        (header(2, 0, SOUND + tensor_entry("u", (8,), 0, 4)) + bytes(256), "overlaps"),
        (header(2, 0, SOUND + tensor_entry("t", (8,), 0, 32)) + bytes(256), "appears twice"),
        (header(1, 1, string("general.alignment") + struct.pack("<II", 4, 3) + SOUND) + bytes(256), "power of two"),
        (header(1, 1, string("general.alignment") + struct.pack("<II", 4, 0) + SOUND) + bytes(256), "power of two"),
    ],
)
def test_damaged_header(tmp_path: Path, content: bytes, cause: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFormatError, match=cause) as caught:
            GgufFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_control_characters_stay_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(header(1, 0, tensor_entry("a\nb", (0,), 0, 0)))
    with pytest.raises(ModelFormatError) as caught:
        GgufFile.open(path)
    assert "\n" not in str(caught.value)


def test_truncated_anywhere(tmp_path: Path) -> None:
    whole = tiny_gguf.write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in {*range(0, 200, 7), *range(200, len(whole) - 32, len(whole) // 150)}:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFormatError, match=r"cut\.gguf: "):
            read_all(path)


@dataclass(frozen=True)
class Sound:
    """A file that reads without error, to be damaged at `path`."""

    path: Path
    content: bytes
    header_size: int
    numbers: list[int]  # places where the header keeps small numbers: counts, lengths, values


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    path = tiny_gguf.write(tmp_path_factory.mktemp("fuzz") / "fuzz.gguf", quantise="Q4_0")
    content = path.read_bytes()
    read_all(path)
    size = min(tensor.start for tensor in GgufFile.open(path).tensors.values())
    numbers = [index for index in range(4, size) if content[index + 1 : index + 4] == b"\0\0\0"]
    return Sound(path, content, size, numbers)


FUZZ = settings(deadline=5000, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_refused_or_read(path: Path, content: bytes) -> None:
    """Anything but a `TgiError` of one line fails the test."""
    path.write_bytes(content)
    try:
        read_all(path)
    except TgiError as error:
        assert str(path) in str(error) and "\n" not in str(error)


@settings(FUZZ, max_examples=300)
@given(data=st.data())
def test_flipped_bytes(sound: Sound, data: st.DataObject) -> None:
    changed = bytearray(sound.content)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, sound.header_size - 1))] = data.draw(st.integers(0, 255))
    check_refused_or_read(sound.path, bytes(changed))


@settings(FUZZ, max_examples=300)
@given(data=st.data())
def test_overwritten_numbers(sound: Sound, data: st.DataObject) -> None:
    changed = bytearray(sound.content)
    at = data.draw(st.sampled_from(sound.numbers))
    extremes = [(0, 4), (2**31, 4), (2**32 - 1, 4), (2**40, 8), (2**63, 8), (2**64 - 1, 8)]
    value, width = data.draw(st.sampled_from(extremes))
    changed[at : at + width] = value.to_bytes(width, "little")
    check_refused_or_read(sound.path, bytes(changed))


WRONG_METADATA: list[tuple[dict[str, object], str]] = [
    ({"llama.block_count": None}, "`llama.block_count` is missing"),
    ({"llama.block_count": 2**31}, "block_count` is 2147483648"),
    ({"llama.block_count": 3}, r"`blk\.2\.attn_norm\.weight` is missing"),
    ({"llama.block_count": 1}, "belong to no supported architecture"),
    ({"llama.block_count": "two"}, "should be a whole number"),
    ({"llama.embedding_length": 32}, "has shape"),
    ({"llama.attention.head_count": 0}, "head_count` is 0"),
    ({"llama.attention.head_count": [4, 2]}, "differs from layer to layer"),
    ({"llama.attention.head_count_kv": 3}, "no possible attention"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, "epsilon` is missing"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "finite number"),
    ({"llama.rope.dimension_count": 8}, "not the head dimension 16"),
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "position scaling 'longrope'"),
    ({"llama.attention.causal": False}, "causal` is false: it makes embeddings, and no text"),
    ({"llama.attention.temperature_scale": 0.1}, r"temperature_scale` is 0\.1, which is not known"),
    ({"llama.attention.clamp_kqv": 8.0}, r"clamp_kqv` is 8\.0, which is not known"),
    ({"llama.expert_count": 8}, "expert_used_count` is missing"),
    ({"split.count": 3}, "is part 1 of 3 by its metadata, but not by its name"),
    ({"split.no": 1, "split.count": 0}, "is part 2 of 0 by its metadata"),
    ({"split.count": [1, 1]}, "is part 1 of -1 by its metadata"),
    ({"general.type": "adapter"}, "not a whole model"),
    ({"tokenizer.ggml.tokens": None}, "tokens` is missing"),
    ({"tokenizer.ggml.tokens": [*tiny_gguf.TOKENS, "more"]}, "embedding 269 rows"),
    ({"tokenizer.ggml.token_type": [1, 2]}, "has 2 entries where 269 are expected"),
    ({"tokenizer.ggml.merges": None}, "merges` is missing"),
    ({"tokenizer.ggml.merges": ["h e", "xyzzy"]}, "not two tokens"),
    ({"tokenizer.ggml.merges": ["h z"]}, "not about tokens of the vocabulary"),
    ({"tokenizer.ggml.model": "bert"}, "tokenizer kind 'bert'"),
    ({"tokenizer.ggml.pre": "surprise"}, "text splitting 'surprise'"),
    ({"tokenizer.ggml.eos_token_id": 100000}, "outside the vocabulary of 269"),
    ({"tokenizer.ggml.bos_token_id": "one"}, "should be a whole number"),
    ({"tokenizer.ggml.add_bos_token": 1}, "should be true or false"),
    ({"tokenizer.chat_template": 5}, "should be a string"),
]


def test_parts_that_were_merged(tmp_path: Path) -> None:
    """`llama-gguf-split --merge` leaves a count of 0."""
    changes: dict[str, object] = {"split.no": 0, "split.count": 0, "split.tensors.count": 3}
    read_all(tiny_gguf.write(tmp_path / "merged.gguf", tiny_gguf.metadata(changes)))


@pytest.mark.parametrize(("changes", "cause"), WRONG_METADATA)
def test_wrong_metadata(tmp_path: Path, changes: dict[str, object], cause: str) -> None:
    path = tiny_gguf.write(tmp_path / "wrong.gguf", tiny_gguf.metadata(changes))
    with pytest.raises(ModelFormatError, match=cause) as caught:
        read_all(path)
    assert str(path) in str(caught.value)


def test_scaling_that_a_family_does_not_have(tmp_path: Path) -> None:
    """It would change the positions in silence."""
    values = {"phi3.rope.scaling.type": "yarn", "phi3.rope.scaling.factor": 4.0}
    path = tiny_gguf.write(tmp_path / "wrong.gguf", tiny_gguf.metadata(values, arch="phi3"))
    with pytest.raises(ModelFormatError, match="position scaling 'yarn' is not known of this architecture"):
        read_all(path)


FACTORS = {f"rope_factors_{name}.weight": np.ones(8, np.float32) for name in ("short", "long")}
LONGROPE = {"phi3.rope.scaling.type": "longrope", "phi3.rope.scaling.factor": 4.0}


@pytest.mark.parametrize("said", [{}, LONGROPE], ids=["unsaid", "longrope"])
@pytest.mark.parametrize("name", FACTORS)
def test_one_list_of_factors_without_the_other(tmp_path: Path, name: str, said: dict[str, object]) -> None:
    tensors = {key: value for key, value in FACTORS.items() if key != name}
    path = tiny_gguf.write(
        tmp_path / "wrong.gguf", tiny_gguf.metadata(said, arch="phi3"), tensors | tiny_gguf.weights()
    )
    with pytest.raises(ModelFormatError, match=f"the tensor `{name}` is missing"):
        read_config(GgufFile.open(path))


def test_longrope_without_its_lists_of_factors(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "wrong.gguf", tiny_gguf.metadata(LONGROPE, arch="phi3"))
    with pytest.raises(ModelFormatError, match="type` is longrope, but the lists of its factors are missing"):
        read_config(GgufFile.open(path))


@pytest.mark.parametrize(
    "said", [{}, {**LONGROPE, "phi3.rope.scaling.factor": 1.0}, {"phi3.rope.scaling.type": "none"}], ids=str
)
def test_a_family_of_longrope_may_have_no_scaling(tmp_path: Path, said: dict[str, object]) -> None:
    path = tiny_gguf.write(tmp_path / "plain.gguf", tiny_gguf.metadata(said, arch="phi3"))
    assert read_config(GgufFile.open(path))["rope_scaling"] is None
    path = tiny_gguf.write(
        tmp_path / "long.gguf", tiny_gguf.metadata(LONGROPE, arch="phi3"), FACTORS | tiny_gguf.weights()
    )
    assert read_config(GgufFile.open(path))["rope_scaling"]["rope_type"] == "longrope"


def test_unknown_architecture(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "wrong.gguf", tiny_gguf.metadata(arch="mamba"))
    with pytest.raises(
        ModelFormatError, match=r"architecture 'mamba'; llama, qwen2, .*, falcon can be read\. Use a GGUF"
    ):
        read_all(path)


def without(name: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (without("token_embd.weight"), "`token_embd.weight` is missing"),
        (without("blk.1.ffn_up.weight"), r"`blk\.1\.ffn_up\.weight` is missing"),
        (lambda tensors: tensors | {"blk.0.extra.weight": np.zeros(4, np.float32)}, "no supported architecture"),
        (lambda tensors: tensors | {"blk.0.attn_q.weight": np.zeros((64, 32), np.float32)}, "has shape"),
        (lambda tensors: tensors | {"blk.0.attn_q.bias": np.zeros(64, np.float32)}, r"attn_k\.bias` is missing"),
        (lambda tensors: tensors | {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}, "not the position"),
        (lambda tensors: tensors | {"rope_freqs.weight": np.ones(4, np.float32)}, "has shape"),
    ],
)
def test_wrong_tensors(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], cause: str
) -> None:
    path = tiny_gguf.write(tmp_path / "wrong.gguf", tensors=change(tiny_gguf.weights()))
    with pytest.raises(ModelFormatError, match=cause):
        read_all(path)
