"""`/v1/completions`: prompts, echo, log-probabilities, candidates."""

import math
import re

import httpx2 as httpx
import pytest
from openai_calls import CHAT, COMPLETIONS, COUNT, chat, complete, refused, stream
from serving import NUM_RANKS


def test_completion(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": COUNT, "temperature": 0, "max_tokens": 4})
    found = answer.json()
    assert list(found) == ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"]
    assert found["object"] == "text_completion"
    assert re.fullmatch(r"cmpl-\w{10,}", found["id"])
    (choice,) = found["choices"]
    assert choice == {"index": 0, "text": " three, four,", "logprobs": None, "finish_reason": "length"}
    assert found["usage"]["completion_tokens"] == 4
    assert answer.headers["x-generated-tokens"] == "4"
    assert "x-compute-time" not in answer.headers
    assert answer.headers["x-compute-characters"] == str(len(COUNT))


def test_completion_stream(http: httpx.Client) -> None:
    chunks = stream(http, COMPLETIONS, max_tokens=4)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [" three", ",", " four", ","]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    for chunk in chunks:
        assert list(chunk) == ["object", "id", "created", "model", "system_fingerprint", "choices"]
        assert chunk["object"] == "text_completion"


def test_several_prompts(http: httpx.Client) -> None:
    prompts = [COUNT, "The capital of France is", "1 2 3 4", "a", "b", COUNT]  # more than a native client may send
    alone = [complete(http, prompt=prompt, max_tokens=5) for prompt in prompts]
    answer = http.post(COMPLETIONS, json={"prompt": prompts, "temperature": 0, "max_tokens": 5})
    found = answer.json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in found["choices"]] == [one["choices"][0]["text"] for one in alone]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][name] == sum(one["usage"][name] for one in alone)
    assert answer.headers["x-compute-characters"] == str(sum(map(len, prompts)))
    assert answer.headers["x-generated-tokens"] == "30"
    chunks = stream(http, COMPLETIONS, prompt=prompts, max_tokens=5, stream_options={"include_usage": True})
    for index, one in enumerate(alone):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == one["choices"][0]["text"]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert chunks[-1]["usage"]["total_tokens"] == found["usage"]["total_tokens"]


def test_token_ids_as_prompt(http: httpx.Client) -> None:
    ids = [token["id"] for token in http.post("/tokenize", json={"inputs": COUNT}).json()]
    text = complete(http, max_tokens=5)["choices"][0]["text"]
    assert complete(http, prompt=ids, max_tokens=5)["choices"][0]["text"] == text
    both = complete(http, prompt=[ids, ids], max_tokens=5)["choices"]
    assert [choice["text"] for choice in both] == [text, text]
    for bad in ([49152], [-1], [2**70], ["a", 1], ["a", [1]], [[]], [[1], 2], [1.5], [None]):
        refused(http, COMPLETIONS, prompt=bad)


def test_prompts_that_are_refused(http: httpx.Client) -> None:
    message = refused(http, COMPLETIONS, prompt=[])["message"]
    assert "Empty array detected. Do not use an empty array for the prompt." in message
    error = refused(http, COMPLETIONS, prompt=["a"] * 129)
    assert error["param"] == "prompt"
    assert error["message"].endswith("`prompt` holds 129 prompts: at most 128 may run at a time on this server")
    assert refused(http, COMPLETIONS, prompt=["a"] * 50, n=3)["param"] == "prompt"
    refused(http, COMPLETIONS, prompt="")
    refused(http, COMPLETIONS, prompt=["a", ""])
    refused(http, COMPLETIONS, prompt=None)
    refused(http, COMPLETIONS, prompt=5)
    refused(http, COMPLETIONS, prompt="word " * 3000)


def test_echo_and_logprobs_of_completions(http: httpx.Client) -> None:
    found = complete(http, max_tokens=3, logprobs=2, echo=True)["choices"][0]
    text = found["text"]
    assert text.startswith(COUNT)
    logprobs = found["logprobs"]
    assert list(logprobs) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token
    assert len(logprobs["top_logprobs"]) == len(logprobs["tokens"])
    assert all(len(tops) == 2 for tops in logprobs["top_logprobs"][-3:])
    plain = complete(http, max_tokens=3, logprobs=0)["choices"][0]["logprobs"]
    assert plain["tokens"] == [" three", ",", " four"]
    assert plain["top_logprobs"] is None
    assert plain["text_offset"] == [len(COUNT), len(COUNT) + 6, len(COUNT) + 7]
    chunks = stream(http, COMPLETIONS, max_tokens=3, logprobs=1, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert "".join(tokens) == text
    assert complete(http, max_tokens=1, echo=True)["choices"][0]["text"] == COUNT + " three"
    assert refused(http, COMPLETIONS, logprobs=6)["param"] == "logprobs"


def test_best_tokens_in_the_places_of_the_prompt(http: httpx.Client) -> None:
    """A prompt's token is the greedy choice in its place if it is as likely as the best one there."""
    text = COUNT + " three, four, five"
    logprobs = complete(http, prompt=text, max_tokens=0, echo=True, logprobs=3)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(tops) == 3 for tops in logprobs["top_logprobs"][1:])
    parallel = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for token, value, tops in list(parallel)[1:]:
        assert list(tops.values()) == sorted(tops.values(), reverse=True)
        assert value <= max(tops.values())
        assert token not in tops or tops[token] == value
    greedy = [next(iter(tops)) for tops in logprobs["top_logprobs"][-5:]]
    assert greedy == logprobs["tokens"][-5:] == [" three", ",", " four", ",", " five"]
    last = zip(logprobs["token_logprobs"][-5:], logprobs["top_logprobs"][-5:], strict=True)
    assert all(value == max(tops.values()) for value, tops in last)


def test_tokens_cut_inside_a_character(http: httpx.Client) -> None:
    """They are told byte by byte, as OpenAI does: two of them never look alike, and nothing is lost."""
    text = "Emoji: 😀 and 鑫 end"
    found = complete(http, prompt=text, max_tokens=0, echo=True, logprobs=2)["choices"][0]["logprobs"]
    cut = [token for token in found["tokens"] if token.startswith("bytes:")]
    assert len(cut) >= 2
    assert "\ufffd" not in "".join(found["tokens"])
    data = b"".join(
        re.sub(rb"\\x([0-9a-f]{2})", lambda match: bytes.fromhex(match[1].decode()), token[6:].encode())
        if token.startswith("bytes:")
        else token.encode()
        for token in found["tokens"]
    )
    assert data.decode() == text
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    messages = [{"role": "user", "content": "Repeat: 😏"}, {"role": "assistant", "content": "Emoji: 😀😃😄"}]
    choice = chat(http, messages=messages, temperature=0, max_tokens=9, logprobs=True)["choices"][0]
    cut = [entry for entry in choice["logprobs"]["content"] if "\\x" in entry["token"]]
    assert cut
    for entry in cut:
        assert bytes(entry["bytes"]).decode(errors="backslashreplace") == entry["token"]


def test_scoring_a_prompt(http: httpx.Client) -> None:
    """`echo` with no token to generate: what evaluation programs ask for."""
    longer = complete(http, max_tokens=1, echo=True, logprobs=2)["choices"][0]
    found = complete(http, max_tokens=0, echo=True, logprobs=2)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (COUNT, "length")
    assert found["usage"]["completion_tokens"] == 0
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] == len(choice["logprobs"]["tokens"])
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert choice["logprobs"][name] == longer["logprobs"][name][:-1]
    several = complete(http, prompt=[COUNT, "Hello there"], max_tokens=0, echo=True, logprobs=0)["choices"]
    assert [one["text"] for one in several] == [COUNT, "Hello there"]
    # Without alternatives several ranks add exponentials up in another order: docs/sampling.md.
    expected = pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=0 if NUM_RANKS == 1 else 1e-5, rel=0)
    assert several[0]["logprobs"]["token_logprobs"][1:] == expected
    options = {"include_usage": True}
    chunks = stream(http, COMPLETIONS, max_tokens=0, echo=True, logprobs=0, stream_options=options)
    assert [one["text"] for chunk in chunks for one in chunk["choices"]] == [COUNT]
    assert chunks[0]["choices"][0]["finish_reason"] == "length"
    assert chunks[0]["choices"][0]["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
    assert chunks[-1]["usage"]["completion_tokens"] == 0
    assert complete(http, max_tokens=0, echo=True)["choices"][0]["text"] == COUNT
    assert refused(http, COMPLETIONS, max_tokens=0)["param"] == "max_tokens"
    assert refused(http, COMPLETIONS, max_tokens=0, logprobs=1)["param"] == "max_tokens"
    assert refused(http, CHAT, max_tokens=0)["param"] == "max_tokens"


def test_candidates_of_completions(http: httpx.Client) -> None:
    found = complete(http, n=2, best_of=3, temperature=1.0, max_tokens=6, logprobs=0)
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    means = [sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in found["choices"]]
    assert means == sorted(means, reverse=True)
    assert refused(http, COMPLETIONS, n=3, best_of=2)["param"] == "best_of"
    assert refused(http, COMPLETIONS, best_of=21)["param"] == "best_of"
    several = complete(http, prompt=["a", "b"], n=2, max_tokens=2)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    chunks = stream(http, COMPLETIONS, prompt=["a", "b"], n=2, max_tokens=2)
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1, 2, 3}
    answer = http.post(COMPLETIONS, json={"prompt": "a", "best_of": 2, "stream": True})
    assert answer.status_code == 400


def test_seeded_completion_stream(http: httpx.Client) -> None:
    body = {"temperature": 1.0, "seed": 9, "max_tokens": 16}
    chunks = stream(http, COMPLETIONS, **body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == complete(http, **body)["choices"][0]["text"]


def test_numbers_are_finite(http: httpx.Client) -> None:
    """A bias that makes a token impossible still gives OpenAI's clients a number."""
    found = complete(http, max_tokens=2, logprobs=5, logit_bias={"28": -100})
    values = [value for tops in found["choices"][0]["logprobs"]["top_logprobs"] for value in tops.values()]
    assert all(math.isfinite(value) for value in values)


def test_a_stop_string_in_the_last_permitted_token(http: httpx.Client) -> None:
    body = {"prompt": "Count: one, two,", "temperature": 0, "max_tokens": 1, "stop": " three"}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_cached_tokens_are_told_however_it_ends(http: httpx.Client) -> None:
    prompt = "The numbers in their order: " + ", ".join(str(number) for number in range(60)) + ","
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 4}
    http.post("/v1/completions", json=body)
    by_length = http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    stopped = http.post("/v1/completions", json={**body, "stop": ","}).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["prompt_tokens_details"]["cached_tokens"] == by_length > 0
