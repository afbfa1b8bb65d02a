"""Pictures through a real server with a tiny model that sees: every way in, what comes of them, and what is refused.

The model is random; what it says of a prompt is what `transformers` says of it.
"""

import base64
import io
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from select import select
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from events import read_events
from PIL import Image
from serving import Server
from vision_oracle import Oracle, draw, make_oracle

from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ValidationError
from text_generation_inference.launch.check import check_model
from text_generation_inference.launch.check_report import render
from text_generation_inference.llm import LLM
from text_generation_inference.types import SamplingParams

NUM_NEW = 5
FIRST, SECOND = draw(50, 37), draw(30, 64, seed=1)


def as_bytes(picture: Image.Image, format: str = "PNG") -> bytes:
    data = io.BytesIO()
    picture.save(data, format)
    return data.getvalue()


def as_data(picture: Image.Image) -> str:
    return as_data_of(as_bytes(picture), "image/png")


def as_data_of(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


class Pictures(ThreadingHTTPServer):
    """A server of pictures: `/first.png`, and others that misbehave."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.paths: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Pictures)
        self.server.paths.append(self.path)
        if self.path == "/silent.png":
            self.connection.recv(1)  # until the other end goes
            return
        data = {"/first.png": as_bytes(FIRST), "/large.png": b"x" * 2_000_000}.get(self.path, b"<html>")
        length = len(data) + 100 * (self.path == "/cut.png")
        self.send_response(404 if self.path == "/missing.png" else 200)
        self.send_header("content-length", str(length))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[Pictures]:
    with Pictures() as running:
        yield running
        running.shutdown()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle("llava_next", tmp_path_factory.mktemp("llava_next"))


@pytest.fixture(scope="module")
def seeing(oracle: Oracle) -> Iterator[Server]:
    running = Server(
        *("--model-id", str(oracle.folder), "--max-total-tokens", "700", "--max-batch-total-tokens", "2800"),
        *("--allow-private-media", "--max-image-fetch-size", "1000000", "--dtype", "float32"),
        *("--max-concurrent-requests", "64", "--client-header", "x-caller"),
    )
    yield running
    assert running.metrics()["tgi_picture_held"] == 0
    assert running.stop() == 0, running.log[-3000:]


@pytest.fixture
def client(seeing: Server) -> Iterator[httpx.Client]:
    with seeing.client() as opened:
        yield opened


def generate(client: httpx.Client, inputs: str, **parameters: Any) -> list[int]:
    body = {"inputs": inputs, "parameters": {"max_new_tokens": NUM_NEW, "details": True, **parameters}}
    answer = client.post("/generate", json=body).raise_for_status()
    return [token["id"] for token in answer.json()["details"]["tokens"]]


def chat(client: httpx.Client, *content: Any, **more: Any) -> httpx.Response:
    messages = more.pop("messages", [{"role": "user", "content": list(content)}])
    body = {"messages": messages, "max_tokens": NUM_NEW, "temperature": 0, "logprobs": True, **more}
    return client.post("/v1/chat/completions", json=body)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def image(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def test_markdown_in_texts(client: httpx.Client, oracle: Oracle, web: Pictures) -> None:
    """TGI's documented form, on its three routes; `x-prompt-tokens` and `details` count what stands for pictures."""
    expected = oracle.generate([FIRST, "What is this?\n\n"], NUM_NEW).token_ids
    length = len(oracle.ids([FIRST, "What is this?\n\n"]))
    for source in (as_data(FIRST), f"{web.url}/first.png"):
        inputs = f"![]({source})What is this?\n\n"
        assert generate(client, inputs) == expected
        body = {"inputs": inputs, "parameters": {"max_new_tokens": NUM_NEW, "details": True}}
        answer = client.post("/generate", json=body)
        assert int(answer.headers["x-prompt-tokens"]) == length
        events = read_events(client.post("/generate_stream", json=body).content)
        assert [event["token"]["id"] for event in events] == expected
        assert events[-1]["details"]["input_length"] == length
        (whole,) = client.post("/", json=body).json()
        assert [token["id"] for token in whole["details"]["tokens"]] == expected
        assert whole["generated_text"].startswith(inputs)
    several = ["Both: ", FIRST, " and ", SECOND, FIRST, "?"]
    inputs = f"Both: ![]({as_data(FIRST)}) and ![]({as_data(SECOND)})![]({as_data(FIRST)})?"
    assert generate(client, inputs) == oracle.generate(several, NUM_NEW).token_ids
    body = {"prompt": inputs, "max_tokens": NUM_NEW, "temperature": 0}
    usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    assert usage["prompt_tokens"] == len(oracle.ids(several))


def test_other_pictures_say_something_else(client: httpx.Client) -> None:
    answers = {tuple(generate(client, f"![]({as_data(draw(40, 40, seed))})?")) for seed in range(4)}
    assert len(answers) > 1


def test_parts_of_chats(client: httpx.Client, oracle: Oracle, web: Pictures) -> None:
    """Every form that clients send; in order, in several turns, in answers of tools."""
    prompt = ["user: Look: ", FIRST, "well?", SECOND, "assistant:"]
    expected = oracle.generate(prompt, NUM_NEW).token_ids
    word = "".join(oracle.tokenizer.decode([token], skip_special_tokens=False) for token in expected)
    encoded = base64.b64encode(as_bytes(FIRST)).decode()
    for first in (
        image(as_data(FIRST)),
        image(f"{web.url}/first.png", detail="low"),
        {"type": "image_url", "image_url": as_data(FIRST)},
        {"type": "image", "url": f"{web.url}/first.png"},
        {"type": "image", "image": as_data(FIRST)},
        {"type": "image", "base64": encoded},
    ):
        answer = chat(client, text("Look: "), first, text("well?"), image(as_data(SECOND))).raise_for_status().json()
        assert answer["usage"]["prompt_tokens"] == len(oracle.ids(prompt)), first
        assert len(answer["choices"][0]["logprobs"]["content"]) == NUM_NEW
        assert answer["choices"][0]["message"]["content"] in word or "\ufffd" in word
    turns = [
        {"role": "user", "content": [image(as_data(FIRST)), text("One?")]},
        {"role": "assistant", "content": "Yes."},
        {"role": "tool", "content": [text("see "), image(as_data(SECOND))]},
        {"role": "user", "content": "And?"},
    ]
    rendered = ["user: ", FIRST, "One?assistant: Yes.tool: see ", SECOND, "user: And?assistant:"]
    usage = chat(client, messages=turns).raise_for_status().json()["usage"]
    assert usage["prompt_tokens"] == len(oracle.ids(rendered))


def test_pictures_in_other_chat_apis(client: httpx.Client, oracle: Oracle, web: Pictures) -> None:
    """The same prompt as by chat completions; pictures in results of tools too."""
    said = chat(client, text("Look: "), image(as_data(FIRST)), text("well?"), image(as_data(SECOND))).json()
    expected, length = said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens"]

    def block(picture: Image.Image) -> dict[str, Any]:
        data = base64.b64encode(as_bytes(picture)).decode()
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    by_url = {"type": "image", "source": {"type": "url", "url": f"{web.url}/first.png"}}
    for first in (block(FIRST), by_url):
        content = [text("Look: "), first, text("well?"), block(SECOND)]
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        counted = client.post("/v1/messages/count_tokens", json=body).raise_for_status().json()
        assert counted["input_tokens"] == length
        answer = client.post("/v1/messages", json={**body, "max_tokens": NUM_NEW, "temperature": 0}).json()
        assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == length
        assert "".join(part["text"] for part in answer["content"]) == expected
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("see "), block(FIRST)]}
    body = {"model": "m", "messages": [{"role": "user", "content": [result, text("And?")]}]}
    counted = client.post("/v1/messages/count_tokens", json=body).raise_for_status().json()
    assert counted["input_tokens"] == len(oracle.ids(["tool: see ", FIRST, "user: And?assistant:"]))

    def part(url: str) -> dict[str, str]:
        return {"type": "input_image", "image_url": url}

    for first in (as_data(FIRST), f"{web.url}/first.png"):
        words = [{"type": "input_text", "text": given} for given in ("Look: ", "well?")]
        given = [{"role": "user", "content": [words[0], part(first), words[1], part(as_data(SECOND))]}]
        body = {"input": given, "max_output_tokens": NUM_NEW, "temperature": 0}
        answer = client.post("/v1/responses", json=body).raise_for_status().json()
        assert answer["usage"]["input_tokens"] == length
        assert answer["output"][0]["content"][0]["text"] == expected
    for path, body in (
        (
            "/v1/messages",
            {
                "model": "m",
                "max_tokens": 3,
                "messages": [
                    {
                        "role": "user",
                        "content": [{**by_url, "source": {"type": "url", "url": f"{web.url}/missing.png"}}],
                    }
                ],
            },
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": [part(f"{web.url}/missing.png")]}]}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400, answer.text
    both = chat(client, image(as_data(FIRST)), text("?"), n=2, temperature=1.0).raise_for_status().json()
    assert len(both["choices"]) == 2
    events = read_events(chat(client, image(as_data(FIRST)), stream=True).content)
    assert events[-1] == "[DONE]" and events[0]["choices"][0]["delta"]["role"] == "assistant"


def test_tokens_of_prompts_with_pictures(client: httpx.Client, oracle: Oracle) -> None:
    tokens = client.post("/tokenize", json={"inputs": f"![]({as_data(SECOND)})What?"}).raise_for_status().json()
    assert [token["id"] for token in tokens] == oracle.ids([SECOND, "What?"])
    assert tokens[1]["text"] == "<image>"
    body = {"messages": [{"role": "user", "content": [image(as_data(SECOND)), text("What?")]}]}
    answer = client.post("/chat_tokenize", json=body).raise_for_status().json()
    assert [token["id"] for token in answer["tokenize_response"]] == oracle.ids(["user: ", SECOND, "What?assistant:"])
    assert answer["templated_text"] == "<s>user: <image>What?assistant:"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("data:image/png;base64,@@@@", "base64 encoding is invalid: "),
        ("data:image/png;base64,iVBORw0", "base64 encoding is invalid: "),
        ("data:image/png;base64,aGVsbG8=", "invalid image: "),
        ("data:image/png,plain", "invalid image content: data:image/png,plain"),
        ("ftp://x/y.png", "invalid image content: ftp://x/y.png"),
        ("", "invalid image content: "),
        ("WEB/page.html", "invalid image: "),
        ("WEB/missing.png", "Could not fetch image: "),
        ("http://127.0.0.1:1/x.png", "Could not fetch image: "),
        ("http://user@127.0.0.1/x.png", "Could not fetch image: "),
        ("WEB/large.png", "Image size 2000000 bytes exceeds maximum allowed size of 1000000 bytes"),
        ("WEB/cut.png", "Failed to read image data: "),
    ],
)
def test_what_is_wrong_with_a_picture(client: httpx.Client, web: Pictures, source: str, said: str) -> None:
    """TGI's texts: 422, or an event of a stream; OpenAI's routes say 400."""
    source = source.replace("WEB", web.url)
    body = {"inputs": f"![]({source})What?", "parameters": {"max_new_tokens": 2}}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 422 and answer.json()["error_type"] == "validation"
    assert answer.json()["error"].startswith(f"Input validation error: {said}"), answer.json()
    streamed = client.post("/generate_stream", json=body)
    assert streamed.status_code == 200 and read_events(streamed.content) == [answer.json()]
    if source:
        refused = chat(client, image(source))
        assert refused.status_code == 400 and said in refused.json()["error"]["message"]


def test_tokens_of_pictures_cannot_be_typed(client: httpx.Client) -> None:
    refused = client.post("/generate", json={"inputs": "a <image> b"})
    assert refused.status_code == 422 and "`inputs` holds '<image>'" in refused.json()["error"]
    refused = client.post("/v1/completions", json={"prompt": "<image>"}).json()["error"]
    assert refused["param"] == "prompt"
    refused = chat(client, image(as_data(FIRST)), text("<image>")).json()["error"]
    assert refused["param"] == "messages[0].content"
    split = [{"role": "user", "content": [text("<ima"), text("ge>")]}]
    assert chat(client, messages=split).json()["error"]["param"] == "messages[0].content"
    refused = client.post("/v1/completions", json={"prompt": [5, 260]})
    assert refused.status_code == 400 and "token id 260" in refused.json()["error"]["message"]
    assert generate(client, "fine")  # the server lives


def test_lengths_count_pictures(client: httpx.Client) -> None:
    inputs = "".join(f"![]({as_data(draw(56, 56, seed))})" for seed in range(8))  # 88 tokens each
    answer = client.post("/generate", json={"inputs": inputs, "parameters": {"max_new_tokens": 20}})
    assert answer.status_code == 422 and "`inputs` tokens + `max_new_tokens` must be <= 700" in answer.json()["error"]
    body = {"inputs": f"some words before ![]({as_data(FIRST)})?", "parameters": {"truncate": 20, "max_new_tokens": 2}}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 422 and "`truncate` would cut a picture" in answer.json()["error"]
    many = "".join("![](data:image/png;base64,AA==)" for _ in range(40))
    answer = client.post("/generate", json={"inputs": many})
    assert answer.status_code == 422 and "At most 32 image(s)" in answer.json()["error"]


def test_pictures_of_20_megabytes(client: httpx.Client, seeing: Server) -> None:
    large = Image.new("RGB", (2600, 2600), (200, 30, 70))
    data = base64.b64encode(as_bytes(large, "BMP")).decode()
    assert len(data) > 27_000_000
    answer = chat(client, image(f"data:image/bmp;base64,{data}"), text("What?"))
    assert answer.status_code == 200, answer.text[:300]
    assert seeing.metrics()["tgi_http_buffered_bytes"] == 0
    refused = client.post("/generate", json={"inputs": f"![](data:image/bmp;base64,{data + 'A' * 8_000_000})"})
    assert refused.status_code == 413


def test_a_client_that_leaves_holds_nothing(seeing: Server, client: httpx.Client) -> None:
    def leave(seed: int) -> None:
        body = {"inputs": f"![]({as_data(draw(60, 60, seed))})?", "parameters": {"max_new_tokens": 500}}
        with (
            suppress(httpx.HTTPError),
            seeing.client() as mine,
            mine.stream("POST", "/generate_stream", json=body) as s,
        ):
            if seed % 2:
                next(s.iter_bytes(), None)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(leave, range(6)))
    seeing.wait_for(lambda: seeing.metrics()["tgi_picture_held"] == 0, "pictures to be given back")
    assert generate(client, f"![]({as_data(FIRST)})?", best_of=2, do_sample=True)


def test_slow_urls_of_one_client_leave_room_for_others(
    client: httpx.Client, seeing: Server, oracle: Oracle, web: Pictures
) -> None:
    """1280 pictures that nobody sends: whoever asks for them is refused beyond three quarters of what may be loaded."""
    body = msgspec.json.encode({"inputs": f"![]({web.url}/silent.png)" * 32})
    head = f"POST /generate HTTP/1.1\r\nHost: a\r\nX-Caller: flood\r\nContent-Length: {len(body)}\r\n"
    with ExitStack() as opened:
        flood = [opened.enter_context(socket.create_connection(("127.0.0.1", seeing.port))) for _ in range(40)]
        for connection in flood:
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        seeing.wait_for(lambda: len(select(flood, [], [], 0)[0]) >= 8, "some to be refused")
        for source in (as_data(FIRST), f"{web.url}/first.png"):
            expected = oracle.generate([FIRST, "What?"], NUM_NEW).token_ids
            assert generate(client, f"![]({source})What?") == expected
        answered = select(flood, [], [], 0)[0]
        assert len(answered) == 16
        assert all(connection.recv(1000).startswith(b"HTTP/1.1 429 ") for connection in answered)


def test_salts_keep_pictures_apart(client: httpx.Client, seeing: Server) -> None:
    """Decoded and computed once for each salt, whichever route it comes by: the time tells nothing of others."""
    picture, number = as_data(draw(70, 40, seed=77)), 0

    def send(salt: str | None, path: str = "/generate") -> tuple[float, float]:
        """What is decoded for it, and what is known. Prompts differ, so that no prefix is found."""
        nonlocal number
        number += 1
        before = seeing.metrics()
        if "chat" in path:
            messages = [{"role": "user", "content": [text(f"{number}"), image(picture)]}]
            body: dict[str, Any] = {"messages": messages, "max_tokens": 1, "cache_salt": salt}
        else:
            body = {"inputs": f"{number}![]({picture})?", "parameters": {"max_new_tokens": 1, "cache_salt": salt}}
        client.post(path, json=body).raise_for_status()
        after = seeing.metrics()
        kept, hits = (after[name] - before[name] for name in ("tgi_picture_kept", "tgi_picture_hits"))
        return kept, hits

    def num_encoded() -> float:
        return seeing.metrics().get("tgi_picture_encoded", 0)

    time.sleep(2)  # engines tell it twice a second
    encoded = num_encoded()
    for salt in (None, "one", "two"):
        assert send(salt) == (1, 0)
        assert send(salt) == (0, 1)
    assert send("one", "/v1/chat/completions") == (0, 1)
    assert send("three", "/v1/chat/completions") == (1, 0)
    for path in ("/tokenize", "/chat_tokenize"):
        assert send("three", path) == (0, 1)
        assert send(f"four {path}", path) == (1, 0)
    seeing.wait_for(lambda: num_encoded() == encoded + 4, "one computation for each salt")


def test_what_is_told(client: httpx.Client, seeing: Server) -> None:
    paths = client.get("/api-doc/openapi.json").json()["paths"]
    for path in ("/generate", "/v1/chat/completions"):  # examples of the page at /docs work as they are
        example = paths[path]["post"]["requestBody"]["content"]["application/json"]["example"]
        assert "data:image/png" in str(example)
        assert client.post(path, json={**example, "stream": False}).status_code == 200
    told = client.get("/info").json()["pictures"]
    assert told["tokens"]["336x336"] == 88 and told["max_images_per_request"] == 32
    assert told["payload_limit"] == 32_000_000 and told["max_image_fetch_size"] == 1_000_000 and told["urls"]
    before = seeing.metrics()
    generate(client, f"![]({as_data(FIRST)})!")
    generate(client, f"![]({as_data(FIRST)})!")
    after = seeing.metrics()
    assert after["tgi_picture_count"] - before.get("tgi_picture_count", 0) == 2
    assert after["tgi_picture_pixels"] - before["tgi_picture_pixels"] == 2 * 50 * 37
    assert after["tgi_picture_hits"] > before["tgi_picture_hits"]
    assert after["tgi_picture_encode_seconds"] > 0 and after["tgi_picture_encoded_pixels"] > 0
    assert 0 < after["tgi_picture_encoded_batches"] <= after["tgi_picture_encoded"]
    assert after["tgi_picture_encoded"] > 0 and after["tgi_picture_encoded_tokens"] > after["tgi_picture_encoded"]


def test_routes_of_clouds(client: httpx.Client, oracle: Oracle) -> None:
    inputs = {"inputs": f"![]({as_data(FIRST)})What?", "parameters": {"max_new_tokens": NUM_NEW, "details": True}}
    (answer,) = client.post("/invocations", json=inputs).raise_for_status().json()
    tokens = [token["id"] for token in answer["details"]["tokens"]]
    assert tokens == oracle.generate([FIRST, "What?"], NUM_NEW).token_ids
    messages = [{"role": "user", "content": [image(as_data(FIRST)), text("What?")]}]
    usage = client.post("/invocations", json={"messages": messages, "max_tokens": 2}).raise_for_status().json()["usage"]
    assert usage["prompt_tokens"] == len(oracle.ids(["user: ", FIRST, "What?assistant:"]))


def test_check_tells_what_pictures_cost(oracle: Oracle) -> None:
    report = check_model(ServerConfig(model_id=str(oracle.folder), device="cpu", max_total_tokens=700))
    assert report.fits, report.problems
    assert report.picture_tokens["336x336"] == 88
    assert "tokens of a picture" in render(report) and "88 at 336x336" in render(report)


def test_a_model_that_reads_pictures_by_cross_attention(tmp_path: Path) -> None:
    """Llama 3.2 Vision, whole: one token stands for a picture; texts and pictures at once; what their memory is."""
    oracle = make_oracle("mllama", tmp_path)
    settings = ("--max-total-tokens", "200", "--max-batch-total-tokens", "1600", "--dtype", "float32")
    limits = ("--max-batch-size", "4", "--max-images-per-request", "6", "--enable-prefill-logprobs")
    report = check_model(ServerConfig(model_id=str(tmp_path), device="cpu", max_images_per_request=6))
    assert report.fits, report.problems
    # Two layers, keys and values of 2 heads of 8 numbers, 4 tiles of 17 rows.
    assert report.picture_bytes == 2 * 2 * 2 * 8 * 4 * 68 and report.picture_layers == 2
    assert report.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4 + 4
    assert "in 2 layers of cross-attention" in render(report)
    server = Server("--model-id", str(tmp_path), *settings, *limits)
    try:
        with server.client() as client:
            assert client.get("/info").json()["pictures"]["max_cached_pictures"] == 6
            prompts = {
                f"![]({as_data(FIRST)})What?": [FIRST, "What?"],
                f"Both: ![]({as_data(FIRST)})![]({as_data(SECOND)}) and ![]({as_data(FIRST)})?": [
                    *("Both: ", FIRST, SECOND, " and ", FIRST, "?")
                ],
                "no picture": ["no picture"],
            }
            with ThreadPoolExecutor(6) as threads:
                found = list(threads.map(lambda inputs: generate(client, inputs), [*prompts] * 2))
            assert found == [oracle.generate(prompt, NUM_NEW).token_ids for prompt in prompts.values()] * 2
            prompt = ["user: Look: ", FIRST, "well?", SECOND, "assistant:"]
            answer = chat(client, text("Look: "), image(as_data(FIRST)), text("well?"), image(as_data(SECOND)))
            usage = answer.raise_for_status().json()["usage"]
            assert usage["prompt_tokens"] == len(oracle.ids(prompt))
            tokens = client.post("/tokenize", json={"inputs": f"![]({as_data(SECOND)})What?"}).json()
            assert [token["id"] for token in tokens] == oracle.ids([SECOND, "What?"])
            told = {"details": True, "decoder_input_details": True, "repetition_penalty": 1.2, "max_new_tokens": 3}
            body = {"inputs": f"a ![]({as_data(FIRST)}) b", "parameters": told}
            prefill = client.post("/generate", json=body).raise_for_status().json()["details"]["prefill"]
            assert [token["id"] for token in prefill] == oracle.ids(["a ", FIRST, " b"])
            refused = client.post("/generate", json={"inputs": "a <|image|> b"})
            assert refused.status_code == 422 and "`inputs` holds '<|image|>'" in refused.json()["error"]
            server.wait_for(lambda: server.metrics()["tgi_picture_held"] == 0, "pictures to be given back")
    finally:
        assert server.stop() == 0, server.log[-3000:]


def test_models_that_do_not_see_fetch_nothing(http: httpx.Client, web: Pictures) -> None:
    before = len(web.paths)
    url = f"{web.url}/first.png"
    body = {"inputs": f"![]({url})<image>", "parameters": {"max_new_tokens": 1}}
    assert http.post("/generate", json=body).status_code == 200
    messages = [{"role": "user", "content": [image(url), {"type": "image", "url": url}]}]
    shown = http.post("/chat_tokenize", json={"messages": messages}).json()["templated_text"]
    assert f"![]({url})![]({url})" in shown
    assert len(web.paths) == before
    assert "pictures" not in http.get("/info").json()
    refused = http.post("/generate", json={"inputs": "x" * 2_000_001})
    assert refused.status_code == 413


def test_clients_of_others(seeing: Server, oracle: Oracle, web: Pictures) -> None:
    """huggingface_hub, openai and langchain, unmodified, as their users send pictures."""
    from huggingface_hub import InferenceClient
    from langchain_core.messages import HumanMessage
    from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint
    from openai import OpenAI

    url, length = f"{web.url}/first.png", len(oracle.ids(["user: ", FIRST, "What?assistant:"]))
    hub = InferenceClient(seeing.url)
    told = hub.text_generation(f"![]({url})What?", max_new_tokens=NUM_NEW, details=True)
    assert [token.id for token in told.details.tokens] == oracle.generate([FIRST, "What?"], NUM_NEW).token_ids
    messages: Any = [{"role": "user", "content": [image(as_data(FIRST)), text("What?")]}]
    said = hub.chat_completion(messages, max_tokens=NUM_NEW, temperature=0)
    assert said.usage.prompt_tokens == length
    with OpenAI(base_url=seeing.url + "/v1", api_key="unused", max_retries=0) as client:
        answer = client.chat.completions.create(model="tgi", messages=messages, max_tokens=NUM_NEW, temperature=0)
        assert answer.usage is not None and answer.usage.prompt_tokens == length
        assert answer.choices[0].message.content == said.choices[0].message.content
    settings: dict[str, Any] = {"endpoint_url": seeing.url, "max_new_tokens": NUM_NEW}
    chain = ChatHuggingFace(llm=HuggingFaceEndpoint(**settings), model_id="tgi", max_tokens=NUM_NEW)
    found = chain.invoke([HumanMessage(content=messages[0]["content"])])
    assert found.response_metadata["token_usage"]["prompt_tokens"] == length


def test_videos_of_a_model_that_takes_none(client: httpx.Client, seeing: Server) -> None:
    """And what no model takes: each is refused for what it is."""
    for part, words in (
        ({"type": "video", "video": [as_data(FIRST), as_data(FIRST)]}, "this model takes no videos"),
        ({"type": "video", "video": as_data(FIRST), "fps": 2}, "this model takes no videos"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "Other formats are not decoded"),
        ({"type": "video_url", "video_url": "data:image/gif;base64,AAAA"}, "invalid video: it is no animated GIF"),
        ({"type": "video", "video": []}, "a video must have 1 to 512 frames. Given: 0"),
        ({"type": "video"}, "video"),
    ):
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code in (400, 422) and words in answer.text, answer.text
    seeing.wait_for(lambda: seeing.metrics()["tgi_picture_held"] == 0, "pictures to be given back")


def test_a_model_that_takes_videos(tmp_path: Path) -> None:
    """What the engine alone knows to be too much is refused as the caller's fault, in streams too."""
    oracle = make_oracle("qwen2_5_vl", tmp_path)
    server = Server("--model-id", str(tmp_path), "--max-total-tokens", "300", "--dtype", "float32")
    frames = [draw(40, 30, seed) for seed in range(3)]
    gif = io.BytesIO()
    frames[0].save(gif, "GIF", save_all=True, append_images=frames[1:], duration=500)
    length = oracle.rule.video_layout(40, 30, 3, 2.0).num_features + len(oracle.ids(["<s>user: What?assistant:"])) + 2
    listed: dict[str, Any] = {"type": "video", "video": [as_data(frame) for frame in frames]}
    try:
        with server.client() as client:
            for part in (
                listed,
                {"type": "video_url", "video_url": {"url": as_data_of(gif.getvalue(), "image/gif")}},
                {"type": "video_url", "video_url": as_data_of(as_bytes(frames[0], "JPEG"), "video/jpeg"), "fps": 1},
            ):
                usage = chat(client, part, text("What?")).raise_for_status().json()["usage"]
                assert usage["prompt_tokens"] == length - (part.get("fps") == 1)
            slow, said = {**listed, "fps": 0.01}, "with the times of its videos the prompt has 8"
            for more in ({}, {"n": 2, "temperature": 1.0}):
                refused = chat(client, slow, **more)
                assert refused.status_code == 400 and said in refused.json()["error"]["message"], refused.text
                assert refused.json()["error"]["type"] == "invalid_request_error"
            event = read_events(chat(client, slow, stream=True).content)[1]["error"]
            assert event["http_status_code"] == 422 and said in event["message"]
            server.wait_for(lambda: server.metrics()["tgi_picture_held"] == 0, "pictures to be given back")
    finally:
        assert server.stop() == 0, server.log[-3000:]
    assert " ERROR " not in server.log


def test_llm(oracle: Oracle, web: Pictures, tmp_path: Path) -> None:
    """Pictures of PIL, paths, bytes and URLs; in front of a text, in the place of markers, in chats and streams."""
    path = tmp_path / "first.png"
    path.write_bytes(as_bytes(FIRST))
    params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
    settings: dict[str, Any] = {"device": "cpu", "max_total_tokens": 700, "allow_private_media": True}
    expected = oracle.generate([FIRST, "What?"], NUM_NEW).token_ids
    with LLM(str(oracle.folder), progress=False, dtype="float32", **settings) as llm:
        folder = Path(llm.config.picture_folder or "")
        for picture in (FIRST, path, str(path), as_bytes(FIRST), f"{web.url}/first.png", as_data(FIRST)):
            assert llm.generate("What?", params, images=picture)[0].token_ids == expected
        batch = llm.generate(["What?", "a <image> b<image>", "x"], params, images=[FIRST, [FIRST, SECOND], None])
        both = oracle.generate(["a ", FIRST, " b", SECOND], NUM_NEW).token_ids
        assert [one.token_ids for one in batch[:2]] == [expected, both] and not batch[2].error
        assert [token.id for token in llm.stream("What?", params, images=[FIRST])] == expected
        num_files = len(list(folder.iterdir()))
        salted = llm.generate("What?", params, images=[FIRST], cache_salt="mine")[0]
        streamed = llm.stream("What?", params, images=[FIRST], cache_salt="yours")
        assert salted.token_ids == [token.id for token in streamed] == expected
        assert len(list(folder.iterdir())) == num_files + 2
        content = [{"type": "image", "image": FIRST}, {"type": "text", "text": "What?"}, image(as_data(SECOND))]
        messages = [{"role": "user", "content": content}]
        chatted = llm.chat(messages, params)
        assert chatted.prompt_token_ids == oracle.ids(["user: ", FIRST, "What?", SECOND, "assistant:"])
        rendered = llm.render_chat(messages)
        placed = llm.generate(rendered, params, images=[FIRST, SECOND], add_special_tokens=False)
        assert placed[0].prompt_token_ids == chatted.prompt_token_ids
        with pytest.raises(ValidationError, match="`images` has 1 pictures, and the prompt has places for 2"):
            llm.generate("<image><image>", params, images=[FIRST])
        with pytest.raises(ValidationError, match="places for 1"):
            llm.generate("<image>", params)
        with pytest.raises(ValidationError, match="2 prompts but `images` for 1"):
            llm.generate(["a", "b"], params, images=[FIRST])
        with pytest.raises(ValidationError, match="Failed to read image data"):
            llm.generate("a", params, images=[tmp_path / "none.png"])
        assert folder.is_dir()
    assert not folder.exists()
