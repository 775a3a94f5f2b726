"""What the page's server understands: the records of requests and answers, and an OpenAPI document made from them."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

from npeff.explore.themes import LONGEST, Theme
from npeff.explore.tryout import ModelState, Tried
from npeff.utils.configs import from_dict
from npeff.utils.errors import UserError
from npeff.utils.text import shorten
from npeff.utils.version import __version__

Record = TypeVar("Record")
Schema = dict[str, Any]
"""A JSON schema, which is arbitrary JSON."""


# --- records ------------------------------------------------------------------------------------------------------


Name = Annotated[str, {"minLength": 1, "maxLength": 255}]
Component = Annotated[int, {"minimum": 0, "maximum": 999_999_999}]
Text = Annotated[str, {"minLength": 1, "maxLength": 20_000}]


@dataclass(frozen=True)
class OfDecomposition:
    """A question about a decomposition."""

    decomposition: Name
    """Its name."""


@dataclass(frozen=True)
class OfComponent(OfDecomposition):
    """A question about a component."""

    component: Component
    """Its number."""


@dataclass(frozen=True)
class NewTheme(OfComponent):
    """A theme to write down; an empty theme and note remove what is there."""

    theme: Annotated[str, {"minLength": 0, "maxLength": LONGEST["theme"]}]
    """What the component's examples have in common."""
    note: Annotated[str, {"minLength": 0, "maxLength": LONGEST["note"]}] = ""
    """Anything else."""
    who: Annotated[str, {"minLength": 0, "maxLength": LONGEST["who"]}] = ""
    """Who says so; the user of the server's system if empty."""


@dataclass(frozen=True)
class Try(OfDecomposition):
    """Texts to be explained."""

    texts: Annotated[list[Text], {"minItems": 1, "maxItems": 8}]
    """The texts."""
    fields: Annotated[list[dict[str, str]], {"minItems": 0, "maxItems": 8}] = field(default_factory=list)
    """For each text the other columns that the run's prompt names, if it names any."""


@dataclass(frozen=True)
class State:
    """What the page needs to know about a decomposition at any time."""

    decomposition: str
    """Its name."""
    themes: list[Theme]
    """Themes of its components, as they are now."""
    user: str
    """Who gives a theme if no name is given."""
    model: ModelState
    """Whether texts can be tried."""
    fields: list[str]
    """Other columns that the run's prompt names."""


@dataclass(frozen=True)
class Problem:
    """Why a request was not answered."""

    error: str
    """One or two sentences."""


# --- reading a request --------------------------------------------------------------------------------------------


def parse(kind: type[Record], body: bytes) -> Record:
    """The record in the body of a request.

    Args:
        kind: Class of the record.
        body: A JSON object in UTF-8.

    Returns:
        The record, within its limits.

    Raises:
        ValueError: The body holds no such record; the message is a sentence for who sent it.
    """
    try:
        values = json.loads(body.decode("utf-8"), parse_float=_number)
        json.dumps(values, ensure_ascii=False).encode("utf-8")  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise ValueError("The request is not valid JSON in UTF-8.") from error
    return checked(kind, values)


def checked(kind: type[Record], values: dict[str, Any]) -> Record:
    """A record from JSON values.

    Args:
        kind: Class of the record.
        values: Its fields.

    Returns:
        The record, within its limits.

    Raises:
        ValueError: A field is missing, unknown, of the wrong type or out of its limits.
    """
    try:
        record = from_dict(kind, values)
    except (UserError, RecursionError) as error:
        raise ValueError(shorten(str(error), 300)) from error
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        _check_limits(hint, getattr(record, name), name)
    return record


def _check_limits(hint: Any, value: Any, name: str) -> None:
    if typing.get_origin(hint) is Annotated:
        least, most = hint.__metadata__[0].values()
        size, what = (value, "") if isinstance(value, int) else (len(value), "the length of ")
        if not least <= size <= most:
            raise ValueError(f"{what}{name} should be from {least} to {most}, not {size}.".capitalize())
        hint = hint.__origin__
    for item in value if isinstance(value, list) else ():
        _check_limits(typing.get_args(hint)[0], item, name)


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value  # JSON has one kind of number: 3.0 is a component, too


# --- the document -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """What a path of the server does."""

    method: Literal["get", "post"]
    request: type | None
    """Record of the query or the body."""
    answer: Any
    """Type of the answer."""
    summary: str
    waiting: type | None = None
    """Answer while something is being prepared (202)."""


_STATE = "Themes and notes of a decomposition, and whether the model is loaded."
_HISTORY = "Everything that was said about a component, the oldest first."
_THEME = "Give a component a theme; an empty theme and note remove what is there."
_TRY = "Coefficients and answers of texts. The first call only begins to load the model."
OPERATIONS = {
    "/api/state": Operation("get", OfDecomposition, State, _STATE),
    "/api/history": Operation("get", OfComponent, list[Theme], _HISTORY),
    "/api/theme": Operation("post", NewTheme, Theme, _THEME),
    "/api/try": Operation("post", Try, Tried, _TRY, waiting=ModelState),
    "/api/openapi.json": Operation("get", None, dict, "This description."),
}

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", type(None): "null"}


def schema(hint: Any) -> Schema:
    """The JSON schema of a type.

    Args:
        hint: A record's class, or what a field of one may be.

    Returns:
        The schema; `Annotated` types carry their limits in the words of JSON schema.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return {**schema(arguments[0]), **arguments[1]}
    if origin in (typing.Union, types.UnionType):
        parts = [schema(part) for part in arguments]
        return {**parts[0], "type": [part["type"] for part in parts]}
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if origin is list:
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


_ERRORS = {"get": (400, 403, 404, 500), "post": (400, 403, 404, 409, 411, 413, 415, 500)}


def _describe(operation: Operation) -> Schema:
    answers = {"200": _content("the answer", operation.answer)}
    if operation.waiting is not None:
        answers["202"] = _content("the model is being loaded", operation.waiting)
    answers |= {str(code): _content(HTTPStatus(code).phrase, Problem) for code in _ERRORS[operation.method]}
    described = {"summary": operation.summary, "responses": answers}
    if operation.method == "post":
        return {**described, "requestBody": {**_content("the request", operation.request), "required": True}}
    parts = schema(operation.request)["properties"] if operation.request else {}
    queries = [{"name": name, "in": "query", "required": True, "schema": part} for name, part in parts.items()]
    return {**described, "parameters": queries}


OPENAPI: Schema = {
    "openapi": "3.1.0",
    "info": {
        "title": "npeff explore",
        "version": __version__,
        "description": "A POST needs a header X-Npeff of any value, or Sec-Fetch-Site: same-origin.",
    },
    "paths": {path: {operation.method: _describe(operation)} for path, operation in OPERATIONS.items()},
}
