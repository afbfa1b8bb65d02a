"""The OpenAPI document: valid, complete, and the same as TGI's own but for the list below."""

import json
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import jsonschema
import msgspec
import pytest

from text_generation_inference.api import bodies, messages_bodies, openai_bodies, responses_bodies
from text_generation_inference.api.openapi import build_document
from text_generation_inference.api.routes import ROUTES

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "tgi-openapi.json").read_text())
OURS = json.loads(json.dumps(build_document(ROUTES, "1.2.3")))


# -- comparison ----------------------------------------------------------------------------------------------------


def shape(schema: dict) -> str:
    """A schema in one line: type, enum, reference, null; no words, examples, defaults or ranges."""
    null = " or null" if schema.get("nullable") else ""
    if "$ref" in schema:
        return schema["$ref"].rsplit("/", 1)[1] + null
    if "allOf" in schema and len(schema["allOf"]) == 1:
        return shape(schema["allOf"][0]) + null
    for key in ("allOf", "oneOf", "anyOf"):
        if key in schema:
            joint = " & " if key == "allOf" else " | "
            return "(" + joint.join(sorted(shape(part) for part in schema[key])) + ")" + null
    if "enum" in schema:
        return f"{schema.get('type')} of {sorted(schema['enum'])}" + null
    if schema.get("type") == "array":
        return f"[{shape(schema['items'])}]" + null
    if schema.get("type") == "object" and "properties" in schema:
        required = schema.get("required", [])
        inner = (f"{key}{'' if key in required else '?'}: {shape(part)}" for key, part in schema["properties"].items())
        return "{" + ", ".join(sorted(inner)) + "}" + null
    return schema.get("type", "anything") + null


def differences() -> list[str]:
    found: list[str] = []

    def compare(place: str, theirs: object, ours: object) -> None:
        if theirs != ours:
            found.append(f"{place}: {theirs} -> {ours}")

    for path, methods in REFERENCE["paths"].items():
        for method, theirs in methods.items():
            ours = OURS["paths"].get(path, {}).get(method)
            if ours is None:
                found.append(f"{method} {path}: missing")
                continue
            place = f"{method} {path}"
            compare(f"{place} operation", theirs["operationId"], ours["operationId"])
            compare(f"{place} body", body_shape(theirs), body_shape(ours))
            for status, response in theirs["responses"].items():
                if status not in ours["responses"]:
                    found.append(f"{place} {status}: missing")
                    continue
                for media, content in response.get("content", {}).items():
                    here = ours["responses"][status].get("content", {}).get(media)
                    compare(f"{place} {status} {media}", shape(content["schema"]), here and shape(here["schema"]))
    for name, theirs in REFERENCE["components"]["schemas"].items():
        ours = OURS["components"]["schemas"].get(name)
        if ours is None:
            found.append(f"{name}: missing")
        elif "properties" not in theirs or "properties" not in ours:
            compare(name, shape(theirs), shape(ours))
        else:
            compare(f"{name} required", sorted(theirs.get("required", [])), sorted(ours.get("required", [])))
            for key, schema in theirs["properties"].items():
                compare(f"{name}.{key}", shape(schema), shape(ours["properties"].get(key, {"type": "missing"})))
            more = sorted(set(ours["properties"]) - set(theirs["properties"]))
            if more:
                found.append(f"{name}: more {more}")
    return found


def body_shape(operation: dict) -> str | None:
    body = operation.get("requestBody")
    return body and shape(body["content"]["application/json"]["schema"])


# -- the list of differences ---------------------------------------------------------------------------------------

OPENAI_FIELDS = "fields that OpenAI has, and settings of TGI's native routes"
OPENAI_ERRORS = "errors of /v1 have OpenAI's shape and statuses: 400 for a failed check, 500 for a failed engine"
IN_STREAM = "a stream has begun when the input is checked: status 200, and the error is an event (section 15)"
NEVER_404 = "never answered (section 15)"
OBJECT = "TGI prints `object` too, and leaves it out of its document"
ONE_MESSAGE = "OpenAI has one shape of message with all members, not one with text and one with tool calls"
BYTES = "OpenAI's `bytes`; -inf and NaN are null"
ABSENT = "left out rather than null, by TGI too"
TOOL_TYPE = "`type` may be left out"

# Each difference, exactly, with its reason. Sections are those of the reference on the HTTP API.
_LIMITS = (
    "'max_client_batch_size', 'max_concurrent_requests', 'max_input_tokens', 'max_stop_sequences', 'max_total_tokens'"
)
EXCEPTIONS = {
    "GenerateParameters: more ['cache_salt', 'top_n_sigma']": "ours: keeps tenants apart in the prefix cache; a filter",
    "Info: more ['model_device_type', 'num_shard', 'pictures', 'quantization', 'replicas', 'server_version', "
    "'weight_bytes']": (
        "TGI 2's field, only where a device is emulated; our version; of a quantised model, method and bits, and bytes; of"
        " one that is split, ranks; of one that sees, what pictures cost; of several engines, how each is"
    ),
    f"Info required: ['max_best_of', {_LIMITS}, 'model_id', 'router', 'validation_workers', 'version'] -> "
    f"['max_best_of', {_LIMITS}, 'model_id', 'router', 'server_version', 'validation_workers', 'version']": "our version",
    "post /generate_stream 422 text/event-stream: ErrorResponse -> None": IN_STREAM,
    "post /generate_stream 424: missing": IN_STREAM,
    "post /generate_stream 429: missing": IN_STREAM,
    "post /generate_stream 500: missing": IN_STREAM,
    "post /tokenize 404: missing": NEVER_404,
    "post /chat_tokenize 404: missing": NEVER_404,
    "get /v1/models 404: missing": NEVER_404,
    "get /v1/models 200 application/json: ModelInfo -> ModelsInfo": "it is a list (section 13)",
    "post /v1/chat/completions 422: missing": OPENAI_ERRORS,
    "post /v1/chat/completions 424: missing": OPENAI_ERRORS,
    "post /v1/chat/completions 429 application/json: ErrorResponse -> OpenaiErrorResponse": OPENAI_ERRORS,
    "post /v1/chat/completions 500 application/json: ErrorResponse -> OpenaiErrorResponse": OPENAI_ERRORS,
    "post /v1/completions 422: missing": OPENAI_ERRORS,
    "post /v1/completions 424: missing": OPENAI_ERRORS,
    "post /v1/completions 429 application/json: ErrorResponse -> OpenaiErrorResponse": OPENAI_ERRORS,
    "post /v1/completions 500 application/json: ErrorResponse -> OpenaiErrorResponse": OPENAI_ERRORS,
    "GenerateResponse.details: Details or null -> Details": ABSENT,
    "Details.best_of_sequences: [BestOfSequence] or null -> [BestOfSequence]": ABSENT,
    "GrammarType: ({type: string of ['json'], value: anything} | {type: string of ['json_schema'], value: "
    "JsonSchemaConfig} | {type: string of ['regex'], value: string}) -> ({type: string of ['json', 'json_object'], "
    "value: anything} | {type: string of ['json_schema'], value: JsonSchemaConfig} | {type: string of ['regex'], "
    "value: string})": "`json_object` is another name of `json` (section 8)",
    "ChatCompletion required: ['choices', 'created', 'id', 'model', 'system_fingerprint', 'usage'] -> "
    "['choices', 'created', 'id', 'model', 'object', 'system_fingerprint', 'usage']": OBJECT,
    "ChatCompletion: more ['object']": OBJECT,
    "ChatCompletionChunk required: ['choices', 'created', 'id', 'model', 'system_fingerprint'] -> "
    "['choices', 'created', 'id', 'model', 'object', 'system_fingerprint']": OBJECT,
    "ChatCompletionChunk: more ['object']": OBJECT,
    "CompletionFinal required: ['choices', 'created', 'id', 'model', 'system_fingerprint', 'usage'] -> "
    "['choices', 'created', 'id', 'model', 'object', 'system_fingerprint', 'usage']": OBJECT,
    "CompletionFinal: more ['object']": OBJECT,
    "Chunk required: ['choices', 'created', 'id', 'model', 'system_fingerprint'] -> "
    "['choices', 'created', 'id', 'model', 'object', 'system_fingerprint']": OBJECT,
    "Chunk: more ['object', 'usage']": "as above; the last part may hold the token counts",
    "Completion: ((Chunk & {object: string of ['text_completion']}) | (CompletionFinal & {object: string of "
    "['text_completion']})) -> (Chunk | CompletionFinal)": "`object` is part of both",
    "ChatCompletionDelta: (TextMessage | ToolCallDelta) -> {content?: string, "
    "function_call?: Function, reasoning?: string, reasoning_content?: string, role?: string, "
    "tool_calls?: [DeltaToolCall]}": ONE_MESSAGE,
    "OutputMessage: (TextMessage | ToolCallMessage) -> {content?: string or null, "
    "function_call?: OutputFunction, reasoning?: string, reasoning_content?: string, refusal?: string or null, "
    "role?: string, tool_calls?: [OutputToolCall]}": ONE_MESSAGE,
    "Message: (MessageBody & {name?: string or null, role: string}) -> {content?: MessageContent or null, "
    "function_call?: FunctionCall or null, name?: string or null, reasoning?: anything, "
    "reasoning_content?: string or null, refusal?: string or null, role: string, thinking?: anything, "
    "tool_call_id?: string or null, tool_calls?: [ToolCall] or null}": ONE_MESSAGE,
    "MessageBody: missing": ONE_MESSAGE,
    "TextMessage: missing": ONE_MESSAGE,
    "ToolCallMessage: missing": ONE_MESSAGE,
    "ToolCallDelta: missing": ONE_MESSAGE,
    "MessageChunk: ({image_url: Url, type: string of ['image_url']} | {text: string, type: string of ['text']}) -> "
    "(ImagePart | PlainImagePart | PlainVideoPart | RefusalPart | TextPart | VideoPart)": (
        "the same, with names, OpenAI's refusals, videos, and pictures in the words of transformers"
    ),
    "Url: more ['detail']": "OpenAI's, accepted without effect",
    "ChatCompletionLogprob required: ['logprob', 'token', 'top_logprobs'] -> "
    "['bytes', 'logprob', 'token', 'top_logprobs']": BYTES,
    "ChatCompletionLogprob.logprob: number -> number or null": BYTES,
    "ChatCompletionLogprob: more ['bytes']": BYTES,
    "ChatCompletionTopLogprob required: ['logprob', 'token'] -> ['bytes', 'logprob', 'token']": BYTES,
    "ChatCompletionTopLogprob.logprob: number -> number or null": BYTES,
    "ChatCompletionTopLogprob: more ['bytes']": BYTES,
    "ChatCompletionLogprobs: more ['refusal']": OPENAI_FIELDS,
    "ChatRequest.logit_bias: [number] or null -> ([number] | object) or null": "OpenAI's form, by token id",
    "ChatRequest.response_format: GrammarType or null -> ResponseFormat or null": "OpenAI's forms as well",
    "ChatRequest.stream: boolean -> boolean or null": "OpenAI's form",
    "CompletionRequest.stream: boolean -> boolean or null": "OpenAI's form",
    "ChatRequest.stop: [string] or null -> ([string] | string) or null": "OpenAI: one or several",
    "CompletionRequest.stop: [string] or null -> ([string] | string) or null": "OpenAI: one or several",
    "ChatRequest: more": OPENAI_FIELDS,
    "CompletionRequest: more": OPENAI_FIELDS,
    "CompletionComplete required: ['finish_reason', 'index', 'text'] -> ['index', 'text']": "null until the end",
    "CompletionComplete.finish_reason: string -> string or null": "null until the end, as OpenAI's",
    "CompletionComplete.logprobs: [number] or null -> CompletionLogprobs or null": "OpenAI's shape; TGI never has any",
    "Prompt: [string] -> ([([integer] | integer | string)] | string)": "OpenAI: one or several, text or token ids",
    "DeltaToolCall required: ['function', 'id', 'index', 'type'] -> ['function', 'index']": "OpenAI: once per call",
    "Function.name: string or null -> string": "OpenAI: once per call, then left out",
    "FunctionDefinition required: ['arguments', 'name'] -> ['name']": "OpenAI: `parameters`, which may be left out",
    "FunctionDefinition: more ['parameters', 'strict']": OPENAI_FIELDS,
    "JsonSchemaConfig required: ['schema'] -> []": "OpenAI: may be left out",
    "JsonSchemaConfig: more ['description', 'strict']": OPENAI_FIELDS,
    "StreamOptions: more ['include_obfuscation']": OPENAI_FIELDS,
    "Tool required: ['function', 'type'] -> ['function']": TOOL_TYPE,
    "ToolCall required: ['function', 'id', 'type'] -> ['function', 'id']": TOOL_TYPE,
    "ToolCall.function: FunctionDefinition -> FunctionCall": "a call is no definition",
    "ToolChoice: (string of ['auto'] | string of ['none'] | string of ['required'] | {function: FunctionName}) -> "
    "(NamedToolChoice | string)": "any other string is the name of a function (section 7.1)",
    "Usage: more ['completion_tokens_details', 'prompt_tokens_details']": OPENAI_FIELDS,
}
OPEN_ENDED = {"ChatRequest: more", "CompletionRequest: more"}


def test_agrees_with_the_document_of_tgi_but_for_the_list():
    found = [next((head for head in OPEN_ENDED if text.startswith(head)), text) for text in differences()]
    assert set(found) - set(EXCEPTIONS) == set(), "new differences"
    assert set(EXCEPTIONS) - set(found) == set(), "differences that are no more"


def test_where_the_document_of_tgi_is_wrong_about_ranges_and_defaults():
    """Section 15 of the reference."""
    fields = OURS["components"]["schemas"]["GenerateParameters"]["properties"]
    assert fields["details"]["default"] is False
    assert "default" not in fields["max_new_tokens"]
    assert fields["top_p"]["exclusiveMaximum"] is True and fields["typical_p"]["exclusiveMaximum"] is True
    assert (fields["frequency_penalty"]["minimum"], fields["frequency_penalty"]["maximum"]) == (-2, 2)
    assert "exclusiveMinimum" not in fields["frequency_penalty"]
    assert fields["seed"]["minimum"] == 0 and "exclusiveMinimum" not in fields["seed"]
    assert fields["top_n_tokens"]["minimum"] == 0 and "exclusiveMinimum" not in fields["top_n_tokens"]
    assert "maxItems" not in fields["stop"]
    for path, method in (("/ping", "get"), ("/", "get"), ("/vertex", "post"), ("/docs", "get")):
        assert method in OURS["paths"][path]
    assert "get" in OURS["paths"]["/api-doc/openapi.json"]


# -- the document in itself ----------------------------------------------------------------------------------------


def operations():
    for path, methods in OURS["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def test_is_valid_openapi():
    schemathesis = pytest.importorskip("schemathesis")
    loaded = schemathesis.openapi.from_dict(OURS)
    loaded.validate()
    labels = {result.ok().label for result in loaded.get_all_operations()}
    assert labels == {f"{method.upper()} {path}" for path, methods in OURS["paths"].items() for method in methods}


def test_documents_every_route_of_the_server_and_no_other():
    served = {(route.method, plain_path(route.path)): route for route in ROUTES}
    # As /docs; files of pages; a stream for a page.
    silent = {("GET", "/docs/{}"), ("GET", "/pages/{}"), ("GET", "/dashboard/events")}
    assert {place for place, route in served.items() if not route.summary} == silent
    served = {place: route for place, route in served.items() if place not in silent}
    documented = {}
    for path, methods in OURS["paths"].items():
        for method, operation in methods.items():
            documented[method.upper(), plain_path(path)] = operation
    assert set(documented) == set(served)
    for place, operation in documented.items():
        assert ("security" in operation) is not served[place].public, place


def plain_path(path: str) -> str:
    return re.sub(r"\{.*?\}", "{}", path)


def test_nothing_is_offered_that_is_not_served():
    text = json.dumps(OURS)
    assert "LoRA" not in text and "x-not-served" not in text
    for name in ("audio", "web_search_options", "guided_grammar", "use_beam_search", "logits_processors"):
        assert name in openai_bodies.ChatRequest.__struct_fields__
        assert name not in OURS["components"]["schemas"]["ChatRequest"]["properties"]


def test_version_and_operation_names():
    assert OURS["openapi"] == "3.0.3" and OURS["info"]["version"] == "1.2.3"
    names = [operation["operationId"] for _, operation in operations()]
    assert len(names) == len(set(names))


def test_every_reference_leads_somewhere():
    def references(value: object):
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                assert set(value) == {"$ref"}, "a reference has no room for more"
                yield value["$ref"]
            for inner in value.values():
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    known = {f"#/components/schemas/{name}" for name in OURS["components"]["schemas"]}
    assert set(references(OURS)) <= known


def test_nothing_that_only_newer_dialects_have():
    def check(value: object) -> None:
        if isinstance(value, dict):
            assert not {"const", "title", "prefixItems", "$defs"} & set(value) or "version" in value, value
            assert value.get("type") != "null" and not isinstance(value.get("type"), list), value
            for key in ("exclusiveMinimum", "exclusiveMaximum"):
                assert isinstance(value.get(key, True), bool), value
            for key, inner in value.items():
                if key != "example":
                    check(inner)
        elif isinstance(value, list):
            for inner in value:
                check(inner)

    check(OURS)


def test_examples_are_accepted_by_the_structs_that_decode_them():
    checked = 0
    for place, operation in operations():
        if "requestBody" not in operation:
            continue
        content = operation["requestBody"]["content"]["application/json"]
        name = content["schema"]["$ref"].rsplit("/", 1)[1].replace("SagemakerRequest", "CompatGenerateRequest")
        modules = (bodies, openai_bodies, messages_bodies, responses_bodies)
        struct = next(getattr(module, name) for module in modules if hasattr(module, name))
        body = msgspec.json.decode(msgspec.json.encode(content["example"]), type=struct)
        assert isinstance(body, struct), place
        checked += 1
    assert checked >= 10


def schema_of(name: str) -> dict:
    """A component as JSON Schema, `nullable` made a type, for the jsonschema package."""

    def plain(value):
        if isinstance(value, list):
            return [plain(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        result = {key: plain(inner) for key, inner in value.items() if key not in ("nullable", "example")}
        for key, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if result.get(key) is True:
                result[key] = result.pop(limit)
        return {"anyOf": [result, {"type": "null"}]} if value.get("nullable") is True else result

    schemas = {key: plain(value) for key, value in OURS["components"]["schemas"].items()}
    return {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}


TOKEN = bodies.Token(5, "a", -0.5, False)
USAGE = openai_bodies.Usage(1, 2, 3, openai_bodies.PromptTokensDetails(0))
ANSWERS = [
    bodies.GenerateResponse("text"),
    bodies.GenerateResponse(
        "text", bodies.Details("length", 1, None, [bodies.PrefillToken(1, "x", None)], [TOKEN], [], [[TOKEN]])
    ),
    bodies.StreamResponse(1, TOKEN),
    bodies.StreamResponse(2, TOKEN, [TOKEN], "text", bodies.StreamDetails("eos_token", 2, 7, 5)),
    bodies.Info("m", None, None, 1, 1, 1, 1, 1, 1, 1, "text-generation-router", "1", None, None, "2"),
    bodies.ChatTokenizeResponse([bodies.SimpleToken(1, "a", 0, 1)], "a"),
    bodies.ErrorResponse("e", "validation"),
    openai_bodies.ChatCompletion(
        "1",
        0,
        "m",
        "f",
        [
            openai_bodies.ChatCompletionComplete(
                0,
                openai_bodies.OutputMessage(content="x"),
                openai_bodies.ChatCompletionLogprobs([openai_bodies.ChatCompletionLogprob("x", None, [120], [])]),
                "stop",
            )
        ],
        USAGE,
    ),
    openai_bodies.ChatCompletionChunk(
        "1",
        0,
        "m",
        "f",
        [openai_bodies.ChatCompletionChoice(0, openai_bodies.ChatCompletionDelta(content="x"), None, None)],
    ),
    openai_bodies.OpenaiErrorResponse(openai_bodies.OpenaiError("m", "t", None, None)),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_answers_fit_their_schema(answer):
    name = type(answer).__name__
    printed = json.loads(msgspec.json.encode(answer))
    validator = jsonschema.Draft202012Validator(schema_of(name))
    validator.validate(printed)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({})


@pytest.mark.parametrize(
    ("name", "body", "valid"),
    [
        ("GenerateRequest", {"inputs": "a", "parameters": {"temperature": None, "top_p": 0.5, "seed": 0}}, True),
        ("GenerateRequest", {"inputs": "a", "parameters": {"temperature": 0}}, False),
        ("GenerateRequest", {"inputs": "a", "parameters": {"top_p": 1}}, False),
        ("GenerateRequest", {"inputs": "a", "parameters": None}, False),
        ("GenerateRequest", {"inputs": "a", "unknown": 1}, True),
        ("GenerateRequest", {"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "a"}}}, True),
        ("GenerateRequest", {"inputs": "a", "parameters": {"grammar": {"type": "xml", "value": "a"}}}, False),
        ("ChatRequest", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, True),
        ("ChatRequest", {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, True),
        ("ChatRequest", {"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, False),
        ("ChatRequest", {"messages": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ("ChatRequest", {"messages": [], "unknown": 1}, True),
        ("CompletionRequest", {"prompt": [1, 2]}, True),
        ("CompletionRequest", {"prompt": {}}, False),
    ],
)
def test_bodies_and_the_schema(name, body, valid):
    assert jsonschema.Draft202012Validator(schema_of(name)).is_valid(body) is valid


# -- the page ------------------------------------------------------------------------------------------------------

PAGE = (Path(bodies.__file__).parent / "docs.html").read_text(encoding="utf-8")


def test_the_page_needs_nothing_from_elsewhere():
    for word in ("http://", "https://", "//cdn", "@import", "<link", " src=", "innerHTML"):
        assert word not in PAGE, word


class Server(BaseHTTPRequestHandler):
    """What the page asks of a server."""

    protocol_version = "HTTP/1.0"
    sent: ClassVar[list[dict]] = []

    def do_GET(self):
        answers = {
            "/health": b"",
            "/info": b'{"model_id": "org/model", "version": "1", "max_input_tokens": 9, "max_total_tokens": 10}',
            "/api-doc/openapi.json": json.dumps(OURS).encode(),
        }
        self.answer("application/json", answers[self.path])

    def do_POST(self):
        self.sent.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        streams = {
            "/v1/chat/completions": [{"choices": [{"delta": {"content": text}}]} for text in ("Grüße, ", "<b>&")],
            "/generate_stream": [
                {"token": {"text": "one", "special": False}},
                {"token": {"text": "</s>", "special": True}},
                {"error": "Incomplete generation stream", "error_type": "incomplete_generation_stream"},
            ],
        }
        if self.path in streams:
            frames = [json.dumps(event, ensure_ascii=False) for event in streams[self.path]] + ["[DONE]"]
            self.answer("text/event-stream", "".join(f": hi\n\ndata: {frame}\n\n" for frame in frames).encode())
        else:
            self.answer("application/json", b'{"generated_text": "whole"}')

    def answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        for place in range(0, len(body), 7):  # in pieces that cut events and characters
            self.wfile.write(body[place : place + 7])
            self.wfile.flush()

    def log_message(self, *_):
        pass


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize(
    ("operation", "text", "note"),
    [
        ("chat_completions", "Grüße, <b>&", "200 OK, 2 events"),
        ("generate_stream", "one\nIncomplete generation stream", "200 OK"),
        ("generate", "whole", "200 OK"),
    ],
)
def test_the_page_shows_all_routes_and_sends(tmp_path, operation, text, note):
    script = tmp_path / "page.js"
    script.write_text(re.search(r"<script>(.*?)</script>", PAGE, re.S)[1], encoding="utf-8")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        runner = Path(__file__).parents[1] / "data" / "docs_page.js"
        origin = f"http://127.0.0.1:{server.server_port}"
        done = subprocess.run(
            ["node", runner, script, origin, operation], capture_output=True, text=True, timeout=60, encoding="utf-8"
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert set(shown["operations"]) == {found["operationId"] for _, found in operations()}
    assert shown["text"] == text
    assert shown["note"].startswith(note)
    assert shown["state"] == "ready" and "org/model" in shown["facts"] and shown["title"].startswith("org/model")
    assert any("temperature" in cell for cell in shown["fields"])
    assert "inputs" in Server.sent[-1] or "messages" in Server.sent[-1]
