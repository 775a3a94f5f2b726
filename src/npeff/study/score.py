"""`npeff study score`: what filled forms say: shares of groups with a theme, agreement of annotators, themes."""

from collections.abc import Sequence
from dataclasses import astuple, fields
from itertools import combinations, product
from pathlib import Path

from npeff.analyse.tunings import wilson
from npeff.explore.themes import LONGEST, Themes
from npeff.store.run import Run
from npeff.study.config import ScoreConfig
from npeff.study.kit import Key, Sheet, read_key, read_kit, read_sheets
from npeff.utils import Record, UserError, __version__, shorten, write_record
from npeff.utils.report import Cell, Column, Table, as_markdown, write_report

RESULTS = "results"


class Share(Record):
    """So many of so many."""

    count: int
    """How many."""
    of: int
    """Of how many."""
    share: float | None
    """count / of; None of no groups."""
    low: float | None
    """Lower end of the 95% interval over groups; None where it would mean nothing."""
    high: float | None
    """Upper end."""


class Annotator(Record):
    """What one annotator saw, or all people together."""

    who: str | None
    """Name; None for all people together."""
    title: str
    """Name as tables show it."""
    source: str | None
    """`person` or `judge:MODEL`; None for all people together."""
    automatic: bool
    """Whether it is a language model."""
    answered: int
    """Groups with an answer."""
    unanswered: int
    """Groups without one."""
    themed: dict[str, Share]
    """Name of a decomposition → groups of its components with yes or maybe."""
    false_positives: Share
    """Random groups with yes or maybe."""


class Pair(Record):
    """Agreement of two annotators on the groups that both have answered; maybe counts as yes."""

    first: str
    """Title of one annotator."""
    second: str
    """Title of the other."""
    automatic: bool
    """Whether one of them is a language model."""
    agreement: Share
    """Groups with the same answer."""
    kappa: float | None
    """Cohen's kappa; None where it is not defined."""


class Statement(Record):
    """What one annotator said about a component."""

    who: str
    """Title of the annotator."""
    automatic: bool
    """Whether it is a language model."""
    theme: str
    """yes, maybe or no."""
    words: str
    """The theme in a few words."""


class Component(Record):
    """What annotators said about a component of the study."""

    decomposition: str
    """Name of its decomposition."""
    component: int
    """The component."""
    group: int
    """Number of the group that shows it."""
    answers: list[Statement]
    """In the order of the annotators."""


class Scores(Record):
    """Everything that is reported about a study."""

    kit: str
    """Id of the kit."""
    annotators: list[Annotator]
    """In the order of the forms; last all people together, if they are several."""
    pairs: list[Pair]
    """Every two annotators."""
    themes: list[Component]
    """By decomposition and component."""
    npeff: str = __version__
    """Version that scored."""


def score(config: ScoreConfig) -> Path:
    """Score filled forms.

    Args:
        config: Options of the command.

    Returns:
        Directory of the results.
    """
    kit = read_kit(config.kit)
    key = read_key(config.kit, kit)
    sheets = read_sheets(config.forms, kit)
    directory = Path(config.kit) / RESULTS
    print(f"{write_scores(directory, count(sheets, key))}\nin {directory}")
    if config.save_themes is not None:
        print(f"{save_themes(config.save_themes, key, sheets)} new themes in {config.save_themes}")
    return directory


def save_themes(path: str, key: Key, sheets: Sequence[Sheet]) -> int:
    """Give the themes that annotators named to the components of a run.

    Args:
        path: Run directory.
        key: Key of the kit.
        sheets: The answers of each annotator.

    Returns:
        How many themes are new.

    Raises:
        UserError: The kit was made of another run, or of a decomposition that was replaced since.
    """
    run, saved = Run.open(path), 0
    if run.fingerprint != key.run:
        raise UserError(f"The kit was made of another run than {path}.")
    journals = {name: Themes(run, name) for name in key.decompositions}
    for name, journal in journals.items():
        if journal.fingerprint != key.decompositions[name]:
            raise UserError(f"Decomposition {name!r} of {path} was replaced since the kit was made: other components.")
    for entry, sheet in product(key.groups, sheets):
        answer = sheet.answers.get(entry.number)
        if answer is None or entry.decomposition is None or entry.component is None:
            continue
        journal, theme = journals[entry.decomposition], shorten(answer.words, LONGEST["theme"])
        known = {(old.theme, old.who, old.source) for old in journal.history(entry.component)}
        if theme and (theme, sheet.who, sheet.source) not in known:
            note = f"{answer.theme}, in a blind study of groups of {len(entry.examples)}"
            journal.add(entry.component, theme, note, sheet.who, sheet.source)
            saved += 1
    return saved


# --- counting ---------------------------------------------------------------------------------------------------------


def count(sheets: Sequence[Sheet], key: Key) -> Scores:
    """Add up what was answered.

    Args:
        sheets: The answers of each annotator.
        key: Which group is which.

    Returns:
        All scores.
    """
    people = [sheet for sheet in sheets if not sheet.automatic]
    annotators = [_annotator([sheet], key, sheet.who, sheet.title, sheet.source) for sheet in sheets]
    if len(people) > 1:
        annotators.append(_annotator(people, key, None, "people together", None))
    themes = [
        Component(entry.decomposition, entry.component, entry.number, _statements(sheets, entry.number))
        for entry in key.groups
        if entry.decomposition is not None and entry.component is not None
    ]
    themes.sort(key=lambda each: (each.decomposition, each.component))
    return Scores(key.kit, annotators, [_pair(*two) for two in combinations(sheets, 2)], themes)


def _annotator(sheets: list[Sheet], key: Key, who: str | None, title: str, source: str | None) -> Annotator:
    """Answers of one annotator, or of several as one, the way the paper's table has them.

    Those of several are without an interval: answers to the same group are not independent of each other.
    """

    def themed(decomposition: str | None) -> Share:
        numbers = [entry.number for entry in key.groups if entry.decomposition == decomposition]
        answers = [sheet.answers[number] for sheet in sheets for number in numbers if number in sheet.answers]
        return share([answer.themed for answer in answers], interval=len(sheets) == 1)

    answered = sum(len(sheet.answers) for sheet in sheets)
    unanswered = len(sheets) * len(key.groups) - answered
    by_name = {name: themed(name) for name in key.decompositions}
    return Annotator(who, title, source, sheets[0].automatic, answered, unanswered, by_name, themed(None))


def share(values: list[bool], interval: bool = True) -> Share:
    """How many of `values` are true, with the 95% interval unless it would mean nothing."""
    true, of = sum(values), len(values)
    low, high = wilson(true, of) if interval and of else (None, None)
    return Share(true, of, true / of if of else None, low, high)


def kappa(first: Sequence[bool], second: Sequence[bool]) -> float | None:
    """Cohen's kappa: agreement beyond what the annotators' shares of yes give by chance.

    Args:
        first: Whether one annotator saw a theme in each group.
        second: The same of the other, for the same groups.

    Returns:
        None where it is not defined: no groups, or both gave one and the same answer to all of them.
    """
    n = len(first)
    if not n:
        return None
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    p, q = sum(first) / n, sum(second) / n
    chance = p * q + (1 - p) * (1 - q)
    return None if chance == 1 else (observed - chance) / (1 - chance)


def _pair(first: Sheet, second: Sheet) -> Pair:
    both = sorted(first.answers.keys() & second.answers.keys())
    a, b = ([sheet.answers[number].themed for number in both] for sheet in (first, second))
    agreement = share([x == y for x, y in zip(a, b, strict=True)])
    return Pair(first.title, second.title, first.automatic or second.automatic, agreement, kappa(a, b))


def _statements(sheets: Sequence[Sheet], group: int) -> list[Statement]:
    """What each annotator that has answered a group said about it."""
    answers = [(sheet, sheet.answers[group]) for sheet in sheets if group in sheet.answers]
    return [Statement(sheet.title, sheet.automatic, answer.theme, answer.words) for sheet, answer in answers]


# --- files ------------------------------------------------------------------------------------------------------------


def write_scores(directory: Path, scores: Scores) -> str:
    """Write what annotators saw, how far they agree, and what they said; the JSON comes last.

    Args:
        directory: Where to.
        scores: Result of the study.

    Returns:
        The tables in Markdown, without the one of themes.
    """
    heads = [Column("annotator"), Column("source", only="csv"), Column("decomposition"), *_share_columns("themed")]
    annotators = Table(
        "Themed: component groups with yes or maybe. False positives: random groups with yes or maybe. The intervals "
        "are 95% over groups.",
        [*heads, *_share_columns("false_positives"), Column("not_answered", title="not answered")],
        [
            (each.title, each.source, name, *_cells(themed), *_cells(each.false_positives), each.unanswered)
            for each in scores.annotators
            for name, themed in each.themed.items()
        ],
    )
    pairs = Table(
        "Agreement: the same answer to a group, counting maybe as yes. Cohen's kappa is empty where it is not defined.",
        [Column("first"), Column("second"), *_share_columns("agreement"), Column("kappa", ".2f", "Cohen's kappa")],
        [(pair.first, pair.second, *_cells(pair.agreement), pair.kappa) for pair in scores.pairs],
    )
    themes = Table(
        "What was said about each component.",
        [*map(Column, ("decomposition", "component", "group", "annotator", "automatic", "answer", "theme"))],
        [
            (each.decomposition, each.component, each.group, *astuple(said))
            for each in scores.themes
            for said in each.answers
        ],
    )
    pairs.write_csv(directory / "agreement.csv")
    themes.write_csv(directory / "themes.csv")
    blocks: list[str | Table] = ["# Do annotators see a theme?", annotators, *([pairs] if pairs.rows else [])]
    write_report(directory / "scores", [*blocks, "## Themes", themes], csv=annotators)
    write_record(directory / "scores.json", scores)
    return as_markdown(blocks)


def _share_columns(name: str) -> list[Column]:
    shown = [Column(name.replace("_", " "), only="text"), Column("interval", only="text")]
    return shown + [Column(f"{name}_{entry.name}", only="csv") for entry in fields(Share)]


def _cells(share: Share) -> list[Cell]:
    text = "" if share.share is None else f"{share.share:.0%} ({share.count} of {share.of})"
    interval = "" if share.low is None else f"{share.low:.0%} to {share.high:.0%}"
    return [text, interval, *astuple(share)]
