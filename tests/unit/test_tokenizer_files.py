"""Tokenizers of folders without tokenizer.json, against `transformers` and against what their files mean."""

import base64
import functools
import importlib
import itertools
import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.text import sentencepiece
from text_generation_inference.text.ids_as_text import IdsAsText
from text_generation_inference.text.sentencepiece import read_sentencepiece
from text_generation_inference.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again; it's what they'll do.",
    "Streaming text means that every token is sent as soon as it is known.\n\n\tdef add(a, b):\n    return a + b\n",
    "Ünïcode wörds, naïve café, 你好世界, здравствуй мир, 😀 smile. 1234567890 + 42 = 1234567932",
]
WORDS = [
    "</s>",
    "<s>",
    "<pad>",
    "<unk>",
    "<|im_start|>",
    " the",
    "  ",
    "\n",
    "fox's",
    "42",
    "é",
    "你好",
    "😀",
    "\t",
    "▁",
]
any_text = st.text(max_size=30) | st.lists(st.sampled_from(WORDS), max_size=12).map("".join) | st.sampled_from(CORPUS)


# -- vocab.json and merges.txt -------------------------------------------------------------------------------------

OPT = {
    "tokenizer_class": "GPT2Tokenizer",
    "errors": "replace",
    "add_prefix_space": False,
    "add_bos_token": True,
    "bos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": True, "rstrip": False},
    "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": True, "rstrip": False},
    "unk_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": True, "rstrip": False},
}
BYTE_LEVEL: dict[str, dict[str, Any]] = {
    "OPT": {
        "config.json": {"model_type": "opt"},
        "tokenizer_config.json": OPT,
        "special_tokens_map.json": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
        | {"pad_token": "<pad>"},
    },
    "GPT-2, with nothing beside it": {"config.json": {"model_type": "gpt2"}},
    "a space before": {
        "config.json": {"model_type": "gptj"},
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "add_bos_token": True},
    },
    "tokens beside the vocabulary": {
        "config.json": {"model_type": "gpt2"},
        "tokenizer_config.json": {"tokenizer_class": "GPT2TokenizerFast", "bos_token": "<s>", "eos_token": "<|end|>"},
        "added_tokens.json": {"<|end|>": 400},
    },
}


def write_byte_level(folder: Path, files: dict[str, Any]) -> Path:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<pad>", "</s>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.model.save(str(folder))
    return write_files(folder, files)


def write_files(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module", params=BYTE_LEVEL)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    folder = write_byte_level(tmp_path_factory.mktemp("model"), BYTE_LEVEL[request.param])
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


@settings(max_examples=150, deadline=None)
@given(text=any_text, add_special_tokens=st.booleans())
def test_byte_level_is_that_of_transformers(pair: tuple[Tokenizer, Any], text: str, add_special_tokens: bool) -> None:
    ours, theirs = pair
    ids = ours.encode(text, add_special_tokens)
    assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
    for skip in (False, True):
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip) == expected


def test_byte_level_vocabulary(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)
    flagged = {token_id for token_id, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.special_ids == flagged | set(theirs.all_special_ids)
    assert [ours.token_of(token_id) for token_id in range(ours.vocab_size)] == theirs.convert_ids_to_tokens(
        list(range(ours.vocab_size))
    )


def test_opt_begins_with_its_end(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path, BYTE_LEVEL["OPT"]))
    assert tokenizer.encode("the fox")[0] == tokenizer.id_of("</s>") == 2


# -- tokenizer.model -----------------------------------------------------------------------------------------------


def write_pieces(path: Path, pieces: list[tuple[str, float, int]], **fields: Any) -> Path:
    """As SentencePiece writes it, by the description of the message that `transformers` carries."""
    messages: Any = importlib.import_module("transformers.utils.sentencepiece_model_pb2_new")
    model = messages.ModelProto()
    for piece, score, kind in pieces:
        model.pieces.add(piece=piece, score=score, type=kind)
    model.trainer_spec.model_type = fields.pop("model_type", 2)
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id = 0
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    for name, value in fields.items():
        setattr(model.normalizer_spec, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def make_pieces() -> list[tuple[str, float, int]]:
    """Words are joined of pairs, each by one merge, as training would leave them."""
    words = ["▁the", "▁fox", "▁dog", "ing", "▁and", "▁a", "42", "▁▁", "▁you", "qu", "▁quick", "er", "▁over", "▁▁▁▁"]
    made: list[str] = []
    for word in words:
        made += [word[:end] for end in range(2, len(word) + 1) if word[:end] not in made]
    letters = sorted(set("".join(words) + "abcdefghijklmnopqrstuvwxyz0123456789.,'"))
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("[UNUSED_TOKEN_0]", 0.0, 4)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(piece, -float(rank), 1) for rank, piece in enumerate([*made, *letters])]
    return pieces


LLAMA = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}


def test_file_is_read_as_protobuf_reads_it(tmp_path: Path) -> None:
    pieces = make_pieces()
    stored = read_sentencepiece(
        write_pieces(tmp_path / "tokenizer.model", pieces, add_dummy_prefix=False, precompiled_charsmap=b"\0\1\2")
    )
    assert list(zip(stored.pieces, stored.scores, stored.kinds, strict=True)) == pieces
    assert stored.unknown == "<unk>"
    assert (stored.spaces.adds_prefix, stored.spaces.squeezes, stored.spaces.characters) == (False, False, b"\0\1\2")


def join(text: str, scores: dict[str, float], ids: dict[str, int]) -> list[int]:
    """What SentencePiece does with a text between special tokens: the pair with the best score, again and again."""
    parts = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        pairs = [(scores[a + b], -at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        known = part in scores
        found += [ids[part]] if known else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


plain_text = st.text(alphabet="abdefghiknoqrtuvy 42,.'é你😀\n", max_size=40)


@settings(max_examples=150, deadline=None)
@given(text=plain_text)
def test_pieces_are_joined_as_sentencepiece_does(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """And, where a config says `legacy: false`, as the Llama tokenizer of `transformers` does, given the same pieces,
    which differs in texts that begin with a space."""
    folder, newer = (tmp_path_factory.getbasetemp() / name for name in ("joined", "newer"))
    pieces = make_pieces()
    for each in (folder, newer):
        if not each.exists():
            config = LLAMA if each == folder else {**LLAMA, "legacy": False}
            write_pieces(each / "tokenizer.model", pieces)
            write_files(each, {"tokenizer_config.json": config, "config.json": {"model_type": "llama"}})
    ids = {piece: number for number, (piece, _, _) in enumerate(pieces)}
    scores = {piece: score for piece, score, kind in pieces if kind == 1}
    tokenizer = Tokenizer.load(folder)
    found = tokenizer.encode(text)
    assert found == [1, *join(text, scores, ids)]
    assert Tokenizer.load(newer).encode(text) == llama_of_transformers().encode(text)
    assert tokenizer.decode(found) == text


@functools.cache
def llama_of_transformers() -> Any:
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    pieces = make_pieces()
    vocabulary = {piece: number for number, (piece, _, _) in enumerate(pieces)}
    normal = {piece: score for piece, score, kind in pieces if kind == 1}
    merges = generate_merges({piece: vocabulary[piece] for piece in normal}, normal)
    return LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True, legacy=False)


def test_a_space_behind_special_tokens(tmp_path: Path) -> None:
    """Older tokenizers put one before each text between special tokens, newer ones before the first alone."""
    files = {"tokenizer_config.json": LLAMA, "config.json": {"model_type": "llama"}}
    write_pieces(tmp_path / "tokenizer.model", make_pieces())
    older = Tokenizer.load(write_files(tmp_path, files))
    newer = Tokenizer.load(write_files(tmp_path, {"tokenizer_config.json": {**LLAMA, "legacy": False}}))
    theirs = llama_of_transformers()
    for text in ("the fox</s>the dog", "</s>the", "the</s> the", " a  fox", ""):
        assert newer.encode(text) == theirs.encode(text)
    space = older.id_of("▁")
    assert older.encode("</s>,") == [1, 2, space, older.id_of(",")]
    assert newer.encode("a</s>,")[-2:] == [2, newer.id_of(",")]


def test_internlm2(tmp_path: Path) -> None:
    """Its config puts tokens of chats into the places of pieces that were kept for them."""
    declared = {"3": {"content": "<|im_start|>", "special": True, "normalized": False}}
    declared |= {
        str(number): {"content": text, "special": True} for number, text in enumerate(("<unk>", "<s>", "</s>"))
    }
    config = {"tokenizer_class": "InternLM2Tokenizer", "added_tokens_decoder": declared, "bos_token": "<s>"}
    write_pieces(tmp_path / "tokenizer.model", make_pieces(), add_dummy_prefix=False)
    tokenizer = Tokenizer.load(write_files(tmp_path, {"tokenizer_config.json": {**config, "eos_token": "</s>"}}))
    assert tokenizer.encode("<|im_start|>a</s>") == [1, 3, tokenizer.id_of("a"), 2]
    assert tokenizer.id_of("[UNUSED_TOKEN_0]") is None
    declared["9000"] = {"content": "<|beyond|>"}
    write_files(tmp_path, {"tokenizer_config.json": config})
    with pytest.raises(ModelFormatError, match=r"'<\|beyond\|>' has the id \d+ by the vocabulary but 9000"):
        Tokenizer.load(tmp_path)


def test_marks_of_chats_beside_the_pieces(tmp_path: Path) -> None:
    """Where spaces are pieces one stands before each part of a text, and none before what is found in it."""
    pieces = make_pieces()
    write_pieces(tmp_path / "tokenizer.model", pieces)
    beside = {"<|im_start|>": len(pieces), "<|im_end|>": len(pieces) + 1}
    write_files(tmp_path, {"config.json": {"model_type": "llama"}, "tokenizer_config.json": LLAMA})
    text = "<|im_start|>the\nfox<|im_end|>\n<|im_start|>dog\n"
    fields = {"special": False, "normalized": True}
    declared = {str(token_id): {"content": token, **fields} for token, token_id in beside.items()}
    declared |= {str(token_id): {"content": pieces[token_id][0], "special": True} for token_id in range(3)}
    for files in (
        {"added_tokens.json": beside},
        {"tokenizer_config.json": {**LLAMA, "added_tokens_decoder": declared}},
        {"tokenizer_config.json": {**LLAMA, "legacy": False, "added_tokens_decoder": declared}},
    ):
        tokenizer = Tokenizer.load(write_files(tmp_path, files))
        ids = tokenizer.encode(text)
        assert [token_id for token_id in ids if token_id in beside.values()] == [
            *beside.values(),
            beside["<|im_start|>"],
        ]
        newer = "legacy" in files.get("tokenizer_config.json", {})
        assert tokenizer.decode(ids[1:]).replace(" ", "") == text
        assert tokenizer.decode(ids[1:]) == text or not newer


def test_ids_that_are_not_those_of_the_vocabulary(tmp_path: Path) -> None:
    pieces = make_pieces()
    write_pieces(tmp_path / "tokenizer.model", pieces)
    write_files(tmp_path, {"config.json": {"model_type": "llama"}})
    for ids, text in (
        (
            {"<|im_end|>": len(pieces) + 2},
            rf"'<\|im_end\|>' has the id {len(pieces)} by the vocabulary but {len(pieces) + 2}",
        ),
        ({"<|im_end|>": 5}, "by the vocabulary but 5 by added_tokens.json"),
        ({"<|im_end|>": "x", "<|im_start|>": 3}, r"added_tokens\.json has no id for '<\|im_end\|>'"),
    ):
        write_files(tmp_path, {"added_tokens.json": ids})
        with pytest.raises(ModelFormatError, match=text):
            Tokenizer.load(tmp_path)


def test_pieces_that_somebody_has_defined(tmp_path: Path) -> None:
    """They are cut out of a text first, the longest of them, whatever its other pieces would be. As `sentencepiece`."""
    defined = [(piece, 0.0, 4) for piece in ("\n", "▁▁▁", "fo", "<r>", "<r", "<r>>", "▁<PRE>", "(?i)", "\\d", "[#")]
    pieces = [each for each in make_pieces() if each[0] not in ("▁▁▁", "fo")] + defined
    write_pieces(tmp_path / "tokenizer.model", pieces)
    write_files(tmp_path, {"config.json": {"model_type": "llama"}})
    tokenizer = Tokenizer.load(tmp_path)

    def cut(text: str) -> list[str]:
        ids = tokenizer.encode(text)[1:]
        assert tokenizer.decode(ids) == text
        return [tokenizer.token_of(token_id) for token_id in ids]

    assert cut("the  \na") == ["▁the", "▁▁", "\n", "a"]
    assert cut("a    the") == ["▁a", "▁▁▁", "▁the"]
    assert cut("a   the") == ["▁a", "▁▁▁", "t", "h", "e"]
    assert cut("a fox\\n") == ["▁a", "▁", "fo", "x", "<0x5C>", "n"]
    assert cut("<r>the") == ["▁", "<r>", "t", "h", "e"]
    assert cut("<r>><r<r>") == ["▁", "<r>>", "<r", "<r>"]
    assert cut("the <PRE>a<PRE>") == ["▁the", "▁<PRE>", "a", "<0x3C>", "<0x50>", "<0x52>", "<0x45>", "<0x3E>"]
    assert cut("(?i)\\d4[#") == ["▁", "(?i)", "\\d", "4", "[#"]
    # A folder's own tokens come before all of them, and what is behind one begins anew.
    write_files(tmp_path, {"added_tokens.json": {"<r>": tokenizer.id_of("<r>")}})
    tokenizer = Tokenizer.load(tmp_path)
    assert [tokenizer.token_of(each) for each in tokenizer.encode("<r>the")[1:]] == ["<r>", "▁the"]


# What SentencePiece makes of the rule that ① is written 1.
ONE_IN_A_CIRCLE = (
    r"c-kG)Rg{(m6a~<44J=7X5s+>HX^<|dp#&tQTS95+cIX^B1V)i==~QV2q)R%KknV>4bJyB0=jA@!bA#wX5R8r%Tn-NlA|t|rs8m5{"
    r"28QAod_XK>5{KA)NL=C*kAx&3F^NdRM<nHAl9P-Sd_rhNO45*;bfhH%>B&S!vXGgqd`fn*k%Q03MNaaNn|$P@0Qo7%=M<(8MJYmY"
    r"icyjhl%^DA_=0kjr2^%tNH~?LL{+L#jW4M|b!zezwW&p2>hLx7Xh3}$(U2xIrWs9XL33Ksl5c2DTiVc`c6`UTbfg2F=|oq$@IBq="
    r"L3eu5lRosOAAK1>e+GpP&JPS`2oVfpC?gooC`K|SR2jxGmPp1kkqJy@5>uJNbfz(r8O-8G<}jO|h+-~3Gml?bz<d_5kR>c;8B1Bg"
    r"a#pdD)%?m@*07#+Y-9tQ*~C`1@EhCsgWuV~c6PCoJ?!RB_Og$^IKX}m@;8S$#8HlLoMW8i1gAO08UEoMXSu+6E^(17T;^Y{a*hAE"
    r"!FB%UCbzl8UG8w7dpzU;k9ovXp75M!yyOM1dBt1ay#Jqf!Loz8"
)


def test_defined_pieces_that_are_written_otherwise(tmp_path: Path) -> None:
    """Where a table of characters changes one it is found before that, and what is behind it begins anew."""
    pieces = [*make_pieces(), ("①", 0.0, 4), ("<r>", 0.0, 4)]
    table = zlib.decompress(base64.b85decode(ONE_IN_A_CIRCLE))
    write_pieces(tmp_path / "tokenizer.model", pieces, precompiled_charsmap=table)
    write_files(tmp_path, {"config.json": {"model_type": "llama"}})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("①<r>a")[1:] == [tokenizer.id_of(piece) for piece in ("①", "▁", "<r>", "a")]
    write_pieces(tmp_path / "tokenizer.model", pieces[:-2], precompiled_charsmap=table)
    assert Tokenizer.load(tmp_path).decode(Tokenizer.load(tmp_path).encode("a①")[1:]) == "a1"


def test_pieces_that_would_take_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.model"
    write_files(tmp_path, {"config.json": {"model_type": "llama"}})

    def refused(pieces: list[tuple[str, float, int]]) -> str:
        write_pieces(path, pieces)
        with pytest.raises(ModelFormatError) as caught:
            Tokenizer.load(tmp_path)
        return str(caught.value)

    pieces = make_pieces()
    assert "has 5000 characters, and 512 are allowed" in refused([*pieces, ("x" * 5000, -1.0, 1)])
    assert "has no piece for what is unknown" in refused(pieces[1:])
    monkeypatch.setattr(sentencepiece, "_MAX_MERGES", 20)
    assert "join in more than 20 ways" in refused(pieces)
    monkeypatch.setattr(sentencepiece, "_MAX_PIECES", 100)
    assert "has more than 100 pieces" in refused(pieces)


def test_baichuan(tmp_path: Path) -> None:
    config = {"tokenizer_class": "BaichuanTokenizer", "add_bos_token": False, "bos_token": {"content": "<s>"}}
    write_pieces(tmp_path / "tokenizer.model", make_pieces())
    tokenizer = Tokenizer.load(write_files(tmp_path, {"tokenizer_config.json": {**config, "eos_token": ""}}))
    assert tokenizer.encode("the") == [tokenizer.id_of("▁the")]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


def test_spaces_that_count_once(tmp_path: Path) -> None:
    write_files(tmp_path, {"config.json": {"model_type": "baichuan"}})
    write_pieces(tmp_path / "tokenizer.model", make_pieces(), remove_extra_whitespaces=True)
    tokenizer = Tokenizer.load(tmp_path)
    assert (
        tokenizer.encode("  the    fox ") == tokenizer.encode("the fox") == [1, *map(tokenizer.id_of, ("▁the", "▁fox"))]
    )
    # Other blanks than spaces are characters like all others.
    assert tokenizer.decode(tokenizer.encode(" a\n ")[1:]) == "a\n"
    assert tokenizer.decode(tokenizer.encode("\u3000a\t\n")[1:]) == "\u3000a\t\n"
    assert tokenizer.encode("   ") == tokenizer.encode("") == [1]


def test_hostile_files(tmp_path: Path) -> None:
    """Any bytes end in a refusal, or in a tokenizer."""
    write_files(tmp_path, {"config.json": {"model_type": "llama"}})
    path = write_pieces(tmp_path / "tokenizer.model", make_pieces())
    sound, number = path.read_bytes(), random.Random(3)
    for _ in range(300):
        data = bytearray(sound[: number.randrange(len(sound))] if number.random() < 0.3 else sound)
        for _ in range(number.randrange(4)):
            data[number.randrange(len(data))] = number.randrange(256) if data else 0
        path.write_bytes(bytes(data))
        try:
            Tokenizer.load(tmp_path)
        except ModelFormatError as error:
            assert "\n" not in str(error)
    for data in (b"\n\xff\xff\xff\xff\x0f", b"\n\x02\x12\x00", b"\n\x05\x15" + struct.pack("<f", 1.0), b"\n"):
        path.write_bytes(data)
        with pytest.raises(ModelFormatError):
            Tokenizer.load(tmp_path)


# -- what is refused -----------------------------------------------------------------------------------------------


def test_refusals(tmp_path: Path) -> None:
    def refused(files: dict[str, Any]) -> str:
        folder = write_files(tmp_path, {"config.json": {"eos_token_id": 7}, **files})
        with pytest.raises(ModelFormatError) as caught:
            Tokenizer.load(folder)
        assert IdsAsText.load(folder).eos_ids == {7}, "ids are served without a tokenizer"
        return str(caught.value)

    assert "nor vocab.json with merges.txt, nor tokenizer.model" in refused({})
    (tmp_path / "tiktoken.model").write_bytes(b"IQ== 0\nIg== 1\n")
    for text in ("tiktoken.model alone does not say how text is cut", "tokenizer.json of this model", "SKIP_TOKENIZER"):
        assert text in refused({})
    (tmp_path / "tiktoken.model").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    assert "tokenizer.model alone does not say" in refused({"tokenizer_config.json": LLAMA})
    write_pieces(tmp_path / "tokenizer.model", make_pieces(), model_type=1)
    assert "not made by merging pairs" in refused({})
    write_pieces(tmp_path / "tokenizer.model", make_pieces())
    assert "how the tokenizer 'XTokenizer' cuts text" in refused(
        {"tokenizer_config.json": {"tokenizer_class": "XTokenizer"}}
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFormatError, match="not a valid tokenizer"):
        IdsAsText.load(tmp_path)


def test_damaged_vocabulary(tmp_path: Path) -> None:
    write_byte_level(tmp_path, BYTE_LEVEL["OPT"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\nabsent tokens\n")
    with pytest.raises(ModelFormatError, match=r"vocab\.json is not a valid tokenizer"):
        Tokenizer.load(tmp_path)
