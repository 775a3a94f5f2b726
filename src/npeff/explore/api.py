"""What the page asks of its server: labels and notes, and texts to try. JSON in, JSON out."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn
from urllib.parse import parse_qs

from npeff.explore.openapi import NEW_ANNOTATION, OPENAPI, TRY, Schema, check
from npeff.explore.themes import Annotations, system_user
from npeff.explore.tryout import Tryout
from npeff.store.run import Run
from npeff.utils.errors import UserError

PREFIX = "/api/"
Answer = tuple[HTTPStatus, Any]


class ApiError(Exception):
    """A request that cannot be answered, and the status that says so."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """Answers requests about the decompositions `names` of a run, as they are now."""

    def __init__(self, run: Run, names: list[str], device: str | None = None) -> None:
        self._books = {name: Annotations(run, name) for name in names}
        self._tryout = Tryout(run, device)
        self._get: dict[str, Callable[[dict[str, str]], Answer]] = {
            "/api/state": self._state,
            "/api/history": self._history,
            "/api/openapi.json": lambda query: (HTTPStatus.OK, OPENAPI),
        }
        self._post: dict[str, tuple[Schema, Callable[[dict[str, Any]], Answer]]] = {
            "/api/annotation": (NEW_ANNOTATION, self._annotate),
            "/api/try": (TRY, self._try),
        }

    def methods(self, path: str) -> list[str]:
        """Methods that a path takes; none if there is no such path."""
        return (["GET", "HEAD"] if path in self._get else []) + (["POST"] if path in self._post else [])

    def get(self, path: str, query: str) -> Answer:
        """Status and JSON value for a GET of `path`."""
        return _guarded(lambda: self._get[path](_parameters(path, query)))

    def post(self, path: str, body: bytes) -> Answer:
        """Status and JSON value for a POST of `body` to `path`."""
        schema, act = self._post[path]
        return _guarded(lambda: act(_parse(schema, body)))

    # --- labels and notes --------------------------------------------------------------------------------------

    def _state(self, query: dict[str, str]) -> Answer:
        book = self._book(query["decomposition"])
        return HTTPStatus.OK, {
            "decomposition": book.name,
            "annotations": [dataclasses.asdict(annotation) for annotation in book.current().values()],
            "user": system_user(),
            "model": self._tryout.status(),
            "fields": self._tryout.fields,
        }

    def _history(self, query: dict[str, str]) -> Answer:
        book = self._book(query["decomposition"])
        if not re.fullmatch(r"[0-9]{1,9}", query["component"], re.ASCII):
            _wrong("component should be a number")
        component = int(query["component"])
        self._check_component(book, component)
        return HTTPStatus.OK, [dataclasses.asdict(annotation) for annotation in book.history(component)]

    def _annotate(self, asked: dict[str, Any]) -> Answer:
        book = self._book(asked.pop("decomposition"))
        self._check_unchanged(book)
        self._check_component(book, asked["component"])
        return HTTPStatus.OK, dataclasses.asdict(book.add(**asked))

    # --- texts to try ------------------------------------------------------------------------------------------

    def _try(self, asked: dict[str, Any]) -> Answer:
        book = self._book(asked["decomposition"])
        self._check_unchanged(book)
        fields = asked.get("fields", [])
        wanted = set(self._tryout.fields)
        if wanted and [set(given) for given in fields] != [wanted] * len(asked["texts"]):
            _wrong(f"fields should give {', '.join(sorted(wanted))} for each text")
        if not self._tryout.is_ready():
            return HTTPStatus.ACCEPTED, self._tryout.status()
        try:
            return HTTPStatus.OK, self._tryout.explain(book.name, asked["texts"], fields)
        except UserError as error:  # a text too long for the model, most likely
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from error

    # --- helpers -----------------------------------------------------------------------------------------------

    def _book(self, name: str) -> Annotations:
        if name not in self._books:
            raise ApiError(HTTPStatus.NOT_FOUND, f"There is no decomposition {name!r} here.")
        return self._books[name]

    @staticmethod
    def _check_component(book: Annotations, component: int) -> None:
        if component >= book.components:
            raise ApiError(HTTPStatus.NOT_FOUND, f"There is no component {component} in {book.name}.")

    @staticmethod
    def _check_unchanged(book: Annotations) -> None:
        if not book.is_current():
            raise ApiError(
                HTTPStatus.CONFLICT,
                f"{book.name} was made anew since this page was served. Start `npeff explore` again to see it.",
            )


def _wrong(message: str) -> NoReturn:
    raise ApiError(HTTPStatus.BAD_REQUEST, f"{message}.")


def _guarded(act: Callable[[], Answer]) -> Answer:
    """What `act` gives, or an error that its caller can read; never a traceback."""
    try:
        return act()
    except ApiError as error:
        return error.status, {"error": str(error)}
    except UserError as error:  # the journal is damaged, the disk is full, ...
        return HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)}
    except Exception as error:
        print(f"npeff explore: {type(error).__name__}: {error}", file=sys.stderr)
        return HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"Something went wrong here: {type(error).__name__}."}


def _parameters(path: str, query: str) -> dict[str, str]:
    """The query parameters that a path takes, each given once."""
    names = [parameter["name"] for parameter in OPENAPI["paths"][path]["get"].get("parameters", ())]
    try:
        given = parse_qs(query, keep_blank_values=True, max_num_fields=16, errors="strict")
    except ValueError:  # bytes that are not UTF-8 are one too
        _wrong("the query cannot be read")
    for name in names:
        if len(given.get(name, [])) != 1:
            _wrong(f"give {name} once")
    return {name: given[name][0] for name in names}


def _parse(schema: Schema, body: bytes) -> dict[str, Any]:
    """The JSON object in `body`, checked."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        _wrong("the request is not valid JSON")
    try:
        found: dict[str, Any] = check(schema, value, "the request")
    except ValueError as error:
        _wrong(str(error))
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
