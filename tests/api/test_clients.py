"""Clients as their users have them, unmodified, against the real server."""

import asyncio
import json
import os
import subprocess
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Server

COUNT = "Count: one, two,"  # greedy: " three, four, five, six, ..."
HELLO = [{"role": "user", "content": "Say hello in one word."}]
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 16}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """No account, no price list from the network; and requests are let through on a machine that is set offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.delenv("HF_TOKEN", raising=False)


# -- huggingface_hub -----------------------------------------------------------------------------------------------


@pytest.fixture
def hub(server: Server) -> Any:
    from huggingface_hub import InferenceClient

    return InferenceClient(server.url)


def test_hub_text_generation(hub: Any) -> None:
    """This client asks at `/`, where TGI repeats the prompt unless told not to."""
    assert hub.text_generation(COUNT, max_new_tokens=4) == COUNT + " three, four,"
    assert hub.text_generation(COUNT, max_new_tokens=4, return_full_text=False) == " three, four,"
    assert hub.text_generation(COUNT, max_new_tokens=8, stop=["four"]) == COUNT + " three, four"
    sampled = [hub.text_generation(COUNT, max_new_tokens=8, do_sample=True, seed=3, top_p=0.9) for _ in range(2)]
    assert sampled[0] == sampled[1]


def test_hub_text_generation_with_details(hub: Any) -> None:
    found = hub.text_generation(COUNT, max_new_tokens=3, details=True, top_n_tokens=2, decoder_input_details=True)
    assert found.generated_text == COUNT + " three, four"
    assert found.details.finish_reason == "length"
    assert [token.text for token in found.details.tokens] == [" three", ",", " four"]
    assert len(found.details.top_tokens) == 3
    best = hub.text_generation(COUNT, max_new_tokens=3, details=True, best_of=2, do_sample=True)
    assert len(best.details.best_of_sequences) == 1


def test_hub_text_generation_streams(hub: Any) -> None:
    assert list(hub.text_generation(COUNT, max_new_tokens=3, stream=True)) == [" three", ",", " four"]
    events = list(hub.text_generation(COUNT, max_new_tokens=3, stream=True, details=True))
    assert [event.index for event in events] == [1, 2, 3]
    assert events[-1].generated_text == COUNT + " three, four"
    assert events[-1].details.generated_tokens == 3
    assert events[-1].details.input_length > 0


def test_hub_text_generation_with_a_grammar(hub: Any) -> None:
    schema = {"properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
    grammar = {"type": "json", "value": schema}
    text = hub.text_generation("A person: ", max_new_tokens=30, grammar=grammar, return_full_text=False)
    assert isinstance(json.loads(text)["age"], int)


def test_hub_says_what_the_server_says(hub: Any) -> None:
    from huggingface_hub.errors import GenerationError, ValidationError

    with pytest.raises(ValidationError, match="`temperature` must be strictly positive"):
        hub.text_generation("a", temperature=-1.0)
    with pytest.raises((GenerationError, ValidationError), match="`temperature` must be strictly positive"):
        list(hub.text_generation("a", temperature=-1.0, stream=True))


def test_hub_chat(hub: Any) -> None:
    found = hub.chat_completion(HELLO, max_tokens=30, temperature=0)
    text = found.choices[0].message.content
    assert text
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    chunks = list(
        hub.chat_completion(HELLO, max_tokens=30, temperature=0, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == found.usage.completion_tokens
    logprobs = hub.chat_completion(HELLO, max_tokens=2, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert len(logprobs.content[0].top_logprobs) == 2
    same = hub.chat.completions.create(model="tgi", messages=HELLO, max_tokens=30, temperature=0)
    assert same.choices[0].message.content == text


def test_hub_appends_what_comes(hub: Any) -> None:
    """As TGI's examples do, in Python as in JavaScript: without a look at what is appended."""
    text = ""
    for chunk in hub.chat_completion(HELLO, max_tokens=30, temperature=0, stream=True):
        text += chunk.choices[0].delta.content
        assert chunk.choices[0].delta.role == "assistant"
    assert text == hub.chat_completion(HELLO, max_tokens=30, temperature=0).choices[0].message.content


def test_hub_chat_with_tools_and_formats(hub: Any) -> None:
    found = hub.chat_completion(
        [{"role": "user", "content": "Weather in Paris?"}], tools=[WEATHER_TOOL], tool_choice="required", max_tokens=60
    )
    call = found.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert "city" in json.loads(call.function.arguments)
    regex = {"type": "regex", "value": "(yes|no)"}
    assert hub.chat_completion(HELLO, response_format=regex, max_tokens=5).choices[0].message.content in ("yes", "no")


def test_hub_async(server: Server) -> None:
    from huggingface_hub import AsyncInferenceClient

    async def run() -> tuple[str, list[str], str, str]:
        client = AsyncInferenceClient(server.url)
        whole, chat = await asyncio.gather(
            client.text_generation(COUNT, max_new_tokens=3, return_full_text=False),
            client.chat_completion(HELLO, max_tokens=8, temperature=0),
        )
        tokens = [token async for token in await client.text_generation(COUNT, max_new_tokens=3, stream=True)]
        stream = await client.chat_completion(HELLO, max_tokens=8, temperature=0, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        return whole, tokens, chat.choices[0].message.content or "", "".join(pieces)

    whole, tokens, chat, streamed = asyncio.run(run())
    assert whole == "".join(tokens) == " three, four"
    assert chat == streamed


# -- text-generation -----------------------------------------------------------------------------------------------


@pytest.fixture
def tgi_client(server: Server) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from text_generation import Client

    return Client(server.url, timeout=60)


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the clients' own making


def test_tgi_client(tgi_client: Any) -> None:
    found = tgi_client.generate(COUNT, max_new_tokens=3)
    assert found.generated_text == " three, four"
    assert found.details.finish_reason == "length"
    assert [token.text for token in found.details.tokens] == [" three", ",", " four"]
    best = tgi_client.generate(COUNT, max_new_tokens=3, do_sample=True, best_of=2, top_n_tokens=2)
    assert len(best.details.best_of_sequences) == 1
    details = tgi_client.generate(COUNT, max_new_tokens=1, decoder_input_details=True, return_full_text=True)
    assert details.generated_text == COUNT + " three"


def test_tgi_client_streams(tgi_client: Any) -> None:
    events = list(tgi_client.generate_stream(COUNT, max_new_tokens=3))
    assert "".join(event.token.text for event in events) == " three, four"
    assert events[-1].generated_text == " three, four"
    assert events[-1].details.generated_tokens == 3


def test_tgi_client_says_what_the_server_says(tgi_client: Any) -> None:
    from text_generation.errors import ValidationError

    with pytest.raises(ValidationError, match="`inputs` tokens"):
        tgi_client.generate("a " * 3000)
    with pytest.raises(ValidationError, match="`inputs` tokens"):
        list(tgi_client.generate_stream("a " * 3000))


def test_tgi_client_chat(tgi_client: Any) -> None:
    """Whole answers only: the model of streamed chat in version 0.7.0 demands members that TGI 3 does not send."""
    found = tgi_client.chat(HELLO, max_tokens=8, temperature=0.5, seed=3)
    assert found.choices[0].message.content
    assert found.usage["completion_tokens"] == 8


# -- openai --------------------------------------------------------------------------------------------------------


@pytest.fixture
def openai_client(server: Server) -> Iterator[Any]:
    from openai import OpenAI

    with OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_openai_chat(openai_client: Any) -> None:
    create = openai_client.chat.completions.create
    found = create(model="tgi", messages=HELLO, max_tokens=30, temperature=0)
    text = found.choices[0].message.content
    assert text
    options = {"include_usage": True}
    chunks = list(
        create(model="tgi", messages=HELLO, max_tokens=30, temperature=0, stream=True, stream_options=options)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == found.usage.completion_tokens
    several = create(
        model="tgi", messages=HELLO, n=2, max_completion_tokens=4, logprobs=True, top_logprobs=2, stop="never", seed=1
    )
    assert [choice.index for choice in several.choices] == [0, 1]
    assert len(several.choices[1].logprobs.content) == 4


def test_openai_completions(openai_client: Any) -> None:
    create = openai_client.completions.create
    assert create(model="tgi", prompt=COUNT, temperature=0, max_tokens=3).choices[0].text == " three, four"
    chunks = create(model="tgi", prompt=COUNT, temperature=0, max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == " three, four"
    found = create(model="tgi", prompt=[COUNT, "a"], max_tokens=2, logprobs=1, echo=True, n=2)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]


def test_openai_models_and_errors(openai_client: Any) -> None:
    import openai

    assert [model.id for model in openai_client.models.list()] == ["embedded"]
    assert openai_client.models.retrieve("embedded").id == "embedded"
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model="tgi", messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature"
    assert "`temperature`" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        openai_client.embeddings.create(model="tgi", input="a")
    with pytest.raises(openai.BadRequestError):
        list(openai_client.chat.completions.create(model="tgi", messages=HELLO, top_p=2, stream=True))


def test_openai_structured_output(openai_client: Any) -> None:
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=12)
        age: int = Field(le=120)

    for parse in (openai_client.chat.completions.parse, openai_client.beta.chat.completions.parse):
        found = parse(
            model="tgi",
            messages=[{"role": "user", "content": "Describe a person."}],
            response_format=Person,
            temperature=0,
            max_tokens=80,
        )
        person = found.choices[0].message.parsed
        assert isinstance(person, Person)
        assert person.name


def test_openai_tools(openai_client: Any) -> None:
    create = openai_client.chat.completions.create
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    settings = {"model": "tgi", "tools": [WEATHER_TOOL], "temperature": 0, "max_tokens": 80}
    found = create(messages=messages, tool_choice="required", parallel_tool_calls=False, **settings)
    message = found.choices[0].message
    assert found.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert "city" in json.loads(call.function.arguments)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}]
    answer = create(messages=messages, tool_choice="none", **settings)
    assert answer.choices[0].message.content


def test_openai_stream_helper(openai_client: Any) -> None:
    settings = {"model": "tgi", "temperature": 0, "max_tokens": 60}
    with openai_client.chat.completions.stream(messages=HELLO, **settings) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
        final = events.get_final_completion()
    assert final.choices[0].message.content == text
    assert final.choices[0].finish_reason in ("stop", "length")
    named = {"type": "function", "function": {"name": "get_weather"}}
    with openai_client.chat.completions.stream(
        messages=[{"role": "user", "content": "Weather in Paris?"}], tools=[WEATHER_TOOL], tool_choice=named, **settings
    ) as events:
        kinds = [event.type for event in events]
        final = events.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    message = final.choices[0].message
    assert "city" in json.loads(message.tool_calls[0].function.arguments)
    # What the helper put together can be sent back.
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny."}
    create = openai_client.chat.completions.create
    fed_back = create(messages=[*HELLO, message, result], tools=[WEATHER_TOOL], tool_choice="none", **settings)
    plain = {"role": "assistant", "content": message.content, "tool_calls": message.to_dict()["tool_calls"]}
    same = create(messages=[*HELLO, plain, result], tools=[WEATHER_TOOL], tool_choice="none", **settings)
    assert fed_back.choices[0].message.content == same.choices[0].message.content
    assert fed_back.usage.prompt_tokens == same.usage.prompt_tokens


def test_openai_parse_with_tools(openai_client: Any) -> None:
    """`parse` sends the format of the answer and the tools together."""
    from openai import pydantic_function_tool
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=12)
        age: int = Field(le=120)

    class GetWeather(BaseModel):
        city: str = Field(max_length=12)

    for question in ("Describe a person.", "What is the weather in Paris?"):
        found = openai_client.chat.completions.parse(
            model="tgi",
            messages=[{"role": "user", "content": question}],
            response_format=Person,
            tools=[pydantic_function_tool(GetWeather)],
            max_tokens=150,
            temperature=0,
        )
        message = found.choices[0].message
        if message.tool_calls:
            assert isinstance(message.tool_calls[0].function.parsed_arguments, GetWeather)
        else:
            assert isinstance(message.parsed, Person)


def test_openai_async(server: Server) -> None:
    from openai import AsyncOpenAI

    async def run() -> str:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="unused") as client:
            stream = await client.chat.completions.create(
                model="tgi", messages=[{"role": "user", "content": "Hi"}], max_tokens=4, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(run())


# -- langchain -----------------------------------------------------------------------------------------------------


def test_langchain(server: Server) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint

    settings: dict[str, Any] = {"endpoint_url": server.url, "max_new_tokens": 4, "temperature": 0.001}
    endpoint = HuggingFaceEndpoint(**settings)
    assert endpoint.invoke(COUNT) == " three, four,"
    assert "".join(endpoint.stream(COUNT)) == " three, four,"
    stopped = endpoint.invoke(COUNT, stop=["three"])
    assert stopped.strip() in ("three", "")
    chat = ChatHuggingFace(llm=endpoint, model_id="embedded", max_tokens=8, temperature=0)
    answer = chat.invoke([HumanMessage("Say hello in one word.")])
    assert answer.content
    pieces = [chunk.content for chunk in chat.stream([HumanMessage("Say hello in one word.")])]
    assert "".join(str(piece) for piece in pieces) == answer.content


# -- litellm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["openai/embedded", "huggingface/tgi"])
def test_litellm(server: Server, provider: str) -> None:
    import litellm

    base = server.url + "/v1" if provider.startswith("openai/") else server.url
    settings: dict[str, Any] = {"model": provider, "api_base": base, "api_key": "unused", "temperature": 0}
    found: Any = litellm.completion(messages=HELLO, max_tokens=12, **settings)
    text = found.choices[0].message.content
    assert text
    assert found.usage.completion_tokens == 12
    chunks: Any = litellm.completion(messages=HELLO, max_tokens=12, stream=True, **settings)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_litellm_tools(server: Server) -> None:
    import litellm

    found: Any = litellm.completion(
        model="openai/embedded",
        api_base=server.url + "/v1",
        api_key="unused",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER_TOOL],
        tool_choice="required",
        temperature=0,
        max_tokens=80,
    )
    assert found.choices[0].message.tool_calls[0].function.name == "get_weather"


# -- curl ----------------------------------------------------------------------------------------------------------

CURL = {
    "generate": (
        "curl -s {url}/generate -X POST"
        """ -d '{{"inputs":"What is Deep Learning?","parameters":{{"max_new_tokens":20}}}}'"""
        " -H 'Content-Type: application/json'"
    ),
    "generate_stream": (
        "curl -s {url}/generate_stream -X POST"
        """ -d '{{"inputs":"What is Deep Learning?","parameters":{{"max_new_tokens":20}}}}'"""
        " -H 'Content-Type: application/json'"
    ),
    "root": (
        "curl -s {url} -X POST"
        """ -d '{{"inputs":"What is Deep Learning?","parameters":{{"max_new_tokens":5}}}}'"""
        " -H 'Content-Type: application/json'"
    ),
    "chat": (
        "curl -s {url}/v1/chat/completions -X POST -d '{{"
        '"model": "tgi", "messages": [{{"role": "system", "content": "You are a helpful assistant."}},'
        ' {{"role": "user", "content": "What is deep learning?"}}], "stream": true, "max_tokens": 20'
        "}}' -H 'Content-Type: application/json'"
    ),
    "grammar": (
        "curl -s {url}/generate -X POST -H 'Content-Type: application/json' -d '{{"
        '"inputs": "I saw a puppy a cat and a raccoon during my bike ride in the park", "parameters": {{'
        '"repetition_penalty": 1.3, "max_new_tokens": 80, "grammar": {{"type": "json", "value": {{"properties": {{'
        '"location": {{"type": "string"}}, "animals_seen": {{"type": "integer", "minimum": 1, "maximum": 5}}}},'
        ' "required": ["location", "animals_seen"]}}}}}}'
        "}}'"
    ),
    "info": "curl -s {url}/info",
    "metrics": "curl -s {url}/metrics",
}


@pytest.mark.parametrize("name", CURL)
def test_curl(server: Server, name: str) -> None:
    command = CURL[name].format(url=server.url)
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    output = done.stdout
    match name:
        case "generate":
            assert json.loads(output)["generated_text"]
        case "root":
            assert json.loads(output)[0]["generated_text"].startswith("What is Deep Learning?")
        case "grammar":
            text = json.loads(output)["generated_text"]
            assert text.startswith("{")
            assert '"location"' in text
        case "generate_stream":
            assert output.startswith("data:")
            assert '"index":20' in output
        case "chat":
            assert output.endswith("data: [DONE]\n\n")
        case "info":
            assert json.loads(output)["model_id"] == "embedded"
        case _:
            assert "tgi_request_count" in output
