"""What the page's server takes and gives, as an OpenAPI document that is made from the types of its methods."""

import dataclasses
import inspect
import types
import typing
from http import HTTPStatus
from typing import Annotated, Any, Literal

from npeff.explore.api import GET, POST, Act, Problem
from npeff.utils import __version__

Schema = dict[str, Any]
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def schema(hint: Any) -> Schema:
    """The JSON schema of a type.

    Args:
        hint: A record's class, or what a field of one may be.

    Returns:
        The schema; `Annotated` types carry their limits in the words of JSON schema.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is Annotated:
        return {**schema(arguments[0]), **arguments[1]}
    if origin in (typing.Union, types.UnionType):
        parts = [schema(part) for part in arguments]
        return {**parts[0], "type": [part["type"] for part in parts]}
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if origin in (list, tuple):  # a tuple here has one kind of entries
        return {"type": "array", "items": schema(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema(arguments[1])}
    if not dataclasses.is_dataclass(hint):
        return {"type": _PLAIN[hint]}
    hints, fields = typing.get_type_hints(hint, include_extras=True), dataclasses.fields(hint)
    missing = (dataclasses.MISSING, dataclasses.MISSING)
    return {
        "type": "object",
        "properties": {each.name: schema(hints[each.name]) for each in fields},
        "required": [each.name for each in fields if (each.default, each.default_factory) == missing],
        "additionalProperties": False,
    }


def _content(text: str, hint: Any) -> Schema:
    return {"description": text, "content": {"application/json": {"schema": schema(hint)}}}


_PROBLEMS = (400, 403, 404, 500)
_PROBLEMS_OF_POST = (409, 411, 413, 415)


def _describe(act: Act, posted: bool) -> Schema:
    """What a request and its answers may be."""
    hints = typing.get_type_hints(act)
    asked, answer = hints["asked"], hints["return"]
    kinds = typing.get_args(answer) if isinstance(answer, types.UnionType) else (answer,)
    texts = {"200": "the answer", "202": "the model is being loaded"}
    answers = {code: _content(texts[code], kind) for code, kind in zip(texts, kinds, strict=False)}
    problems = (*_PROBLEMS, *_PROBLEMS_OF_POST) if posted else _PROBLEMS
    answers |= {str(code): _content(HTTPStatus(code).phrase, Problem) for code in problems}
    described = {"summary": (inspect.getdoc(act) or "").partition("\n")[0], "responses": answers}
    if posted:
        return {"post": {**described, "requestBody": {**_content("the request", asked), "required": True}}}
    parts = schema(asked)["properties"]
    queries = [{"name": name, "in": "query", "required": True, "schema": part} for name, part in parts.items()]
    return {"get": {**described, "parameters": queries}}


OPENAPI: Schema = {
    "openapi": "3.1.0",
    "info": {
        "title": "npeff explore",
        "version": __version__,
        "description": "A POST needs a header X-Npeff of any value, or Sec-Fetch-Site: same-origin.",
    },
    "paths": {path: _describe(act, path in POST) for path, act in (GET | POST).items()},
}
