"""Options of this room's commands: the command line, the Python call and the replay file are made from them."""

from typing import Annotated, ClassVar

import tyro

from npeff.utils import Record, UserError


class MakeConfig(Record):
    """Write forms for a blind study: do the top examples of components have a theme, and do random ones?

    The defaults are one of the five forms that the paper's annotators were given for a task; --forms 5 makes all.
    """

    run: tyro.conf.Positional[str]
    """Directory of the run."""
    out: tyro.conf.Positional[str]
    """Directory to write the kit to."""
    decomposition: tuple[str, ...] = ()
    """Decomposition to study; several are mixed in the same forms. Without it, the run's default."""
    groups: int = 20
    """Groups in a form."""
    forms: int = 1
    """Forms, each with other groups."""
    size: int = 5
    """Texts in a group: the top examples of a component, no text twice, or as many random ones."""
    random_share: float = 0.5
    """Share of the groups that are random texts."""
    seed: int = 0
    """Seed of all random choices."""
    about: str | None = None
    """What the texts are, in a sentence or two for the annotators; without it, what the task says."""

    common: ClassVar[tuple[str, ...]] = ("decomposition", "groups", "forms", "about")
    least: ClassVar[dict[str, int]] = {"groups": 2, "forms": 1, "size": 2, "seed": 0}
    removed: ClassVar[dict[str, str]] = {"font": "forms are web pages, which show every script."}
    removed |= dict.fromkeys(("sample_component", "sample_theme"), "the worked samples are the same for every kit.")

    def _check(self) -> None:
        if not 0 < self.random_groups < self.groups:
            raise UserError(f"--random-share {self.random_share} of {self.groups} groups makes none or all random.")
        if len(set(self.decomposition)) < len(self.decomposition):
            raise UserError("--decomposition names the same one twice.")
        if self.about is not None and not self.about.strip():
            raise UserError("--about is empty; leave it out or say what the texts are.")

    @property
    def random_groups(self) -> int:
        """Random groups in a form."""
        return round(self.groups * self.random_share)


class EndpointConfig(Record, kw_only=True):
    """A language model that is asked. Answers are kept, so a command that is stopped continues."""

    least: ClassVar[dict[str, int]] = {"max_tokens": 1, "retries": 0}

    endpoint: str
    """Address of an OpenAI-compatible server, such as http://localhost:8000/v1."""
    model: str
    """Name of the model there."""
    key_env: str | None = None
    """Environment variable that holds the API key; the key itself is never written or shown."""
    temperature: float | None = 0.0
    """Randomness of the answers; None leaves it to the server, as some models demand."""
    max_tokens: int = 1000
    """Longest answer, with what a model thinks before it."""
    timeout: float = 120.0
    """Seconds to wait for an answer."""
    retries: int = 5
    """How often a busy server is asked again for an answer: after a second, then each time after twice as long."""
    dry_run: bool = False
    """Only say how many requests and tokens it would take."""

    def _check(self) -> None:
        if not self.model.strip() or not self.timeout > 0:
            raise UserError("--model should name a model of the endpoint, and --timeout be above zero.")


class JudgeConfig(EndpointConfig):
    """Let a language model fill in a kit, one group at a time. Answers are kept, so a stopped judge continues."""

    kit: tyro.conf.Positional[str]
    """Directory of the kit."""
    save_themes: str | None = None
    """Run directory whose components get the themes, marked as automatic."""

    common: ClassVar[tuple[str, ...]] = ("endpoint", "model", "key_env", "dry_run")
    renamed: ClassVar[dict[str, str]] = {"save_labels": "save_themes"}
    removed: ClassVar[dict[str, str]] = {"wait": "the first retry comes after a second, unless the server says more."}


class DetectConfig(EndpointConfig):
    """Let a language model tell held-out users of components from others by theme or name, and score these by it."""

    run: tyro.conf.Positional[str]
    """Run directory."""
    decomposition: str | None = None
    """Name of the decomposition; the newest that `npeff decompose` has made if not given."""
    component: tuple[int, ...] = ()
    """Numbers of the components; all that have enough held-out examples if not given."""
    questions: int = 4
    """Questions of each kind about a description, each with texts of its own."""
    seed: int = 0
    """Seed of the texts that do not use a component, and of the order of all."""

    common: ClassVar[tuple[str, ...]] = ("endpoint", "model", "key_env", "component", "dry_run")
    least: ClassVar[dict[str, int]] = {**EndpointConfig.least, "questions": 1, "seed": 0}


class ScoreConfig(Record):
    """Count what annotators answered. Writes tables into KIT/results, which name components: wait until all are in."""

    kit: tyro.conf.Positional[str]
    """Directory of the kit, with its key."""
    forms: tyro.conf.Positional[tuple[str, ...]]
    """Filled forms: JSON (from the page or from a judge), or CSV with group, answer and theme."""
    save_themes: str | None = None
    """Run directory whose components get the themes."""

    renamed: ClassVar[dict[str, str]] = {"save_labels": "save_themes"}

    def _check(self) -> None:
        if not self.forms:
            raise UserError("Give the filled forms to score.")


StudyConfig = (
    Annotated[MakeConfig, tyro.conf.subcommand("make")]
    | Annotated[JudgeConfig, tyro.conf.subcommand("judge")]
    | Annotated[ScoreConfig, tyro.conf.subcommand("score")]
    | Annotated[DetectConfig, tyro.conf.subcommand("detect")]
)
