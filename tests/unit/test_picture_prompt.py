"""Texts with pictures in places to token ids and spans, against tokenising the text in full."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from text_generation_inference.errors import ModelFormatError, TemplateError, ValidationError
from text_generation_inference.pictures.rule import PictureLayout
from text_generation_inference.text.messages import normalise_messages
from text_generation_inference.text.model_folder import SpecialTokens
from text_generation_inference.text.picture_prompt import (
    PicturePrompt,
    PictureWords,
    SeenPrompt,
    ShownPictures,
    encode_seen,
    split_at_markers,
    split_at_stand_ins,
    split_markdown,
    write_seen,
)
from text_generation_inference.text.prepare import prepare_request
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import ModelFacts, PictureSpan, SamplingParams

CORPUS = ["What is in the picture, and what is beside it?\n\nA dog.", "Ünïcode wörds 你好 😀 <row_1_col_1>"]
TOKENS = ["<image>", "<around>", "<end_of_image>"]


def backend(kind: str, normalized: bool = False) -> Backend:
    made = Backend(models.BPE(byte_fallback=kind == "metaspace", unk_token="<unk>"))
    special = ["<unk>", "<s>", "</s>"]
    if kind == "byte level":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        alphabet = []
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    if normalized:
        made.normalizer = normalizers.NFKC()
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    state = json.loads(made.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special[:3]]
    made = Backend.from_str(json.dumps(state))
    made.add_tokens([AddedToken(text, special=True, normalized=normalized) for text in TOKENS])
    bos = ("<s>", made.token_to_id("<s>"))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[bos])
    return made


def tokenizer(kind: str, **options: Any) -> Tokenizer:
    return Tokenizer(backend(kind, **options), SpecialTokens({"bos_token": AddedToken("<s>")}, [], [], []))


@dataclass(frozen=True)
class Family:
    """Pictures between two tokens, tiles apart, as several families have them."""

    image_token: str = "<image>"
    marker: str = "<around><image><around>"
    reserved: frozenset[str] = frozenset(TOKENS)
    places_bos: bool = False

    def finish(self, text: str, bos: str) -> str:
        return text.replace("<around><around>", "<around>")


@dataclass(frozen=True)
class BosLater(Family):
    """As PaliGemma and Mllama have it: BOS behind the pictures, and an end."""

    places_bos: bool = True

    def finish(self, text: str, bos: str) -> str:
        at = text.rfind(self.image_token) + len(self.image_token)
        return text[:at] + bos + text[at:] + "\n"


@dataclass(frozen=True)
class Loaded:
    digest: str
    layout: PictureLayout


def picture(digest: str, *expansion: str | int) -> Loaded:
    return Loaded(digest, PictureLayout((1, 2, 2, 3), (2, 3), expansion))


SMALL = picture("a", 1)
TILES = picture("b", "<around>", 3, "<row_1_col_1>", 4, "\n", 2, 2, "<around>")
WHOLE = picture("c", "\n\n<around>", 16, "<end_of_image>\n\n")
TOKENIZERS = {kind: tokenizer(kind) for kind in ("byte level", "metaspace")}
WORDS = {kind: PictureWords.of(Family(), TOKENIZERS[kind]) for kind in TOKENIZERS}
texts = st.text(max_size=12) | st.sampled_from(["", " ", "\n", "What is it? ", " a", "<s>", "![](", "<", ">"])
prompts = st.lists(st.sampled_from([SMALL, TILES, WHOLE]), max_size=4).flatmap(
    lambda found: st.lists(texts, min_size=len(found) + 1, max_size=len(found) + 1).map(
        lambda around: SeenPrompt(around, found)
    )
)


@pytest.mark.parametrize("rule", [Family(), BosLater()], ids=["usual", "bos later"])
@pytest.mark.parametrize("kind", list(TOKENIZERS))
@given(prompts, st.booleans())
def test_ids_are_those_of_the_text_in_full(rule: Family, kind: str, prompt: SeenPrompt, special: bool) -> None:
    model = TOKENIZERS[kind]
    words = PictureWords.of(rule, model)
    ids, spans = encode_seen(prompt, words, model, special)
    text, adds = write_seen(prompt, words, special, model.bos_token)
    assert ids == model.encode(text, adds)
    _check_spans(ids, spans, prompt, words.image_id)
    assert (ids.count(model.id_of("<s>") or -1) > 0) >= special


def _check_spans(ids: list[int], spans: list[PictureSpan], prompt: SeenPrompt, image_id: int) -> None:
    """Every placeholder belongs to one picture, in order, as many as its layout says."""
    covered = [place for span in spans for first, count in span.runs for place in range(first, first + count)]
    assert covered == [place for place, token_id in enumerate(ids) if token_id == image_id]
    assert [span.digest for span in spans] == [found.digest for found in prompt.pictures]
    for span, found in zip(spans, prompt.pictures, strict=True):
        assert span.num_features == sum(part for part in found.layout.expansion if isinstance(part, int))
        assert (span.grid, span.shape) == ([2, 3], [1, 2, 2, 3])


def test_runs() -> None:
    model, words = TOKENIZERS["byte level"], WORDS["byte level"]
    ids, (first, second) = encode_seen(SeenPrompt(["", "", "?"], [TILES, TILES]), words, model)
    around = model.id_of("<around>")
    assert [count for _, count in first.runs] == [3, 4, 4]  # numbers that are neighbours are one run
    assert first.start == 2 and ids[:2] == [model.id_of("<s>"), around]
    assert ids[first.end] == around and second.start == first.end + 1  # merged by the family


@pytest.mark.parametrize(
    ("text", "texts", "sources"),
    [
        ("![](http://x/y.png)What?", ["", "What?"], ["http://x/y.png"]),
        ("a ![](u)b![](data:image/png;base64,AA==)", ["a ", "b", ""], ["u", "data:image/png;base64,AA=="]),
        ("![]()", ["", ""], [""]),
        ("![](a(b)c)", ["", "c)"], ["a(b"]),
        ("![](![](x)", ["", ""], ["![](x"]),
        ("![](line\nbreak)", ["", ""], ["line\nbreak"]),
        ("![alt](http://x/y.png)", ["![alt](http://x/y.png)"], []),
        ("![ ](x) ! [](x) [](x) ![](x", ["![ ](x) ! [](x) [](x) ![](x"], []),
        ("", [""], []),
    ],
)
def test_markdown_as_tgi(text: str, texts: list[str], sources: list[str]) -> None:
    assert split_markdown(text) == PicturePrompt(texts, sources)


def test_markdown_of_megabytes_is_cut_at_once() -> None:
    source = "data:image/png;base64," + "A" * 20_000_000
    assert split_markdown(f"![]({source})x").sources == [source]
    assert split_markdown("![](" * 1_000_000).sources == []


def test_what_users_may_not_type() -> None:
    words = WORDS["byte level"]
    for text in ("<image>", "x<around>y", "<end_of_image>"):
        with pytest.raises(ValidationError, match="`inputs` holds '<"):
            PicturePrompt(["fine", text], ["u"]).check(words, "inputs")
    PicturePrompt(["<ima", "ge> <images> &lt;image&gt;"], ["u"]).check(words, "inputs")


def test_placeholders_that_a_tokenizer_makes_of_other_texts_are_refused() -> None:
    """A normaliser turns full-width signs into the token's own, which no search for its text would find."""
    model = tokenizer("byte level", normalized=True)
    words = PictureWords.of(Family(), model)
    forged = "＜image＞"
    assert model.encode(forged, False) == [words.image_id]
    PicturePrompt([forged], []).check(words, "inputs")
    for prompt in (SeenPrompt([forged], []), SeenPrompt([forged, ""], [SMALL])):
        with pytest.raises(ValidationError, match="cannot be told from the tokens of pictures"):
            encode_seen(prompt, words, model)


def test_a_model_whose_tokenizer_lacks_the_token() -> None:
    with pytest.raises(ModelFormatError, match="does not have"):
        PictureWords.of(Family(image_token="<picture>"), TOKENIZERS["byte level"])


def test_truncate_never_cuts_a_picture() -> None:
    model, words = TOKENIZERS["byte level"], WORDS["byte level"]
    prompt = SeenPrompt(["some words before it ", " what?"], [TILES])
    ids, (span,) = encode_seen(prompt, words, model)
    first = span.start - 1  # the token before it is the picture's as well
    for kept in range(1, len(ids) + 3):
        if len(ids) - kept > first - 1:  # BOS is kept
            with pytest.raises(ValidationError, match="`truncate` would cut a picture"):
                encode_seen(prompt, words, model, truncate=kept)
        else:
            short, (cut,) = encode_seen(prompt, words, model, truncate=kept)
            assert short == [ids[0], *ids[len(ids) - min(kept, len(ids)) + 1 :]]
            assert [n for _, n in cut.runs] == [3, 4, 4] and short[cut.start - 1] == ids[first]
    text = "some words before it"
    assert encode_seen(SeenPrompt([text], []), words, model, truncate=3)[0] == model.encode(text, True, 3)


def _request(prompt: Any, vocab_size: int, words: PictureWords | None = WORDS["byte level"]) -> Any:
    facts = ModelFacts(
        model_id="m",
        dtype="float32",
        vocab_size=vocab_size,
        max_input_tokens=60,
        max_total_tokens=64,
        num_blocks=4,
        block_size=16,
        device="cpu",
    )
    params = SamplingParams(max_new_tokens=2)
    return prepare_request(1, prompt, params, TOKENIZERS["byte level"], facts, words=words)


def test_requests() -> None:
    words = WORDS["byte level"]
    request = _request(SeenPrompt(["", "x"], [SMALL]), words.image_id)  # beyond the vocabulary: from pictures alone
    assert request.token_ids[1] == words.image_id and request.pictures[0].runs == [(1, 1)]
    with pytest.raises(ValidationError, match="outside the vocabulary"):
        _request(SeenPrompt(["<around>", "x"], [SMALL]), words.image_id)
    with pytest.raises(ValidationError, match="only a picture may bring"):
        _request([5, words.image_id], 10_000)
    with pytest.raises(ValidationError, match="`inputs` must have less than 60 tokens. Given: 6"):
        _request(SeenPrompt(["", ""], [picture("d", 60)]), 10_000)
    with pytest.raises(ValidationError, match="cannot be told"):
        _request("<image>", 10_000)
    assert _request("<image>", 10_000, None).pictures == []
    assert _request("a text", 10_000).token_ids == _request("a text", 10_000, None).token_ids


@pytest.mark.parametrize("as_parts", [False, True])
def test_pictures_are_counted_before_anything_is_made_of_them(as_parts: bool) -> None:
    """Of a body of megabytes there may be a million: looking for the places of each would take minutes."""
    shown = ShownPictures(WORDS["byte level"], as_parts, most=2)
    parts = [{"type": "image_url", "image_url": "u"}] * 1_000_000
    messages = [{"role": "user", "content": parts}]
    with pytest.raises(ValidationError, match=r"^At most 2 image\(s\) may be provided in one prompt\.$"):
        normalise_messages(messages, None, shown.show)
    assert len(shown.sources) == 2
    with pytest.raises(ValidationError, match=r"^At most 2 image\(s\)"):
        split_markdown("![](u)" * 1_000_000, 2)
    assert split_markdown("![](u)![](v)![](", 2).sources == ["u", "v"]


def test_prompts_of_templates() -> None:
    marked = "<s>user\n<around><image><around>What?<around><image><around>"
    assert split_at_markers(marked, Family().marker, ["u", "v"]) == PicturePrompt(
        ["<s>user\n", "What?", ""], ["u", "v"]
    )
    for sources in ([], ["u"], ["u", "v", "w"]):
        assert split_at_markers(marked, Family().marker, sources) is None
    assert split_at_stand_ins("aYbXc", ["X", "Y"], ["x", "y"]) == PicturePrompt(["a", "b", "c"], ["y", "x"])
    assert split_at_stand_ins("abc", [], []) == PicturePrompt(["abc"], [])
    for rendered in ("aXb", "aXbYX"):
        with pytest.raises(TemplateError, match="every picture"):
            split_at_stand_ins(rendered, ["X", "Y"], ["x", "y"])
