"""What the page's server understands, as an OpenAPI description; requests are checked against these schemas."""

from __future__ import annotations

from typing import Any

from npeff.explore.themes import LONGEST
from npeff.utils.text import is_text
from npeff.utils.version import __version__

MOST_TEXTS = 8
LONGEST_TEXT = 20_000

Schema = dict[str, Any]


def _object(properties: Schema, optional: tuple[str, ...] = ()) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_INDEX: Schema = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
_DECOMPOSITION: Schema = {"type": "string", "minLength": 1, "maxLength": 255}
_ANNOTATION = _object(
    {
        "component": _INDEX,
        **{name: {"type": "string", "maxLength": LONGEST[name]} for name in ("label", "note", "who")},
        "when": {"type": "string", "format": "date-time"},
        "source": _TEXT,
    }
)
_MODEL = _object({"state": {"type": "string", "enum": ["not loaded", "loading", "ready", "failed"]}, "message": _TEXT})

NEW_ANNOTATION = _object(
    {
        "decomposition": _DECOMPOSITION,
        "component": _INDEX,
        **{name: {"type": "string", "maxLength": LONGEST[name]} for name in ("label", "note", "who")},
    },
    optional=("note", "who"),
)
TRY = _object(
    {
        "decomposition": _DECOMPOSITION,
        "texts": _array({"type": "string", "minLength": 1, "maxLength": LONGEST_TEXT}, minItems=1, maxItems=MOST_TEXTS),
        "fields": _array(
            {"type": "object", "additionalProperties": {"type": "string", "maxLength": LONGEST_TEXT}},
            maxItems=MOST_TEXTS,
        ),
    },
    optional=("fields",),
)
_STATE = _object(
    {
        "decomposition": _TEXT,
        "annotations": _array(_ANNOTATION),
        "user": _TEXT,
        "model": _MODEL,
        "fields": _array(_TEXT),
    }
)
_TRIED = _object(
    {
        "answers": _array(_TEXT),
        "probabilities": _array(_array({"type": ["number", "null"]})),
        "components": _array(_INDEX),
        "coefficients": _array(_array(_NUMBER)),
        "shares": {"type": ["array", "null"], "items": _array(_NUMBER)},
        "residual": _array(_NUMBER),
        "set_aside": _array({"type": "boolean"}),
    }
)
_ERROR = _object({"error": _TEXT})


def _answers(found: Schema, errors: dict[int, str], **more: Schema) -> Schema:
    """Responses of an operation: what is found, and what may go wrong."""
    everywhere = {400: "the request is malformed", 403: "the request comes from elsewhere", 500: "an error of ours"}
    said = {str(code): _response(text, _ERROR) for code, text in sorted({**everywhere, **errors}.items())}
    return {"200": _response("found", found), **more, **said}


def _response(text: str, schema: Schema) -> Schema:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _query(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "required": True, "schema": schema}


def _posted(schema: Schema) -> Schema:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


_CUSTOM: Schema = {
    "name": "X-Npeff",
    "in": "header",
    "description": "any value; needed where the client does not send Sec-Fetch-Site: same-origin",
    "schema": {"type": "string", "pattern": "^[!-~]+$"},
}
_ABSENT = {404: "there is no such decomposition or component"}
_POST_ERRORS = {
    **_ABSENT,
    409: "the decomposition was made anew since the page was served",
    411: "the request has no Content-Length",
    413: "the request is too long",
    415: "the request is not application/json",
}

OPENAPI: Schema = {
    "openapi": "3.1.0",
    "info": {"title": "npeff explore", "version": __version__},
    "paths": {
        "/api/state": {
            "get": {
                "summary": "Labels and notes of a decomposition, and whether the model is loaded.",
                "parameters": [_query("decomposition", _DECOMPOSITION)],
                "responses": _answers(_STATE, _ABSENT),
            }
        },
        "/api/history": {
            "get": {
                "summary": "Everything that was said about a component, the oldest first.",
                "parameters": [_query("decomposition", _DECOMPOSITION), _query("component", _INDEX)],
                "responses": _answers(_array(_ANNOTATION), _ABSENT),
            }
        },
        "/api/annotation": {
            "post": {
                "summary": "Label a component; an empty label and note remove what is there.",
                "parameters": [_CUSTOM],
                "requestBody": _posted(NEW_ANNOTATION),
                "responses": _answers(_ANNOTATION, _POST_ERRORS),
            }
        },
        "/api/try": {
            "post": {
                "summary": "Coefficients and answers of texts. The first call only begins to load the model.",
                "parameters": [_CUSTOM],
                "requestBody": _posted(TRY),
                "responses": _answers(_TRIED, _POST_ERRORS, **{"202": _response("the model is being loaded", _MODEL)}),
            }
        },
        "/api/openapi.json": {
            "get": {
                "summary": "This description.",
                "responses": _answers({"type": "object"}, {}),
            }
        },
    },
}


def check(schema: Schema, value: Any, name: str) -> Any:
    """`value` if it fits `schema` (of the kinds above), else ValueError says what is wrong with `name`."""
    kind = schema["type"]
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON has one kind of number
    kinds: dict[str, type] = {"object": dict, "array": list, "string": str, "integer": int}
    fits = isinstance(value, kinds[kind]) and not isinstance(value, bool)
    if not fits:
        raise ValueError(f"{name} should be of type {kind}")
    if kind == "integer" and not schema["minimum"] <= value <= schema["maximum"]:
        raise ValueError(f"{name} should be from {schema['minimum']} to {schema['maximum']}")
    if kind in ("string", "array"):
        least, most = (schema.get(limit) for limit in _LIMITS[kind])
        unit = "characters" if kind == "string" else "entries"
        if len(value) < (least or 0):
            raise ValueError(f"{name} is empty")
        if most is not None and len(value) > most:
            raise ValueError(f"{name} has {len(value)} {unit}; it may have {most}")
    if kind == "string" and not is_text(value):
        raise ValueError(f"{name} is not valid Unicode")
    if kind == "array":
        return [check(schema["items"], item, f"{name} {number}") for number, item in enumerate(value, 1)]
    if kind == "object":
        return _check_object(schema, value, name)
    return value


_LIMITS = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}


def _check_object(schema: Schema, value: dict[str, Any], name: str) -> dict[str, Any]:
    known, others = schema.get("properties", {}), schema["additionalProperties"]
    missing = [key for key in schema.get("required", ()) if key not in value]
    if missing:
        raise ValueError(f"{name} has no {missing[0]}")
    unknown = [key for key in value if key not in known]
    if unknown and others is False:
        raise ValueError(f"{name} has an unknown entry {unknown[0]!r}")
    return {key: check(known.get(key, others), item, key) for key, item in value.items()}
