"""`Tokenizer` against the fast tokenizer of transformers, loaded from the same folder."""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from text_generation_inference.errors import ModelFormatError, ValidationError
from text_generation_inference.text.split_sequences import MARKER, mark_sequences
from text_generation_inference.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Streaming text means that every token is sent as soon as it is known.",
    "def add(a, b):\n    return a + b\n",
    "Ünïcode wörds, naïve café, 你好世界, здравствуй мир, 😀 smile.",
    "1234567890 + 42 = 1234567932",
]
TEXTS = [
    "",
    " ",
    "Hello",
    " leading and  double  spaces ",
    "line\n\nline\ttab",
    "<s>inside</s> the text<|tool|>x",
    "当当 😀👩‍👩‍👧 é e\u0301",
    "a " * 50,
]
any_text = st.text(max_size=40) | st.lists(st.sampled_from([*TEXTS, "<s>", "</s>", "<|tool|>", "dog"])).map("".join)


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_fallback() -> Backend:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
        limit_alphabet=60,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    # The trainer flags byte tokens as special; in a real vocabulary they are ordinary entries.
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in ("<unk>", "<s>", "</s>")]
    backend = Backend.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def with_bos(backend: Backend) -> Backend:
    bos = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[bos])
    return backend


def with_bos_and_eos(backend: Backend) -> Backend:
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=ids
    )
    return backend


def with_limits(backend: Backend) -> Backend:
    backend.enable_truncation(5)
    backend.enable_padding(length=12)
    return backend


def normalised(backend: Backend) -> Backend:
    backend.normalizer = normalizers.NFC()
    return backend


ROLES = {"bos_token": "<s>", "eos_token": "</s>"}
DECLARED = {
    "0": {"content": "<s>", "special": True},
    "1": {"content": "</s>", "special": True},
    "900": {"content": "<|tool|>", "special": False, "lstrip": True, "normalized": False},
}
FOLDERS: dict[str, tuple[Backend, dict[str, dict[str, Any]]]] = {
    "plain": (byte_level(), {}),
    "roles": (byte_level(), {"tokenizer_config.json": ROLES}),
    "bos": (with_bos(byte_level()), {"tokenizer_config.json": ROLES}),
    "bos_and_eos": (with_bos_and_eos(byte_level()), {"tokenizer_config.json": ROLES}),
    "add_bos_without_processor": (byte_level(), {"tokenizer_config.json": {**ROLES, "add_bos_token": True}}),
    "add_bos_false_with_processor": (
        with_bos(byte_level()),
        {"tokenizer_config.json": {**ROLES, "add_bos_token": False, "add_eos_token": True}},
    ),
    "limits": (with_limits(with_bos(byte_level())), {"tokenizer_config.json": {**ROLES, "pad_token": "</s>"}}),
    "normalised": (normalised(byte_level()), {"tokenizer_config.json": ROLES}),
    "declared": (byte_level(), {"tokenizer_config.json": {**ROLES, "added_tokens_decoder": DECLARED}}),
    "declared_role_without_flag": (
        byte_level(),
        {
            "tokenizer_config.json": {
                "eos_token": "<|tool|>",
                "added_tokens_decoder": {"900": {"content": "<|tool|>", "special": False}},
            }
        },
    ),
    "role_not_in_vocabulary": (byte_level(), {"tokenizer_config.json": {**ROLES, "pad_token": "<|tool|>"}}),
    "extra": (byte_level(), {"tokenizer_config.json": {**ROLES, "extra_special_tokens": ["<|tool|>"]}}),
    "additional": (byte_level(), {"tokenizer_config.json": {**ROLES, "additional_special_tokens": ["<|tool|>"]}}),
    "extra_by_name": (
        byte_level(),
        {"tokenizer_config.json": {**ROLES, "extra_special_tokens": {"image_token": "<|tool|>"}}},
    ),
    "older_files": (
        byte_level(),
        {
            "special_tokens_map.json": {
                "bos_token": "<s>",
                "eos_token": {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": False},
            },
            "added_tokens.json": {"<|tool|>": 900},
        },
    ),
    "split_special": (byte_level(), {"tokenizer_config.json": {**ROLES, "split_special_tokens": True}}),
    "fallback": (with_bos(byte_fallback()), {"tokenizer_config.json": {**ROLES, "unk_token": "<unk>"}}),
}


def write_folder(folder: Path, backend: Backend, files: dict[str, dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module", params=FOLDERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    from transformers import PreTrainedTokenizerFast

    folder = write_folder(tmp_path_factory.mktemp("model") / request.param, *FOLDERS[request.param])
    return Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)


@settings(max_examples=40, deadline=None)
@given(text=any_text, add_special_tokens=st.booleans(), skip=st.booleans())
def test_same_as_transformers(pair: tuple[Tokenizer, Any], text: str, add_special_tokens: bool, skip: bool) -> None:
    ours, theirs = pair
    ids = ours.encode(text, add_special_tokens)
    assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
    expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert ours.decode(ids, skip) == expected


def test_same_vocabulary_as_transformers(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token == theirs.bos_token
    assert ours.eos_token == theirs.eos_token
    flagged = {token_id for token_id, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.special_ids == flagged | set(theirs.all_special_ids)
    ids = range(ours.vocab_size + 5)
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(list(ids), skip_special_tokens=skip)


@settings(max_examples=25, deadline=None)
@given(text=any_text, truncate=st.integers(3, 30), add_special_tokens=st.booleans())
def test_truncates_like_transformers(
    pair: tuple[Tokenizer, Any], text: str, truncate: int, add_special_tokens: bool
) -> None:
    ours, theirs = pair
    theirs.truncation_side = "left"
    expected = theirs.encode(text, truncation=True, max_length=truncate, add_special_tokens=add_special_tokens)
    assert ours.encode(text, add_special_tokens, truncate) == expected


def test_truncation_keeps_the_last_tokens(tmp_path: Path) -> None:
    plain = Tokenizer.load(write_folder(tmp_path / "plain", *FOLDERS["plain"]))
    text = "every token is sent as soon as it is known"
    assert plain.encode(text, truncate=4) == plain.encode(text)[-4:]
    assert plain.encode(text, truncate=1000) == plain.encode(text)
    around = Tokenizer.load(write_folder(tmp_path / "around", *FOLDERS["bos_and_eos"]))
    ids = around.encode(text)
    assert around.encode(text, truncate=5) == [ids[0], *ids[-4:-1], ids[-1]]
    assert around.encode(text, truncate=2) == ids[-2:]
    assert around.encode(text, truncate=1) == ids[-1:]
    with pytest.raises(ValueError, match="truncate"):
        plain.encode(text, truncate=0)


@settings(max_examples=40, deadline=None)
@given(text=any_text, add_special_tokens=st.booleans())
def test_offsets_are_those_of_transformers_in_bytes(
    pair: tuple[Tokenizer, Any], text: str, add_special_tokens: bool
) -> None:
    ours, theirs = pair
    expected = theirs(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
    spans = [(len(text[:start].encode()), len(text[:end].encode())) for start, end in expected["offset_mapping"]]
    assert ours.encode_with_offsets(text, add_special_tokens) == [
        (token_id, *span) for token_id, span in zip(expected["input_ids"], spans, strict=True)
    ]


def test_offsets_count_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, *FOLDERS["bos_and_eos"]))
    (bos, eos), text = [tokenizer.id_of(token) for token in ("<s>", "</s>")], "😀 dog"
    first, *tokens, last = tokenizer.encode_with_offsets(text)
    assert first == (bos, 0, 0) and last == (eos, 0, 0)
    parts = [span for span in tokens if span[1] == 0]
    assert len(parts) > 1 and {span[2] for span in parts} == {4}, "each part of a character spans it"
    assert tokens[-1][2] == len(text.encode())
    assert [token_id for token_id, _, _ in tokens] == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode_with_offsets("", add_special_tokens=False) == []
    with pytest.raises(ValidationError, match="tokenizer error"):
        tokenizer.encode_with_offsets("a\ud800b")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, {"</s>"}),
        ({}, {"eos_token_id": 5}, {"</s>"}),
        ({"eos_token_id": 0}, None, {"</s>", "<s>"}),
        ({"eos_token_id": [0]}, None, {"<s>"}),
        ({"eos_token_id": [0, 1]}, None, {"<s>", "</s>"}),
        ({"eos_token_id": []}, None, {"</s>"}),
        ({"eos_token_id": None}, None, {"</s>"}),
    ],
)
def test_eos_ids(tmp_path: Path, generation: Any, config: Any, expected: set[str]) -> None:
    files: dict[str, Any] = {"tokenizer_config.json": ROLES}
    if generation is not None:
        files["generation_config.json"] = generation
    if config is not None:
        files["config.json"] = config
    tokenizer = Tokenizer.load(write_folder(tmp_path, byte_level(), files))
    assert tokenizer.eos_ids == {tokenizer.id_of(token) for token in expected}


def test_eos_ids_without_a_named_eos_come_from_the_model(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, byte_level(), {"config.json": {"eos_token_id": [7, 9]}}))
    assert tokenizer.eos_token is None
    assert tokenizer.eos_ids == {7, 9}


def test_eos_ids_that_are_no_ids_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), {"generation_config.json": {"eos_token_id": "</s>"}})
    with pytest.raises(ModelFormatError, match=r"generation_config\.json: `eos_token_id`"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(("value", "expected"), [(None, None), (2048, 2048), (1e30, None), (int(1e30), None)])
def test_model_max_length(tmp_path: Path, value: Any, expected: int | None) -> None:
    config = {} if value is None else {"model_max_length": value}
    folder = write_folder(tmp_path, byte_level(), {"tokenizer_config.json": config})
    assert Tokenizer.load(folder).model_max_length == expected


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"there is no tokenizer\.json.*save_pretrained"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ModelFormatError, match=r"there is no tokenizer\.json"):
        Tokenizer.load(tmp_path / "no" / "such" / "folder")


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"],
)
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": ' * 100_000])
def test_corrupt_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_folder(tmp_path, byte_level(), {})
    (folder / name).write_bytes(content)
    with pytest.raises(ModelFormatError, match=name.replace(".", r"\.")):
        Tokenizer.load(folder)


@pytest.mark.parametrize("declared", [[], {"x": {"content": "a"}}, {"3": {"lstrip": True}}, {"3": "a"}])
def test_corrupt_added_tokens_are_named(tmp_path: Path, declared: Any) -> None:
    folder = write_folder(tmp_path, byte_level(), {"tokenizer_config.json": {"added_tokens_decoder": declared}})
    with pytest.raises(ModelFormatError, match="added_tokens_decoder"):
        Tokenizer.load(folder)


def test_truncated_tokenizer_file(tmp_path: Path) -> None:
    path = write_folder(tmp_path, byte_level(), {}) / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelFormatError, match=r"not a valid tokenizer.*Download"):
        Tokenizer.load(tmp_path)


def test_lone_surrogate_is_the_callers_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, byte_level(), {}))
    with pytest.raises(ValidationError, match="tokenizer error"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "a\ud800"},
        {"additional_special_tokens": ["\udc00"]},
        {"added_tokens_decoder": {"3": {"content": "\ud800x", "special": True}}},
    ],
)
def test_lone_surrogate_in_a_special_token_is_the_models_fault(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_folder(tmp_path, byte_level(), {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match="special token that is no text"):
        Tokenizer.load(folder)


def test_threads_share_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, *FOLDERS["bos"]))
    text = "every token is sent as soon as it is known " * 20
    expected = [tokenizer.encode(text, truncate=n) for n in range(2, 60)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda n: tokenizer.encode(text, truncate=n), range(2, 60))) == expected


def test_added_token_flags_survive(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, *FOLDERS["declared"]))
    tool = tokenizer.id_of("<|tool|>")
    assert tokenizer.encode("dog   <|tool|>") == [*tokenizer.encode("dog"), tool]
    assert tool not in tokenizer.special_ids


def test_sequences_of_galactica_are_split(tmp_path: Path) -> None:
    """One token for each character within the tags, and none for the marker; elsewhere, and elsewhere alone, pairs."""
    backend = Backend(models.BPE({"A": 0, "C": 1, "AC": 2, "x": 3}, [("A", "C")]))
    marker = pre_tokenizers.Split("SPL1T-TH1S-Pl3A5E", "removed")
    backend.pre_tokenizer = marker
    backend.add_special_tokens([AddedToken(text) for text in ("[START_DNA]", "[END_DNA]", "[START_AMINO]")])
    tokenizer = Tokenizer.load(write_folder(tmp_path, backend, {}))
    start, end, other = (tokenizer.id_of(text) for text in ("[START_DNA]", "[END_DNA]", "[START_AMINO]"))
    assert tokenizer.encode("AC[START_DNA]ACAC[END_DNA]AC") == [2, start, 0, 1, 0, 1, end, 2]
    assert tokenizer.encode("[START_AMINO]AC[END_DNA]") == [other, 2, end], "tags of two kinds are no pair"
    assert tokenizer.encode("[START_DNA]AC") == [start, 2]
    backend.pre_tokenizer = pre_tokenizers.Split("|", "removed")
    plain = Tokenizer.load(write_folder(tmp_path, backend, {}))
    assert plain.encode("[START_DNA]AC[END_DNA]") == [start, 2, end]


def test_sequences_are_found_as_by_one_expression() -> None:
    """TGI's expression, which takes the square of the time where sequences have no end."""
    expression = re.compile(r"(\[START_(DNA|SMILES|I_SMILES|AMINO)])(.*?)(\[END_\2])")

    def mark(match: re.Match[str]) -> str:
        return match[1] + "".join(MARKER + character for character in match[3]) + MARKER + match[4]

    kinds = ("DNA", "SMILES", "I_SMILES", "AMINO")
    pieces = [f"[{side}_{kind}]" for side in ("START", "END") for kind in kinds] + [
        "x",
        "é\r",
        "\n",
        "[",
        "]",
        "START_",
    ]
    rng = random.Random(0)
    marked = 0
    for _ in range(5000):
        prompt = "".join(rng.choices(pieces, k=rng.randrange(14)))
        expected = expression.sub(mark, prompt)
        assert mark_sequences(prompt) == expected, prompt
        marked += expected != prompt
    assert marked > 1000
    began = time.process_time()
    for unit in ("[START_DNA]", "[START_DNA]x\n", "[START_DNA][END_AMINO][START_SMILES]", "[START_DNA][END_DNA]"):
        mark_sequences(unit * 10_000)
    assert time.process_time() - began < 2  # seconds: the first alone would take several


def test_token_lookup(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, byte_level(), {}))
    eos = tokenizer.id_of("</s>")
    assert eos is not None and tokenizer.token_of(eos) == "</s>"
    assert tokenizer.id_of("no such token") is None
    assert tokenizer.token_of(10**6) is None
