"""Thoughts before an answer that a grammar decides: what the masks allow, and what a request asks for."""

from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from text_generation_inference.api.openai_bodies import ChatRequest
from text_generation_inference.api.thoughts import plan_thoughts
from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ValidationError
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.text.model_folder import SpecialTokens
from text_generation_inference.text.reasoning import ReasoningFormat, before_answer, with_thoughts
from text_generation_inference.text.reasoning.formats import TAGS
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.text.tools import ToolFormat, forced_grammar
from text_generation_inference.types import Grammar

SPECIAL = ["</s>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|channel>", "<channel|>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # added, and not special: as in Qwen3
THINK, GRANITE, GEMMA, HARMONY = (*(ReasoningFormat(TAGS[n]) for n in (0, -1, -2)), ReasoningFormat(None))
SCHEMA = Grammar("json", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')


def build(added: list[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=text in SPECIAL, normalized=False) for text in added])
    return Tokenizer(backend, SpecialTokens({"eos_token": AddedToken("</s>", special=True)}, [], [], []))


WITH_MARKS, WITHOUT = build([*SPECIAL, *PLAIN]), build(["</s>"])
COMPILERS = {id(tokenizer): GrammarCompiler(tokenizer, tokenizer.vocab_size) for tokenizer in (WITH_MARKS, WITHOUT)}


def fits(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool | None:
    """Whether the text is all that the grammar wants; None when more must come."""
    matcher = COMPILERS[id(tokenizer)].compile(grammar, tried=True).matcher()
    ids = tokenizer.encode(text, False)
    if matcher.try_consume_tokens(ids) < len(ids):
        return False
    return True if matcher.is_accepting() else None


CASES: list[tuple[ReasoningFormat, bool, str, bool | None]] = [
    (THINK, True, 'Hm. {"a": no}\n</think>\n\n{"a": 1}', True),
    (THINK, True, "Hm. < </thin", None),
    (THINK, True, '<think>\nHm.</think>{"a": 1}', True),
    (THINK, True, 'Hm.</think>{"b": 1}', False),
    (THINK, True, "Hm.</think>Well", False),
    (THINK, True, '{"a": 1}', None),  # a thought
    (THINK, True, "Hm.</s>", False),
    (THINK, False, '<think>\nHm.\n</think>\n\n{"a": 1}', True),
    (THINK, False, '\n<think></think>{"a": 1}', True),
    (THINK, False, '{"a": 1}', True),
    (THINK, False, "Hm.", False),
    (THINK, False, '{"a": 1}<think>', False),
    (GRANITE, False, "Here's my thought process:\nHm.\nHere is my response:\n" + '{"a": 1}', True),
    (GRANITE, False, "Here is my thought process: Here's my response: no", False),
]


@pytest.mark.parametrize(("form", "opened", "text", "expected"), CASES)
@pytest.mark.parametrize("tokenizer", [WITH_MARKS, WITHOUT], ids=["tokens", "spelt"])
def test_tags(form: ReasoningFormat, opened: bool, text: str, expected: bool | None, tokenizer: Tokenizer) -> None:
    if tokenizer is WITHOUT and "</s>" in text:
        text = text.replace("</s>", "")
        expected = None
    assert fits(with_thoughts(form, SCHEMA, opened, tokenizer), tokenizer, text) is expected


def test_marks_that_are_a_token_and_a_word() -> None:
    grammar = with_thoughts(GEMMA, Grammar("regex", "yes|no"), False, WITH_MARKS)
    assert fits(grammar, WITH_MARKS, "<|channel>thought\nHm.<channel|>yes") is True
    assert fits(grammar, WITH_MARKS, "no") is True
    assert fits(grammar, WITH_MARKS, "<|channel>yes") is False


ANALYSIS, NEXT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}"


@pytest.mark.parametrize("thoughts", ["", f"{ANALYSIS}Hm. <b>{NEXT}", f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}"])
def test_channels(thoughts: str) -> None:
    grammar = with_thoughts(HARMONY, SCHEMA, False, WITH_MARKS)
    assert fits(grammar, WITH_MARKS, thoughts + FINAL + '{"a": 1}') is True
    assert fits(grammar, WITH_MARKS, thoughts + FINAL + "Yes") is False
    assert fits(grammar, WITH_MARKS, thoughts + '{"a": 1}') is False
    form = ToolFormat("harmony", tuple((text, WITH_MARKS.id_of(text) or 0) for text in SPECIAL[1:6]))
    call = with_thoughts(HARMONY, forced_grammar(form, TOOLS, None, False), False, WITH_MARKS)
    assert fits(call, WITH_MARKS, thoughts + CALL) is True
    assert fits(call, WITH_MARKS, thoughts + FINAL) is False
    header = before_answer(HARMONY, WITH_MARKS)
    either = with_thoughts(HARMONY, forced_grammar(form, TOOLS, None, False, SCHEMA, header), False, WITH_MARKS)
    assert fits(either, WITH_MARKS, thoughts + CALL) is True
    assert fits(either, WITH_MARKS, thoughts + FINAL + '{"a": 1}') is True
    assert fits(either, WITH_MARKS, thoughts + '{"a": 1}') is False


def test_calls_behind_thoughts() -> None:
    markers = ("<tool_call>", "</tool_call>")
    form = ToolFormat("hermes", tuple((text, WITH_MARKS.id_of(text) or 0) for text in markers))
    grammar = with_thoughts(THINK, forced_grammar(form, TOOLS, None, True), True, WITH_MARKS)
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    assert fits(grammar, WITH_MARKS, f"Hm.</think>\n{call}\n{call}") is True
    assert fits(grammar, WITH_MARKS, call) is False  # the marks of calls are no words of thoughts
    assert fits(grammar, WITH_MARKS, "Hm.</think>Yes") is False


def plan(
    prompt: str = "", known: ReasoningFormat | None = THINK, config: Any = None, grammar: Any = SCHEMA, **fields: Any
) -> Any:
    body = msgspec.convert({"messages": [{"role": "user", "content": "Hi"}], **fields}, ChatRequest)
    return plan_thoughts(body, config or ServerConfig(), known, WITH_MARKS, (prompt, ""), grammar, False)


@pytest.mark.parametrize(
    ("prompt", "fields", "thinks"),
    [
        ("<user>Hi<bot>", {}, True),
        ("<bot><think>\n", {}, True),
        ("<bot><think>\n\n</think>\n\n", {}, False),  # Qwen3, when thinking is turned off
        ("<bot></think>", {}, False),  # DeepSeek V3.1, likewise
        ("<bot>", {"enable_thinking": False}, False),
        ("<bot>", {"chat_template_kwargs": {"thinking": False}}, False),
        ("<bot>", {"reasoning_effort": "none"}, False),
        ("<bot>", {"reasoning_effort": "none", "enable_thinking": True}, True),
        ("<bot>", {"reasoning_effort": "low"}, True),
        ("<bot><think>\n", {"reasoning_effort": "none"}, True),  # a template that does not care
        ("<bot>", {"separate_reasoning": False}, False),
        ("<bot>", {"separate_reasoning": False, "include_reasoning": False}, True),
    ],
)
def test_when_a_grammar_leaves_room_for_thoughts(prompt: str, fields: dict[str, Any], thinks: bool) -> None:
    found = plan(prompt, **fields)
    assert (found.reasoning is not None, found.grammar != SCHEMA) == (thinks, thinks)
    assert found.first == (thinks and prompt.endswith("<think>\n"))


def test_models_that_do_not_think() -> None:
    found = plan(known=None, thinking_budget=5)
    assert (found.reasoning, found.grammar, found.budget) == (None, SCHEMA, None)
    assert plan(config=ServerConfig(reasoning_format="none")).grammar == SCHEMA


@pytest.mark.parametrize("fields", [{"thinking_budget": 7}, {"thinking_token_budget": 7, "thinking_budget": 7}])
def test_budgets_have_two_names(fields: dict[str, int]) -> None:
    budget = plan("<bot><think>\n", **fields).budget
    assert (budget.num_tokens, budget.opened, budget.closing) == (7, True, [WITH_MARKS.id_of("</think>")])
    assert plan(thinking_budget=-1).budget is None
    # Also where thoughts are not told apart, unless a grammar leaves no room for them.
    as_one = ServerConfig(reasoning_format="none")
    assert plan("<bot>", config=as_one, grammar=None, **fields).budget.opened is False
    assert plan("<bot><think>\n", config=as_one, **fields).budget is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"thinking_budget": -2}, "`thinking_budget` must be >= 0, or -1"),
        ({"thinking_budget": 1, "thinking_token_budget": 2}, "`thinking_token_budget` and `thinking_budget` are names"),
    ],
)
def test_budgets_that_are_refused(fields: dict[str, int], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        plan(**fields)
