"""What the page asks of its server: themes and notes, and texts to try. JSON in, JSON out."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from npeff.explore import openapi
from npeff.explore.openapi import OPERATIONS, NewTheme, OfComponent, OfDecomposition, Problem, State, Try
from npeff.explore.themes import Theme, Themes, system_user
from npeff.explore.tryout import ModelState, Tried, Tryout
from npeff.store.run import Run
from npeff.utils.errors import UserError

PREFIX = "/api/"
Answer = tuple[HTTPStatus, Any]
"""Status, and a record or a list of records."""


class ApiError(Exception):
    """A request that cannot be answered, and the status that says so."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """Answers requests about the decompositions `names` of a run, as they are now."""

    def __init__(self, run: Run, names: list[str], device: str | None = None) -> None:
        self._journals = {name: Themes(run, name) for name in names}
        self._tryout = Tryout(run, device)
        self._acts: dict[str, Callable[[Any], Any]] = {
            "/api/state": self._state,
            "/api/history": self._history,
            "/api/theme": self._give_theme,
            "/api/try": self._try,
            "/api/openapi.json": self._description,
        }

    def methods(self, path: str) -> list[str]:
        """Methods that a path takes; none if there is no such path."""
        if path not in self._acts:
            return []
        return ["POST"] if OPERATIONS[path].method == "post" else ["GET", "HEAD"]

    def answer(self, path: str, query: str, body: bytes | None) -> Answer:
        """Answer a request to `path`, never with a traceback.

        Args:
            path: One that has methods.
            query: What stands behind the question mark.
            body: What was posted; None for a GET.

        Returns:
            Status and record.
        """
        kind = OPERATIONS[path].request
        try:
            asked = kind and (_from_query(kind, query) if body is None else openapi.parse(kind, body))
        except ValueError as error:
            return HTTPStatus.BAD_REQUEST, Problem(str(error))
        try:
            answer = self._acts[path](asked)
        except ApiError as error:
            return error.status, Problem(str(error))
        except UserError as error:  # the journal is damaged, the disk is full, ...
            return HTTPStatus.INTERNAL_SERVER_ERROR, Problem(str(error))
        except Exception as error:
            print(f"npeff explore: {type(error).__name__}: {error}", file=sys.stderr)
            return HTTPStatus.INTERNAL_SERVER_ERROR, Problem(f"Something went wrong here: {type(error).__name__}.")
        return HTTPStatus.ACCEPTED if isinstance(answer, ModelState) else HTTPStatus.OK, answer

    def _description(self, _: None) -> openapi.Schema:
        return openapi.OPENAPI

    def _state(self, asked: OfDecomposition) -> State:
        journal = self._journal(asked)
        themes = list(journal.current().values())
        return State(journal.name, themes, system_user(), self._tryout.status(), self._tryout.fields)

    def _history(self, asked: OfComponent) -> list[Theme]:
        return self._journal(asked).history(asked.component)

    def _give_theme(self, asked: NewTheme) -> Theme:
        return self._journal(asked, unchanged=True).add(asked.component, asked.theme, asked.note, asked.who)

    def _try(self, asked: Try) -> Tried | ModelState:
        journal = self._journal(asked, unchanged=True)
        wanted = set(self._tryout.fields)
        if wanted and [set(given) for given in asked.fields] != [wanted] * len(asked.texts):
            raise ApiError(HTTPStatus.BAD_REQUEST, f"fields should give {', '.join(sorted(wanted))} for each text.")
        if not self._tryout.is_ready():
            return self._tryout.status()
        try:
            return self._tryout.explain(journal.name, asked.texts, asked.fields)
        except UserError as error:  # a text too long for the model, most likely
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from error

    def _journal(self, asked: OfDecomposition, unchanged: bool = False) -> Themes:
        """The journal of the decomposition, and of the component, that is asked for."""
        journal = self._journals.get(asked.decomposition)
        if journal is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"There is no decomposition {asked.decomposition!r} here.")
        if unchanged and not journal.is_current():
            raise ApiError(
                HTTPStatus.CONFLICT,
                f"{journal.name} was replaced since this page was served. Start `npeff explore` again to see it.",
            )
        if isinstance(asked, OfComponent) and asked.component >= journal.components:
            raise ApiError(HTTPStatus.NOT_FOUND, f"There is no component {asked.component} in {journal.name}.")
        return journal


def _from_query(kind: type, query: str) -> Any:
    """A record from query parameters; each is to be given once, and others are left alone."""
    try:
        given = parse_qs(query, keep_blank_values=True, max_num_fields=16, errors="strict")
    except ValueError as error:  # bytes that are not UTF-8 are one too
        raise ValueError("The query cannot be read.") from error
    values: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(kind)):
        if len(given.get(name, [])) != 1:
            raise ValueError(f"Give {name} once.")
        values[name] = given[name][0]
    if re.fullmatch("[0-9]{1,9}", values.get("component", ""), re.ASCII):
        values["component"] = int(values["component"])
    return openapi.checked(kind, values)
