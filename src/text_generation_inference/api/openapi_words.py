"""What the OpenAPI document says about fields: words, examples, ranges.

Data for `openapi`. A key is the name of a field wherever it appears, or `Component.field` for one place.
Types, defaults and which fields there are come from the structs.
"""

from typing import Any

from text_generation_inference.types import MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MIN_REPETITION_PENALTY

FIELDS = {
    "inputs": "The prompt.",
    "parameters": "How to generate. Left out, the model samples; given, even empty, it does not unless asked.",
    "CompatGenerateRequest.stream": "Send tokens as they come.",
    "best_of": "Generate this many times and return the one with the best mean log-probability.",
    "CompletionRequest.best_of": "Generate this many times for each prompt and return the `n` best.",
    "temperature": "Below 1: closer to the most likely tokens. Above 1: more varied.",
    "ChatRequest.temperature": "0: always the most likely token. Below 1: closer to it. Above 1: more varied.",
    "CompletionRequest.temperature": "0: always the most likely token. Below 1: closer to it. Above 1: more varied.",
    "repetition_penalty": "Above 1: tokens already in the prompt or the output become less likely. 1: no effect.",
    "frequency_penalty": "Makes a token less likely the more often it has appeared; negative: more likely.",
    "presence_penalty": "Makes tokens that have appeared less likely; negative: more likely.",
    "top_k": "Choose among this many of the most likely tokens.",
    "modalities": "Only text is generated.",
    "top_p": "Choose among the most likely tokens that together reach this probability.",
    "typical_p": "Choose among the tokens of typical information that together reach this probability.",
    "cache_salt": "Cached prefixes are shared only between requests with the same one.",
    "min_p": "Leave out tokens less likely than this share of the most likely one.",
    "do_sample": "Draw tokens at random by their probability instead of always taking the most likely one.",
    "max_new_tokens": "At most this many tokens. Without it, as many as the server's limits allow.",
    "max_tokens": "At most this many tokens. Without it, as many as the server's limits allow.",
    "max_completion_tokens": "OpenAI's newer name of `max_tokens`.",
    "return_full_text": "Put the prompt before the generated text.",
    "stop": "Texts that end the generation.",
    "GenerateParameters.stop": "Texts that end the generation. They stay in the output. "
    "The server limits how many (`--max-stop-sequences`).",
    "truncate": "Use only this many of the last tokens of the prompt.",
    "watermark": "Mark the text statistically, so that it can be recognised as generated.",
    "GenerateParameters.details": "Return tokens, log-probabilities, and why the generation ended.",
    "decoder_input_details": "Return the log-probabilities of the prompt too. Not for streams.",
    "seed": "Makes random choices repeatable.",
    "top_n_tokens": "Return this many of the most likely tokens at each place.",
    "grammar": "What the output must match.",
    "adapter_id": "The LoRA adapter to use.",
    "messages": "The conversation so far.",
    "ChatRequest.model": "The model, or a LoRA adapter. `tgi` and nothing mean the model that is served.",
    "CompletionRequest.model": "The model, or a LoRA adapter. `tgi` and nothing mean the model that is served.",
    "ChatRequest.logprobs": "Return log-probabilities.",
    "CompletionRequest.logprobs": "Return log-probabilities, and this many of the most likely tokens at each place.",
    "top_logprobs": "Return this many of the most likely tokens at each place.",
    "n": "How many answers to generate.",
    "logit_bias": "Token id to a number that is added to its score.",
    "stream": "Send the answer in parts as they come.",
    "include_usage": "Send a last part with the token counts.",
    "response_format": "What the answer must match.",
    "tools": "Functions that the model may call.",
    "tool_choice": "Whether and what the model must call: `auto`, `none`, `required`, or a function.",
    "tool_prompt": "Put before the tools when the model's template does not show them itself.",
    "parallel_tool_calls": "Whether an answer may call more than one function.",
    "chat_template_kwargs": "Further variables for the chat template.",
    "add_generation_prompt": "End the prompt with the start of the assistant's turn.",
    "continue_final_message": "Go on with the last message instead of answering it.",
    "documents": "Documents for templates that can show them.",
    "ignore_eos": "Go on after a token that ends the text.",
    "prompt": "One or more texts, or token ids.",
    "min_tokens": "No end before so many tokens.",
    "stop_token_ids": "Token ids that end the text.",
    "include_stop_str_in_output": "Keep what ended the text.",
    "skip_special_tokens": "Leave special tokens out of the text. The default.",
    "add_special_tokens": "Let the tokenizer add its own tokens to the prompt.",
    "truncate_prompt_tokens": "Another name of `truncate`. -1: as many as the model takes.",
    "ChatRequest.max_new_tokens": "Another name of `max_tokens`.",
    "CompletionRequest.max_new_tokens": "Another name of `max_tokens`.",
    "CompletionRequest.max_tokens": "At most this many tokens. 0, with `echo`: only score the prompt.",
    "CompletionRequest.return_full_text": "Another name of `echo`.",
    "ChatRequest.do_sample": "False, without a `temperature`: always the most likely token.",
    "CompletionRequest.do_sample": "False, without a `temperature`: always the most likely token.",
    "guided_json": "A JSON schema that the text must match, as an object or as text.",
    "guided_regex": "A regular expression that the text must match.",
    "guided_choice": "Texts one of which must come.",
    "structured_outputs": "What the text must match: one of `json`, `regex`, `choice` and `json_object`.",
    "enable_thinking": "A variable of the chat template.",
    "functions": "The older form of `tools`.",
    "function_call": "The older form of a call.",
    "ChatRequest.function_call": "The older form of `tool_choice`.",
    "echo": "Put the prompt before the text.",
    "suffix": "Not supported: put what comes after into the prompt.",
    "content": "The text, or its parts.",
    "tool_call_id": "The call that this message answers.",
    "instances": "Each is an object with `inputs` and `parameters`, or a chat request.",
    "finish_reason": "Why the generation ended.",
    "generated_text": "The text.",
    "generated_tokens": "How many tokens were generated.",
    "prefill": "The tokens of the prompt.",
    "Details.best_of_sequences": "The generations that were not chosen.",
    "FinishReason": "`length`: the limit was reached. `eos_token`: the model ended the text. "
    "`stop_sequence`: one of the stop texts came.",
}

EXAMPLES: dict[str, Any] = {
    "inputs": "My name is Olivier and I",
    "temperature": 0.5,
    "repetition_penalty": 1.03,
    "GenerateParameters.top_k": 10,
    "top_p": 0.95,
    "typical_p": 0.95,
    "max_new_tokens": 20,
    "max_tokens": 32,
    "GenerateParameters.stop": ["photographer"],
    "messages": [{"role": "user", "content": "What is Deep Learning?"}],
    "role": "user",
    "error_type": "validation",
    "router": "text-generation-router",
}

_ABOVE_0 = {"minimum": 0, "exclusiveMinimum": True}
_BETWEEN_0_AND_1 = {**_ABOVE_0, "maximum": 1, "exclusiveMaximum": True}
_WITHIN_2 = {"minimum": -2, "maximum": 2}
_REPETITION = {"minimum": MIN_REPETITION_PENALTY, "maximum": MAX_REPETITION_PENALTY}
_OPENAI_RANGES = {
    "temperature": {"minimum": 0, "maximum": 2},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "n": {"minimum": 1, "maximum": 128},
    "top_k": {"minimum": -1},
    "top_p": {**_ABOVE_0, "maximum": 1},
    "typical_p": {**_ABOVE_0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": _REPETITION,
    "frequency_penalty": _WITHIN_2,
    "presence_penalty": _WITHIN_2,
}
# Checks made after decoding, which the types of the structs do not tell.
RANGES: dict[str, dict[str, dict[str, Any]]] = {
    "GenerateParameters": {
        "temperature": {**_ABOVE_0, "maximum": MAX_TEMPERATURE},
        "repetition_penalty": _REPETITION,
        "frequency_penalty": _WITHIN_2,
        "top_k": {"minimum": 1},
        "top_p": _BETWEEN_0_AND_1,
        "typical_p": _BETWEEN_0_AND_1,
        "max_new_tokens": {"minimum": 1},
        "truncate": {"minimum": 1},
    },
    "GenerateRequest": {"inputs": {"minLength": 1}},
    "CompatGenerateRequest": {"inputs": {"minLength": 1}},
    "ChatRequest": {**_OPENAI_RANGES, "top_logprobs": {"maximum": 20}},
    "CompletionRequest": {**_OPENAI_RANGES, "max_tokens": {"minimum": 0}},
}


def _grammar(kinds: list[str], value: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["type", "value"],
        "properties": {"type": {"type": "string", "enum": kinds}, "value": value},
    }


GRAMMAR = {
    "description": "What the output must match.",
    "oneOf": [
        _grammar(["json", "json_object"], {"description": "A JSON schema with `properties`, as an object or as text."}),
        _grammar(["regex"], {"type": "string", "description": "A regular expression."}),
        _grammar(["json_schema"], {"$ref": "#/components/schemas/JsonSchemaConfig"}),
    ],
}
