"""The OpenAPI document of the server, made from the table of routes and the structs of their bodies.

Owns the translation from JSON Schema, which msgspec writes, to the dialect of OpenAPI 3.0. Words and ranges stand on
the fields (`field_docs`). Names of operations and components are those of TGI's own document, so that generated clients
keep their names.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import msgspec
from msgspec import UnsetType

from text_generation_inference.api import bodies, messages_bodies, openai_bodies, responses_bodies
from text_generation_inference.api.field_docs import NOT_SERVED

if TYPE_CHECKING:
    from text_generation_inference.api.routes import Answer, Route

Schema = dict[str, Any]

_REF = "#/components/schemas/"
_TAG = "Text Generation Inference"


def _type_of(struct: type[msgspec.Struct], name: str) -> Any:
    return _plain(next(field.type for field in msgspec.structs.fields(struct) if field.name == name))


def _plain(kind: Any) -> Any:
    """A type without what is said of it."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


# Shapes that are plain types here and have a name in TGI's document. An equal schema becomes a reference to it.
_NAMED: dict[str, Any] = {
    "FinishReason": bodies.FinishReason,
    "TokenizeResponse": _type_of(bodies.ChatTokenizeResponse, "tokenize_response"),
    "MessageChunk": openai_bodies.TextPart
    | openai_bodies.ImagePart
    | openai_bodies.PlainImagePart
    | openai_bodies.VideoPart
    | openai_bodies.PlainVideoPart
    | openai_bodies.RefusalPart,
    "MessageContent": _type_of(openai_bodies.Message, "content"),
    "Prompt": _type_of(openai_bodies.CompletionRequest, "prompt"),
    "ToolChoice": _type_of(openai_bodies.ChatRequest, "tool_choice"),
}
_CHOICES = {
    "Completion": ("Chunk", "CompletionFinal"),
    "SagemakerRequest": ("CompatGenerateRequest", "ChatRequest", "CompletionRequest"),
    "SagemakerResponse": ("GenerateResponse", "ChatCompletion", "CompletionFinal"),
    "SagemakerStreamResponse": ("StreamResponse", "ChatCompletionChunk", "Chunk"),
}
# Components that TGI's document calls otherwise.
_RENAMED = {"CompletionChunk": "Chunk"}
# TGI's document does not require what may be null, with this exception.
_REQUIRED_THOUGH_NULLABLE = "logprob"


def build_document(routes: "Sequence[Route]", version: str) -> dict[str, Any]:
    """The document that `/api-doc/openapi.json` answers with."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if route.summary:
            paths.setdefault(route.path.replace("*}", "}"), {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "Text Generation Inference",
            "description": "Text generation over HTTP: TGI's own routes; OpenAI's and Anthropic's under `/v1`.",
            "license": {"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
            "version": version,
        },
        "tags": [{"name": _TAG, "description": "The routes of the server"}],
        "paths": paths,
        "components": {
            "schemas": _components(),
            "securitySchemes": {"ApiKey": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: "Route") -> dict[str, Any]:
    operation: dict[str, Any] = {
        "tags": [_TAG],
        "summary": route.summary,
        "operationId": route.operation or route.name,
        "x-group": route.group,
    }
    if route.description:
        operation["description"] = route.description
    names = [part.strip("{*}") for part in route.path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.body:
        content = {"schema": {"$ref": _REF + route.body}, "example": route.example}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    if not route.public:
        operation["security"] = [{}, {"ApiKey": []}]  # the key is asked for when the server was started with one
    operation["responses"] = {str(answer.status): _response(answer) for answer in route.answers}
    return operation


def _response(answer: "Answer") -> dict[str, Any]:
    response: dict[str, Any] = {"description": answer.description}
    if answer.headers:
        response["headers"] = {
            name: {"description": text, "schema": {"type": "string"}} for name, text in answer.headers.items()
        }
    if answer.content:
        response["content"] = {media: {"schema": _named(name)} for media, name in answer.content.items()}
        if answer.example is not None:
            response["content"]["application/json"]["example"] = answer.example
    return response


def _named(name: str) -> Schema:
    """`Name` or `[Name]`, or a plain type in lower case."""
    if name.startswith("["):
        return {"type": "array", "items": _named(name[1:-1])}
    return {"type": name} if name.islower() else {"$ref": _REF + name}


# -- components ----------------------------------------------------------------------------------------------------


def _components() -> dict[str, Schema]:
    structs = {
        name: value
        for module in (bodies, openai_bodies, messages_bodies, responses_bodies)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and not name.startswith("_")
    }
    schemas, raw = msgspec.json.schema_components([*_NAMED.values(), *structs.values()], ref_template=_REF + "{name}")
    translation = _Translation(dict(zip(_NAMED, schemas, strict=False)))
    components = {_RENAMED.get(name, name): translation.of_struct(name, raw[name], structs[name]) for name in structs}
    components |= translation.named
    components |= {name: {"oneOf": [{"$ref": _REF + part} for part in parts]} for name, parts in _CHOICES.items()}
    components["GrammarType"] = _GRAMMAR
    return dict(sorted(components.items()))


def _grammar(kinds: list[str], value: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["type", "value"],
        "properties": {"type": {"type": "string", "enum": kinds}, "value": value},
    }


_GRAMMAR = {
    "description": "What the output must match.",
    "oneOf": [
        _grammar(["json", "json_object"], {"description": "A JSON schema with `properties`, as an object or as text."}),
        _grammar(["regex"], {"type": "string", "description": "A regular expression."}),
        _grammar(["json_schema"], {"$ref": "#/components/schemas/JsonSchemaConfig"}),
    ],
}


# What stands beside a type; a reference has no room for it.
_BESIDE = ("description", "example", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minLength")


class _Translation:
    """From JSON Schema as msgspec writes it to OpenAPI 3.0."""

    def __init__(self, named: dict[str, Schema]) -> None:
        self.named: dict[str, Schema] = {}
        self._names: dict[bytes, str] = {}  # a translated schema -> its name
        for name, raw in named.items():  # the inner ones come first
            schema = self._translate(raw)
            schema.pop("nullable", None)
            words = {"description": schema.pop("description")} if "description" in schema else {}
            self._names[_key(schema)] = name
            self.named[name] = schema | words

    def of_struct(self, name: str, schema: Schema, struct: type[msgspec.Struct]) -> Schema:
        optional = {field.name for field in msgspec.structs.fields(struct) if UnsetType in get_args(_plain(field.type))}
        properties: dict[str, Schema] = {}
        required: list[str] = []
        for key, raw in schema["properties"].items():
            if NOT_SERVED in raw:
                continue
            member = self._member(raw)
            properties[key] = member
            is_nullable = member.get("nullable", False) and key != _REQUIRED_THOUGH_NULLABLE
            if key in schema["required"] and key not in optional and not is_nullable:
                required.append(key)
        result: Schema = {"type": "object", "properties": properties}
        if required:
            result["required"] = required
        return result | {key: schema[key] for key in ("description", "additionalProperties") if key in schema}

    def _member(self, raw: Schema) -> Schema:
        beside = {key: raw[key] for key in _BESIDE if key in raw}
        member = self._translate({key: value for key, value in raw.items() if key not in beside})
        return {"allOf": [member], **beside} if beside and "$ref" in member else {**member, **beside}

    def _translate(self, schema: Schema) -> Schema:
        schema = dict(schema)
        schema.pop("title", None)
        default = schema.pop("default", None)
        variants = schema.pop("anyOf", None)
        nullable = False
        if variants is not None:
            kept = [self._translate(variant) for variant in variants if variant.get("type") != "null"]
            nullable = len(kept) < len(variants)
            schema.update(kept[0] if len(kept) == 1 else {"anyOf": kept})
        if "enum" in schema:
            schema["type"] = "string"
        if schema.get("type") == "null":
            schema, nullable = {"type": "string", "enum": [None]}, True
        if schema.get("type") == "number":
            schema["format"] = "float"
        if schema.get("type") == "integer":
            schema["format"] = "int32" if schema.get("maximum", 2**31) < 2**31 else "int64"
        for key in ("items", "additionalProperties"):
            if isinstance(schema.get(key), dict):
                schema[key] = self._translate(schema[key])
        if name := self._names.get(_key(schema)):
            schema = {"$ref": _REF + name}
        if nullable:  # a reference has no room for more
            schema = {"allOf": [schema], "nullable": True} if "$ref" in schema else {**schema, "nullable": True}
        return schema if default is None else {**schema, "default": default}


def _key(schema: Schema) -> bytes:
    return msgspec.json.encode(schema, order="deterministic")
