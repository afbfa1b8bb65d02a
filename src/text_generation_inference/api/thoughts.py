"""What a chat request may think: how thoughts are told apart, how long they may be, and thoughts before a grammar."""

from dataclasses import dataclass

from text_generation_inference.api.openai_bodies import ChatRequest
from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ValidationError
from text_generation_inference.text.reasoning import ReasoningFormat, thinking_budget, with_thoughts
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import Grammar, ThinkingBudget

EFFORT_VARIABLES = ("enable_thinking", "thinking")  # of templates: Qwen's and DeepSeek's names of one thing


@dataclass(frozen=True)
class Thoughts:
    reasoning: ReasoningFormat | None  # set when thoughts are told from the answer
    first: bool  # the prompt ends where thoughts begin
    grammar: Grammar | None  # of thoughts and answer
    budget: ThinkingBudget | None


def plan_thoughts(
    body: ChatRequest,
    config: ServerConfig,
    known: ReasoningFormat | None,
    tokenizer: Tokenizer,
    prompt: tuple[str, str],
    grammar: Grammar | None,
    calls: bool,
) -> Thoughts:
    """`known`: how the model marks thoughts, if it does. `prompt`: the text, and the words of the model that end it."""
    num_tokens = asked_budget(body)
    if known is None:  # it has no thoughts, which is within any budget
        return Thoughts(None, False, grammar, None)
    opened = known.is_opened_by(*prompt)
    budget = None if num_tokens is None else thinking_budget(known, num_tokens, opened, calls, tokenizer)
    reasoning = choose_reasoning(body, config, known)
    if grammar is not None and reasoning is not None:
        if opened or not (known.is_closed_by(prompt[0]) or _is_turned_off(body)):
            grammar = with_thoughts(known, grammar, opened, tokenizer)
        elif not known.always_marks:
            reasoning = None
    if grammar is not None and reasoning is None:
        budget = None  # it leaves no room for thoughts, and in a string of its own the mark would be text
    return Thoughts(reasoning, opened and reasoning is not None, grammar, budget)


def asked_budget(body: ChatRequest) -> int | None:
    """How many tokens of thoughts there may be, under either name; None for any number."""
    names = ("thinking_token_budget", "thinking_budget")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if len(set(given.values())) > 1:
        raise ValidationError(" and ".join(f"`{n}`" for n in given) + " are names of one setting: give one of them")
    for name, value in given.items():
        if value < -1:
            raise ValidationError(f"`{name}` must be >= 0, or -1 for any number of tokens. Given: {value}")
        return None if value == -1 else value
    return None


def tells_thoughts(body: ChatRequest, config: ServerConfig) -> bool:
    """Whether thoughts and answer are two things, or, as in TGI, one text."""
    return config.reasoning_format != "none" if body.separate_reasoning is None else body.separate_reasoning


def choose_reasoning(body: ChatRequest, config: ServerConfig, known: ReasoningFormat | None) -> ReasoningFormat | None:
    """How to tell thoughts from the answer, if at all. Thoughts that are left out are told apart for that."""
    if known is None or known.always_marks:
        return known
    return known if tells_thoughts(body, config) or body.include_reasoning is False else None


def _is_turned_off(body: ChatRequest) -> bool:
    variables = body.chat_template_kwargs or {}
    asked = next((variables[name] for name in EFFORT_VARIABLES if name in variables), None)
    return asked is False or (asked is None and body.reasoning_effort == "none")
