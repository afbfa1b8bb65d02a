"""Ids that a model has and its tokenizer lacks: they have no text anywhere, and grammars never allow them."""

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from text_generation_inference.api.generation import NativeText, openai_text
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.detokenize import TextStream
from text_generation_inference.text.grammar import GrammarCompiler, any_json, json_grammar, regex_grammar
from text_generation_inference.text.model_folder import SpecialTokens
from text_generation_inference.text.prepare import prepare_request
from text_generation_inference.text.token_bytes import num_characters, token_bytes, token_name
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.text.tools import ToolParser, detect_tool_format
from text_generation_inference.types import Grammar, ModelFacts, SamplingParams

EXTRA = 37  # ids of the model that the tokenizer lacks


def build() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = SpecialTokens({"eos_token": AddedToken("</s>", special=True)}, [], [], [])
    tokenizer = Tokenizer(backend, special)
    backend.add_tokens([AddedToken("<added>", normalized=False)])
    return tokenizer


TOKENIZER = build()
SIZE = TOKENIZER.vocab_size + 1  # the added token is inside
PADDING = [SIZE, SIZE + EXTRA - 1]
FACTS = ModelFacts(
    model_id="m",
    dtype="float32",
    vocab_size=SIZE + EXTRA,
    max_input_tokens=50,
    max_total_tokens=100,
    num_blocks=9,
    block_size=16,
    device="cpu",
)


def test_the_tokenizer_has_none_of_them() -> None:
    assert TOKENIZER.token_of(SIZE - 1) == "<added>", "an added token is no padding"
    assert TOKENIZER.decode([SIZE - 1]) == "<added>"
    for token_id in PADDING:
        assert TOKENIZER.token_of(token_id) is None and TOKENIZER.decode([token_id], False) == ""


@pytest.mark.parametrize("skips", [True, False])
def test_streams_leave_them_out(skips: bool) -> None:
    """Also within a character: the text is that of the other tokens."""
    ids = TOKENIZER.encode("aé <added>字b")
    for place in range(len(ids) + 1):
        stream = TextStream(TOKENIZER, [0], skips)
        pieces = [stream.push(token_id) for token_id in [*ids[:place], *PADDING, *ids[place:]]]
        assert "".join(pieces) + stream.flush() == "aé <added>字b"
        assert pieces[place : place + 2] == ["", ""]


def test_answers_of_all_routes() -> None:
    params = SamplingParams(stop=["bc"], max_new_tokens=20)
    ids = TOKENIZER.encode("ab")
    request = prepare_request(1, [PADDING[0], 1], params, TOKENIZER, FACTS)  # as a prompt too
    native, openai = NativeText(TOKENIZER, request), openai_text(TOKENIZER, request)
    for token_id in [*ids, *PADDING]:
        assert native.push(token_id)[0] == (TOKENIZER.decode([token_id]) if token_id < SIZE else "")
        assert openai.push(token_id)[1] is False
    last = TOKENIZER.encode("c")[0]
    assert native.push(last) == ("c", True), "a stop string is found across them"
    assert openai.push(last) == ("", True) and openai.text == "a"
    assert native.generated == "abc"


def test_log_probabilities_name_them_as_nothing() -> None:
    for token_id in PADDING:
        assert token_name(TOKENIZER, token_id) == "" and token_bytes(TOKENIZER, token_id) == b""
        assert num_characters(TOKENIZER, token_id) == 0


def test_tool_calls_are_read_across_them() -> None:
    tool_format = detect_tool_format(ChatTemplate("<tool_call>"), TOKENIZER)
    parser = ToolParser(tool_format, ["f"])
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    request = prepare_request(1, [1], SamplingParams(max_new_tokens=90), TOKENIZER, FACTS)
    output = openai_text(TOKENIZER, request)
    ids = [each for token_id in TOKENIZER.encode(text) for each in (token_id, PADDING[0])]
    events = [event for token_id in ids for event in parser.push(output.push(token_id)[0])] + parser.finish()
    assert [type(event).__name__ for event in events] == ["CallStart", "CallArguments", "CallArguments"]


@pytest.mark.parametrize(
    "grammar", [any_json(), json_grammar({"type": "object"}), regex_grammar("[a-z]*"), regex_grammar(r"(.|\n)*")]
)
def test_grammars_never_allow_them(grammar: Grammar) -> None:
    tokenizer = build()
    compiler = GrammarCompiler(tokenizer, FACTS.vocab_size)
    matcher: LLMatcher = compiler.compile(grammar).matcher()
    for _ in range(12):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        assert len(mask) >= FACTS.vocab_size and not mask[SIZE:].any()
        allowed = [token_id for token_id in np.flatnonzero(mask).tolist() if token_id not in tokenizer.eos_ids]
        if not allowed:
            break
        matcher.consume_token(allowed[len(allowed) // 2])
