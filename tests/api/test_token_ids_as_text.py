"""SKIP_TOKENIZER_IN_TGI, TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN and QUEUE_THRESHOLD_MS on a real server.

Token ids go in and come out as text. What they mean is compared with a server that takes text.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from events import read_events
from serving import Server

CHAT = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def ids_server(model_cache: Path) -> Iterator[Server]:
    running = Server(
        "--max-total-tokens",
        "512",
        cache=model_cache,
        SKIP_TOKENIZER_IN_TGI="True",
        TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN="true",
        QUEUE_THRESHOLD_MS="20",
    )
    yield running
    assert running.stop() == 0, running.log[-3000:]


@pytest.fixture
def ids(ids_server: Server) -> Iterator[httpx.Client]:
    with ids_server.client() as client:
        yield client


def generate(client: httpx.Client, inputs: str, new: int, **parameters: Any) -> dict[str, Any]:
    body = {"inputs": inputs, "parameters": {"max_new_tokens": new, "details": True, **parameters}}
    return client.post("/generate", json=body).raise_for_status().json()


def ids_of(client: httpx.Client, text: str) -> str:
    tokens = client.post("/tokenize", json={"inputs": text}).raise_for_status().json()
    return ",".join(str(token["id"]) for token in tokens)


def test_the_same_tokens_as_with_text(http: httpx.Client, ids: httpx.Client) -> None:
    prompt = "The quick brown fox"
    as_text = generate(http, prompt, 12)
    as_ids = generate(ids, ids_of(http, prompt), 12)
    expected = [token["id"] for token in as_text["details"]["tokens"]]
    assert [token["id"] for token in as_ids["details"]["tokens"]] == expected
    assert as_ids["generated_text"] == ",".join(map(str, expected))
    assert "".join(token["text"] for token in as_ids["details"]["tokens"]) == as_ids["generated_text"]


def test_the_end_of_text_is_ignored(http: httpx.Client, ids: httpx.Client) -> None:
    ended = generate(http, CHAT, 60)
    assert ended["details"]["finish_reason"] == "eos_token"
    expected = [token["id"] for token in ended["details"]["tokens"]]
    longer = generate(ids, ids_of(http, CHAT), 60)
    assert longer["details"]["finish_reason"] == "length"
    found = [token["id"] for token in longer["details"]["tokens"]]
    assert found[: len(expected)] == expected and len(found) == 60
    # The id that would have ended it is told like any other.
    assert found[len(expected) - 1] == int(longer["generated_text"].split(",")[len(expected) - 1])


def test_streams(ids: httpx.Client) -> None:
    body = {"inputs": "1, 2 ,3", "parameters": {"max_new_tokens": 5, "return_full_text": True}}
    events = read_events(ids.post("/generate_stream", json=body).content)
    texts = [event["token"]["text"] for event in events]
    assert texts[0].isdecimal() and all(text.startswith(",") for text in texts[1:])
    assert events[-1]["generated_text"] == "1, 2 ,3," + "".join(texts)


def test_completions(ids: httpx.Client) -> None:
    texts = []
    for prompt in ("5,6,7", [5, 6, 7]):
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0, "echo": True}
        answer = ids.post("/v1/completions", json=body).raise_for_status().json()
        assert answer["usage"] == {**answer["usage"], "prompt_tokens": 3, "completion_tokens": 4}
        texts.append(answer["choices"][0]["text"])
    assert texts[0] == texts[1] and texts[0].startswith("5,6,7,") and texts[0].count(",") == 6
    # A stop sequence ends with an id: the beginning of one is none.
    first, second, *_ = texts[0].removeprefix("5,6,7,").split(",")
    body = {"model": "m", "prompt": "5,6,7", "max_tokens": 4, "temperature": 0}
    for stop, told in ((f",{second[:-1]}", texts[0].removeprefix("5,6,7,")), (f",{second}", first)):
        answer = ids.post("/v1/completions", json={**body, "stop": [stop]}).raise_for_status().json()
        assert answer["choices"][0]["text"] == told


def test_padding_and_truncation(ids: httpx.Client) -> None:
    tokens = ids.post("/tokenize", json={"inputs": "11,?,13"}).raise_for_status().json()
    assert [(token["id"], token["text"], token["start"], token["stop"]) for token in tokens] == [
        (11, "11", 0, 2),
        (2, "?", 3, 4),
        (13, "13", 5, 7),
    ]
    whole, cut = generate(ids, "9,10,11,12", 3), generate(ids, "1,1,1,9,10,11,12", 3, truncate=4)
    assert whole["generated_text"] == cut["generated_text"]


@pytest.mark.parametrize("inputs", ["Hello there", "1,2,", "1,,2", "-1", "1.5", "999999999999", "1;2", "٣"])
def test_what_is_no_id_is_refused(ids: httpx.Client, inputs: str) -> None:
    answer = ids.post("/generate", json={"inputs": inputs, "parameters": {"max_new_tokens": 2}})
    assert answer.status_code == 422
    assert "`inputs` must be token ids separated by commas" in answer.json()["error"]


def test_ids_outside_the_vocabulary_and_grammars_are_refused(ids: httpx.Client) -> None:
    answer = ids.post("/generate", json={"inputs": "1,99999999", "parameters": {"max_new_tokens": 2}})
    assert answer.status_code == 422 and "outside the vocabulary" in answer.json()["error"]
    grammar = {"type": "regex", "value": "[0-9]+"}
    answer = ids.post("/generate", json={"inputs": "1,2", "parameters": {"max_new_tokens": 2, "grammar": grammar}})
    assert answer.status_code == 422 and "SKIP_TOKENIZER_IN_TGI" in answer.json()["error"]
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = ids.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 400 and "SKIP_TOKENIZER_IN_TGI" in str(answer.json())


def test_what_was_set_is_in_the_log(ids_server: Server) -> None:
    assert "From the environment: TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN=true, SKIP_TOKENIZER_IN_TGI=True," in (
        ids_server.log
    )
    assert "queue_threshold_ms=20" in ids_server.log
