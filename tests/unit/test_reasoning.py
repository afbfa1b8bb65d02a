"""Thoughts told from answers: how models mark them, text in any pieces, stop strings, tokens."""

import signal
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.model_folder import SpecialTokens
from text_generation_inference.text.output import RequestText
from text_generation_inference.text.reasoning import ReasoningFormat, detect_reasoning_format
from text_generation_inference.text.reasoning.formats import TAGS
from text_generation_inference.text.reasoning.harmony import MARKERS
from text_generation_inference.text.stopping import StopStrings
from text_generation_inference.text.tokenizer import Tokenizer

FILES = Path(__file__).parent / "templates"
THINK, GRANITE = ReasoningFormat(TAGS[0]), ReasoningFormat(TAGS[-1])
HARMONY = ReasoningFormat(None)


def split(form: ReasoningFormat, pieces: Sequence[str], opened: bool = False, calls: bool = False) -> tuple[str, str]:
    splitter = form.split(opened, calls)
    parts = [*map(splitter.push, pieces), splitter.finish()]
    return "".join(thoughts for thoughts, _ in parts), "".join(part for _, answer in parts for part in answer)


TAG_CASES: list[tuple[str, bool, tuple[str, str]]] = [
    ("Just an answer.", False, ("", "Just an answer.")),
    ("  spaces stay\n", False, ("", "  spaces stay\n")),
    ("", False, ("", "")),
    (" \n", False, ("", " \n")),
    ("<think>\nI see.\n\nSo.\n</think>\n\nYes.\n", False, ("I see.\n\nSo.", "Yes.\n")),
    ("\n<think>a</think>b", False, ("a", "b")),
    ("<think>\n\n</think>\n\nAt once.", False, ("", "At once.")),
    ("<think>never ends ", False, ("never ends", "")),
    ("<think>never ends </thin", False, ("never ends </thin", "")),
    ("<think>a < b </thin > c</think>d", False, ("a < b </thin > c", "d")),
    ("<think>a</think>b</think>c<think>d", False, ("a", "b</think>c<think>d")),
    ("<thin", False, ("", "<thin")),
    ("<thinker> is no tag", False, ("", "<thinker> is no tag")),
    ("Write <think> and </think>.", False, ("", "Write <think> and </think>.")),
    ("I see.\n</think>\n\nYes.", True, ("I see.", "Yes.")),
    ("\n\nI see.</think>Yes.", True, ("I see.", "Yes.")),
    ("<think>\nI see.</think>Yes.", True, ("I see.", "Yes.")),
    ("<thin air</think>Yes.", True, ("<thin air", "Yes.")),
    ("</think>Yes.", True, ("", "Yes.")),
    ("cut off", True, ("cut off", "")),
    (" ", True, ("", "")),
    ("\n" * 1000 + "<think>a</think>b", False, ("a", "b")),
    ("\n" * 1025 + "<think>a</think>b", False, ("", "\n" * 1025 + "<think>a</think>b")),
    ("a" + "\n" * 100 + "</think>b", True, ("a" + "\n" * 36, "b")),
]


@pytest.mark.parametrize(("text", "opened", "expected"), TAG_CASES)
def test_tags(text: str, opened: bool, expected: tuple[str, str]) -> None:
    for size in (1, 2, 3, 7, 1000):
        assert split(THINK, [text[i : i + size] for i in range(0, len(text), size)], opened) == expected


def test_thoughts_are_told_as_they_come() -> None:
    splitter = THINK.split(opened=False, calls=False)
    pieces = ("<think>", "\n", "One", " two", ".\n", "</", "think>", "\n", "Yes", ".")
    told = [(thoughts, "".join(answer)) for thoughts, answer in map(splitter.push, pieces)]
    assert told == [("", "")] * 2 + [("One", ""), (" two", ""), (".", "")] + [("", "")] * 3 + [("", "Yes"), ("", ".")]


def test_white_space_before_an_answer_is_not_held_for_ever() -> None:
    splitter = THINK.split(opened=False, calls=False)
    told = ["".join(splitter.push("\n")[1]) for _ in range(1030)]
    assert told == [""] * 1024 + ["\n" * 1025] + ["\n"] * 5


def test_granite_marks_thoughts_in_words() -> None:
    for here in ("Here is", "Here's"):
        text = f"{here} my thought process:\nHm.\n\n{here} my response:\nYes."
        assert split(GRANITE, list(text)) == ("Hm.", "Yes.")
    assert split(GRANITE, list("Here is my answer.")) == ("", "Here is my answer.")


ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
ARGUMENTS = '{"place": "Köln"}'
CALL = "<|channel|>commentary to=functions.look<|message|>" + ARGUMENTS
HARMONY_CASES: list[tuple[str, tuple[str, str]]] = [
    (f"{ANALYSIS}I see.<|end|>{FINAL}Yes.", ("I see.", "Yes.")),
    ("<|channel|>final<|message|>Yes.", ("", "Yes.")),
    (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}c", ("a\nb", "c")),
    (
        f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>{FINAL}c",
        ("a", "I look.\nc"),
    ),
    (f"{ANALYSIS}cut o", ("cut o", "")),
    (f"{ANALYSIS}a<|end|><|start|>assist", ("a", "")),
    (f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>fin", ("a", "")),
    ("No header at all.", ("", "No header at all.")),
    ("to be or not", ("", "to be or not")),
    ('{"a": "<|b"}', ("", '{"a": "<|b"}')),
    (f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ARGUMENTS}", ("", CALL)),
    (f" to=functions.look<|channel|>commentary json<|message|>{ARGUMENTS}", ("", CALL)),
    (
        f"{ANALYSIS}Hm.<|end|><|start|>assistant to=functions.look<|channel|>commentary json<|message|>{ARGUMENTS}",
        ("Hm.", CALL),
    ),
]


@pytest.mark.parametrize(("text", "expected"), HARMONY_CASES)
def test_harmony(text: str, expected: tuple[str, str]) -> None:
    for size in (1, 2, 3, 7, 1000):
        assert split(HARMONY, [text[i : i + size] for i in range(0, len(text), size)], calls=True) == expected


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ends a test that would never end."""

    def ring(signum: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
def test_harmony_gives_up_headers_without_end() -> None:
    assert split(HARMONY, ["<|channel|>"] * 60) == ("", "")
    assert split(HARMONY, [" <|start|>", *["word "] * 200]) == ("", "word " * 200)
    text = "<|start|>" + "a" * 600 + "<|message|>b<|end|><|channel|>final<|message|>c"
    assert split(HARMONY, [text]) == split(HARMONY, list(text)) == ("", "a" * 600 + "<|message|>b\nc")


@pytest.mark.usefixtures("alarm")
@settings(max_examples=100, deadline=None)
@given(
    runs=st.lists(
        st.tuples(st.sampled_from([*MARKERS, " ", "to=", "word", "<|"]), st.sampled_from([1, 2, 47, 60, 600])),
        max_size=5,
    ),
    size=st.integers(1, 900),
)
def test_harmony_always_goes_on(runs: list[tuple[str, int]], size: int) -> None:
    text = "".join(bit * count for bit, count in runs)
    parts = split(HARMONY, [text[i : i + size] for i in range(0, len(text), size)])
    assert parts == split(HARMONY, [text])


def test_harmony_without_tools_shows_what_was_written() -> None:
    text = f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ARGUMENTS}"
    assert split(HARMONY, [text]) == ("", ARGUMENTS)


BITS = ["<think>", "</think>", "<thi", "</", "\n", "  ", "a", "Here is my ", "thought process:", "response:"]
BITS += [
    "<|channel|>",
    "analysis",
    "final",
    " to=functions.f",
    "<|message|>",
    "<|end|>",
    "<|start|>",
    "assistant",
    "<|",
]


@settings(max_examples=300, deadline=None)
@given(
    form=st.sampled_from([THINK, GRANITE, HARMONY]),
    bits=st.lists(st.sampled_from(BITS), max_size=12),
    cuts=st.lists(st.integers(0, 120), max_size=8),
    opened=st.booleans(),
    calls=st.booleans(),
)
def test_cuts_make_no_difference(
    form: ReasoningFormat, bits: list[str], cuts: list[int], opened: bool, calls: bool
) -> None:
    text = "".join(bits)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert split(form, pieces, opened, calls) == split(form, [text], opened, calls)


# -- detection ------------------------------------------------------------------------------------------------------


def build(special: Sequence[str] = (), ordinary: Sequence[str] = ()) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ["</s>", *special]])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ordinary])
    return Tokenizer(backend, SpecialTokens({"eos_token": AddedToken("</s>", special=True)}, [], [], []))


PLAIN = build()


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("qwen3_thinking", "<think>"),
        ("deepseek_r1", "<think>"),
        ("smollm3", "<think>"),
        ("gpt_oss", None),
        ("yi", ""),
        ("llama31_tools", ""),
        ("gemma3", ""),
        ("mistral_v3_tools", ""),
    ],
)
def test_detection(template: str, tags: str | None) -> None:
    found = detect_reasoning_format(ChatTemplate((FILES / f"{template}.jinja").read_text()), PLAIN)
    if tags == "":
        assert found is None
    else:
        assert found is not None
        assert (found.tags and found.tags.opens[0]) == tags and found.always_marks == (tags is None)


def test_detection_by_tokens() -> None:
    template = ChatTemplate("{{ messages }}")
    found = detect_reasoning_format(template, build(["[THINK]", "[/THINK]"]))
    assert found is not None and found.tags == TAGS[1] and len(found.shown_ids) == 2
    found = detect_reasoning_format(template, build([], ["<think>", "</think>"]))
    assert found is not None and found.tags == TAGS[0] and not found.shown_ids
    assert detect_reasoning_format(template, build([], ["<think>"])) is None
    assert detect_reasoning_format(ChatTemplate(None), build([], ["<think>", "</think>"])) is None, "no chats"
    words = ChatTemplate("Write Here is my thought process: and then Here is my response: {{ messages }}")
    found = detect_reasoning_format(words, PLAIN)
    assert found is not None and found.tags == TAGS[-1]


@pytest.mark.parametrize(
    ("prompt", "continued", "opened"),
    [
        ("<user>Hi<assistant>", "", False),
        ("<user>Hi<assistant><think>\n", "", True),
        ("<user>Hi<assistant><think>\n\n</think>\n\n", "", False),
        ("<user>What is <think>?<assistant>", "", False),
        ("<user>Hi<assistant><think>\nI thi", "<think>\nI thi", True),
        ("<user>Hi<assistant><think>a</think>b", "<think>a</think>b", False),
    ],
)
def test_prompts_that_end_within_thoughts(prompt: str, continued: str, opened: bool) -> None:
    assert THINK.is_opened_by(prompt, continued) == opened
    assert not HARMONY.is_opened_by(prompt, continued)


# -- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [PLAIN, build(["<think>", "</think>"]), build([], ["<think>", "</think>"])])
def test_stop_strings_end_answers_and_not_thoughts(tokenizer: Tokenizer) -> None:
    form = detect_reasoning_format(ChatTemplate("{{ messages }}</think>"), tokenizer)
    assert form is not None
    text = RequestText(
        tokenizer,
        [],
        StopStrings(["two"], include_stop=False),
        shown_ids=form.shown_ids,
        splitter=form.split(opened=False, calls=False),
    )
    answer, thoughts = "", ""
    for token_id in tokenizer.encode("<think>\none two é\n</think>\n\none two three</s>"):
        piece, stopped = text.push(token_id)
        answer, thoughts = answer + piece, thoughts + text.take_thoughts()
        if stopped:
            break
    assert (thoughts, answer, text.stopped) == ("one two é", "one ", True)
    assert text.finish() == "" and text.text == "one "


@pytest.mark.parametrize(
    ("stop", "told"),
    [
        ("\n", f"I look.\n{CALL}"),
        ("channel", f"I look.\n{CALL}"),
        ("message", f"I look.\n{CALL}"),
        (".{", f"I look.\n{CALL}"),  # goes across what stands between two messages
        ("k.", "I loo"),
        ("Köln", f"I look.\n{CALL[: CALL.index('Köln')]}"),
    ],
)
def test_stop_strings_are_looked_for_in_the_words_of_the_model(stop: str, told: str) -> None:
    text = RequestText(PLAIN, [], StopStrings([stop], include_stop=False), splitter=HARMONY.split(False, calls=True))
    written = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.look<|channel|>commentary "
    for token_id in PLAIN.encode(f"{written}<|constrain|>json<|message|>{ARGUMENTS}"):
        if text.push(token_id)[1]:
            break
    text.finish()
    assert (text.text, text.stopped) == (told, told[-1] != "}")


def test_text_held_back_comes_at_the_end() -> None:
    form = ReasoningFormat(TAGS[0])
    for written, told in (("<think>a </thi", ("a </thi", "")), ("<thi", ("", "<thi"))):
        text = RequestText(PLAIN, [], StopStrings([], False), splitter=form.split(opened=False, calls=False))
        pieces = [text.push(token_id)[0] for token_id in PLAIN.encode(written)]
        answer = "".join(pieces) + text.finish()
        assert (text.take_thoughts(), answer) == told
