"""`npeff study detect`: are held-out users of a component told from others by its theme, or by its words?

The scores that delphi has for explanations of features: *detection* (which of these texts fit the description?) and
*intruder* (all of these texts but one fit: which one does not?). The same texts are asked about with what another
component is called, which should tell nothing about them.
"""

import re
from collections.abc import Iterator
from statistics import fmean, stdev

import numpy as np

from npeff.analyse.ranking import top_examples
from npeff.decompose.base import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.explain.records import Judged, Told, explanations_folder, key_of
from npeff.explain.run import name_all
from npeff.explore.themes import Themes
from npeff.perturb.lift import check_component
from npeff.store.layout import choose_decomposition
from npeff.store.run import Run
from npeff.study.config import DetectConfig
from npeff.study.judge import ask_all, file_name, first_line, listed
from npeff.utils import Record, UserError, shorten, write_record
from npeff.utils.report import Column, Table, Value, write_report

USERS = 4
"""Users of the component in a question; of the others as many to detect them among, or one as the intruder."""
NUMBERS = 1000
"""More than the questions about a component: the number of a question is this times the component's, and its place."""
LONGEST = 700
"""Characters of a text that are shown."""
_DETECT = "Which of the following texts have it? Answer in one line with their numbers, or with none,"
_INTRUDER = "Which one of the following texts does not have it? All others do. Answer with its number"
_REPLY = re.compile(r"none\.?|\d+(?:(?:,| and|, and)? *\d+)*\.?", re.IGNORECASE)


class Question(Record):
    """A question about a description of a component."""

    by: str
    """As in `Told`."""
    description: str
    """What the component is called."""
    texts: list[str]
    """Held-out texts."""
    users: list[bool]
    """Which of them use the component."""

    @property
    def is_detection(self) -> bool:
        """Whether users are to be detected; else there is one intruder."""
        return self.users.count(False) > 1

    @property
    def message(self) -> str:
        asked = f"{_DETECT if self.is_detection else _INTRUDER} and write nothing else."
        return f"Some texts have this in common: {self.description}.\n{asked}\n\n{listed(self.texts)}"

    def score(self, reply: str) -> float | None:
        """How right a reply is.

        Args:
            reply: What the judge said.

        Returns:
            Balanced accuracy, or whether the intruder was found; None if it is not in the form that was asked for.
        """
        line, every = first_line(reply), set(range(1, len(self.texts) + 1))
        named = {int(number) for number in re.findall(r"\d+", line)}
        if not _REPLY.fullmatch(line) or not named <= every or not (self.is_detection or len(named) == 1):
            return None
        users = {number for number, user in zip(sorted(every), self.users, strict=True) if user}
        others = every - users
        if not self.is_detection:
            return float(named == others)
        return (len(named & users) / len(users) + len(others - named) / len(others)) / 2


def detect(config: DetectConfig) -> list[Judged] | None:
    """Ask a judge about components; scores are in RUN/explanations/NAME/judged.

    Args:
        config: Options of the command.

    Returns:
        One for each component; None after a dry run.

    Raises:
        UserError: There are too few held-out examples that use a component, or do not.
    """
    run = Run.open(config.run)
    name = choose_decomposition(run.path, config.decomposition)
    decomposition = open_decomposition(run, name)
    for j in config.component:
        check_component(decomposition, j)
    questions = dict(_questions(config, run, name, decomposition))
    if not questions:
        hint = "`npeff decompose --holdout 0.3` holds examples out."
        raise UserError(f"No component has a name and {USERS} held-out examples that use it, and that do not. {hint}")
    requests = {number: [{"role": "user", "content": each.message}] for number, each in questions.items()}
    folder = explanations_folder(run, name) / "judged"
    said = ask_all(config, folder / f".{file_name(config.model)}", requests)
    if said is None:
        return None
    judged = []
    for j in sorted({number // NUMBERS for number in questions}):
        scored = [(each, each.score(said[number])) for number, each in questions.items() if number // NUMBERS == j]
        judged.append(Judged(j, key_of(run, name), config.model, _told(scored)))
        write_record(folder / f"{j:05d}.json", judged[-1], sealed=True)
    table = as_table(config.model, judged)
    print(write_report(folder / file_name(config.model), [f"# Components of {name}", table], csv=table))
    return judged


def _questions(
    config: DetectConfig, run: Run, name: str, decomposition: Decomposition
) -> Iterator[tuple[int, Question]]:
    """Number → question, of all components that have enough held-out examples."""
    words = {each.component: ", ".join(each.words) for each in name_all(run, name, decomposition).names if each.words}
    themes = {j: each.theme for j, each in Themes(run, name).current().items() if each.theme}
    texts = np.array([shorten(text, LONGEST) for text in run.table["text"].to_pylist()], dtype=object)
    held_out = np.isin(np.arange(len(texts)), decomposition.notes.held_out) & run.usable
    scores = decomposition.scores()
    for j in config.component or range(scores.shape[1]):
        own, generator = scores[:, j].numpy(), np.random.default_rng([config.seed, j])
        users = list(dict.fromkeys(texts[top_examples(own, held_out)]))
        others = list(dict.fromkeys(generator.permutation(texts[held_out & (own <= 0)])))
        sheets = list(_sheets(users, [text for text in others if text not in users], config.questions, generator))
        called = {by: every[j] for by, every in (("theme", themes), ("words", words)) if j in every}
        if strangers := [every[i] for every in (themes, words) if j in every for i in every if i != j]:
            called["other"] = strangers[int(generator.integers(len(strangers)))]
        every = [Question(by, description, *sheet) for by, description in called.items() for sheet in sheets]
        yield from ((j * NUMBERS + place, question) for place, question in enumerate(every))


def _sheets(
    users: list[str], others: list[str], most: int, generator: np.random.Generator
) -> Iterator[tuple[list[str], list[bool]]]:
    """Texts of questions, and which of them use the component: no text twice in questions of a kind."""
    for start in range(0, USERS * min(most, len(users) // USERS, len(others) // USERS), USERS):
        for count in (USERS, 1):
            shown = [*users[start : start + USERS], *others[start : start + count]]
            order = generator.permutation(len(shown)).tolist()
            yield [shown[k] for k in order], [k < USERS for k in order]


def _told(scored: list[tuple[Question, float | None]]) -> list[Told]:
    """Mean scores of each description."""
    found: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for question, score in scored:
        kinds = found.setdefault((question.by, question.description), ([], []))
        if score is not None:
            kinds[not question.is_detection].append(score)
    return [Told(*key, *(fmean(own) if own else None for own in kinds)) for key, kinds in found.items()]


def as_table(model: str, judged: list[Judged]) -> Table:
    """Mean scores over components.

    Args:
        model: The judge.
        judged: Scores of components.

    Returns:
        A line for each kind of description; errors are standard errors over components.
    """
    named = [f"{kind}{what}" for kind in ("detection", "intruder") for what in ("", " error")]
    caption = f"Held-out users told by {model}: detection 0.5 and intruder 0.2 by chance"
    table = Table(caption, [Column("by"), Column("components"), *(Column(name, ".3f") for name in named)])
    for by in dict.fromkeys(told.by for each in judged for told in each.told):
        own = [told for each in judged for told in each.told if told.by == by]
        line: list[Value] = [by, len(own)]
        for values in ([told.detection for told in own], [told.intruder for told in own]):
            known = [value for value in values if value is not None]
            enough = len(known) > 1
            line += [fmean(known), stdev(known) / len(known) ** 0.5] if enough else [*known, *[None] * (2 - len(known))]
        table.rows.append(line)
    return table
