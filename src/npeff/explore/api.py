"""What the page asks of its server: themes and notes, and texts to try. JSON in, JSON out.

Requests and answers are records, with limits in the words of JSON schema. What a request does is a method of `Api`.
"""

import dataclasses
import json
import re
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import field
from http import HTTPStatus
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs

from npeff.explain.records import WeighedText
from npeff.explore.themes import LONGEST, Theme, Themes, system_user
from npeff.explore.tryout import ModelState, Tried, Tryout
from npeff.store.run import Run
from npeff.utils import Record, UserError, from_dict, shorten

PREFIX = "/api/"
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


# --- records ------------------------------------------------------------------------------------------------------


Name = Annotated[str, {"minLength": 1, "maxLength": 255}]
Component = Annotated[int, {"minimum": 0, "maximum": 999_999_999}]
Text = Annotated[str, {"minLength": 1, "maxLength": 20_000}]


class OfDecomposition(Record):
    """A question about a decomposition."""

    decomposition: Name
    """Its name."""


class OfComponent(OfDecomposition):
    """A question about a component."""

    component: Component
    """Its number."""


class NewTheme(OfComponent):
    """A theme to write down; an empty theme and note remove what is there."""

    theme: Annotated[str, {"minLength": 0, "maxLength": LONGEST["theme"]}]
    """What the component's examples have in common."""
    note: Annotated[str, {"minLength": 0, "maxLength": LONGEST["note"]}] = ""
    """Anything else."""
    who: Annotated[str, {"minLength": 0, "maxLength": LONGEST["who"]}] = ""
    """Who says so; the user of the server's system if empty."""


class Try(OfDecomposition):
    """Texts to be explained."""

    texts: Annotated[list[Text], {"minItems": 1, "maxItems": 8}]
    """The texts."""
    fields: Annotated[list[dict[str, str]], {"minItems": 0, "maxItems": 8}] = field(default_factory=list)
    """For each text the other columns that the run's prompt names, if it names any."""


class Weigh(Try):
    """Texts whose words are to be weighed."""

    components: Annotated[list[Component], {"minItems": 1, "maxItems": 16}] = field(default_factory=list)
    """The components."""


class State(Record):
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


class Problem(Record):
    """Why a request was not answered."""

    error: str
    """One or two sentences."""


# --- answering -----------------------------------------------------------------------------------------------------


class ApiError(Exception):
    """A request that cannot be answered: the status that says so, and a sentence."""


class Api:
    """Answers requests about the decompositions `names` of a run, as they are now."""

    def __init__(self, run: Run, names: list[str], device: str | None = None) -> None:
        self._journals = {name: Themes(run, name) for name in names}
        self._tryout = Tryout(run, device)

    def answer(self, path: str, query: str, body: bytes | None) -> tuple[HTTPStatus, Any]:
        """Answer a request to `path`, never with a traceback.

        Args:
            path: One that has methods.
            query: What stands behind the question mark.
            body: What was posted; None for a GET.

        Returns:
            Status, and a record or a list of records.
        """
        act = GET[path] if body is None else POST[path]
        kind = typing.get_type_hints(act)["asked"]
        try:
            answer = act(self, _from_query(kind, query) if body is None else _from_body(kind, body))
        except ApiError as error:
            status, message = error.args
            return status, Problem(message)
        except UserError as error:  # the journal is damaged, the disk is full, ...
            return HTTPStatus.INTERNAL_SERVER_ERROR, Problem(str(error))
        except Exception as error:
            print(f"npeff explore: {type(error).__name__}: {error}", file=sys.stderr)
            return HTTPStatus.INTERNAL_SERVER_ERROR, Problem(f"Something went wrong here: {type(error).__name__}.")
        return HTTPStatus.ACCEPTED if isinstance(answer, ModelState) else HTTPStatus.OK, answer

    def state(self, asked: OfDecomposition) -> State:
        """Themes and notes of a decomposition, and whether the model is loaded."""
        journal, tryout = self._journal(asked), self._tryout
        return State(journal.name, list(journal.current().values()), system_user(), tryout.status, tryout.fields)

    def history(self, asked: OfComponent) -> list[Theme]:
        """Everything that was said about a component, the oldest first."""
        return self._journal(asked).history(asked.component)

    def give_theme(self, asked: NewTheme) -> Theme:
        """Give a component a theme; an empty theme and note remove what is there."""
        return self._journal(asked, unchanged=True).add(asked.component, asked.theme, asked.note, asked.who)

    def try_texts(self, asked: Try) -> Tried | ModelState:
        """Coefficients and answers of texts. The first call only begins to load the model."""
        return self._ask_model(asked, self._tryout.explain)

    def weigh_words(self, asked: Weigh) -> list[WeighedText] | ModelState:
        """What each word of texts carries of components. The first call only begins to load the model."""
        return self._ask_model(asked, self._tryout.weigh, asked.components)

    def _ask_model(self, asked: Try, act: Callable[..., Answer], components: Sequence[int] = ()) -> Answer | ModelState:
        """What the model says about texts; how far it is loaded, as long as it is not.

        Args:
            asked: The texts.
            act: What to do with the decomposition's name, the texts, their other columns and the components, if any.
            components: Numbers of components.

        Returns:
            What `act` gives.

        Raises:
            ApiError: Other columns of the prompt are missing, there is no such component, or the model cannot take
                these texts.
        """
        journal, wanted = self._journal(asked, unchanged=True), set(self._tryout.fields)
        if wanted and [set(given) for given in asked.fields] != [wanted] * len(asked.texts):
            raise ApiError(HTTPStatus.BAD_REQUEST, f"fields should give {', '.join(sorted(wanted))} for each text.")
        if max(components, default=0) >= journal.components:
            raise ApiError(HTTPStatus.NOT_FOUND, f"There is no component {max(components)} in {journal.name}.")
        if not self._tryout.is_ready():
            return self._tryout.status
        try:
            return act(journal.name, asked.texts, asked.fields, *([components] if components else []))
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


Act = Callable[[Api, Any], Any]
GET: dict[str, Act] = {"/api/state": Api.state, "/api/history": Api.history}
POST: dict[str, Act] = {"/api/theme": Api.give_theme, "/api/try": Api.try_texts, "/api/words": Api.weigh_words}


def methods(path: str) -> list[str]:
    """Methods that a path takes; none if there is no such path."""
    return ["POST"] if path in POST else ["GET", "HEAD"] if path in GET else []


# --- reading a request --------------------------------------------------------------------------------------------


def _from_body(kind: type[Asked], body: bytes) -> Asked:
    """The record in the body of a request.

    Args:
        kind: Class of the record.
        body: A JSON object in UTF-8.

    Returns:
        The record, within its limits.

    Raises:
        ApiError: The body holds no such record.
    """
    try:
        values = json.loads(body.decode("utf-8"), parse_float=_number)
        json.dumps(values, ensure_ascii=False).encode("utf-8")  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, "The request is not valid JSON in UTF-8.") from error
    return _checked(kind, values)


def _checked(kind: type[Asked], values: dict[str, Any]) -> Asked:
    """A record from JSON values.

    Args:
        kind: Class of the record.
        values: Its fields.

    Returns:
        The record, within its limits.

    Raises:
        ApiError: A field is missing, unknown, of the wrong type or out of its limits.
    """
    try:
        record = from_dict(kind, values)
    except (UserError, RecursionError) as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, shorten(str(error), 300)) from error
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        _check_limits(hint, getattr(record, name), name)
    return record


def _check_limits(hint: Any, value: Any, name: str) -> None:
    if typing.get_origin(hint) is Annotated:
        least, most = hint.__metadata__[0].values()
        size, what = (value, "") if isinstance(value, int) else (len(value), "the length of ")
        if not least <= size <= most:
            message = f"{what}{name} should be from {least} to {most}, not {size}.".capitalize()
            raise ApiError(HTTPStatus.BAD_REQUEST, message)
        hint = hint.__origin__
    for item in value if isinstance(value, list) else ():
        _check_limits(typing.get_args(hint)[0], item, name)


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value  # JSON has one kind of number: 3.0 is a component, too


def _from_query(kind: type, query: str) -> Any:
    """A record from query parameters; each is to be given once, and others are left alone."""
    try:
        given = parse_qs(query, keep_blank_values=True, max_num_fields=16, errors="strict")
    except ValueError as error:  # bytes that are not UTF-8 are one too
        raise ApiError(HTTPStatus.BAD_REQUEST, "The query cannot be read.") from error
    values: dict[str, str | int] = {}
    for name in (each.name for each in dataclasses.fields(kind)):
        if len(given.get(name, [])) != 1:
            raise ApiError(HTTPStatus.BAD_REQUEST, f"Give {name} once.")
        values[name] = given[name][0]
    if re.fullmatch("[0-9]{1,9}", str(values.get("component")), re.ASCII):
        values["component"] = int(values["component"])
    return _checked(kind, values)
