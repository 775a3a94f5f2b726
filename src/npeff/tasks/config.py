"""Options of this room's commands: the command line, the Python call and the replay file are made from them."""

from typing import Annotated, ClassVar, Literal

import tyro

from npeff.utils import Record, UserError

BUILTIN: tuple[str, ...] = ("reviews", "judge", "sst2", "yat", "clinc150", "triviaqa", "corpus")

FIELD = "field:"
"""Columns of an example table that hold what the prompt names beside the text begin with this."""


class DataConfig(Record):
    """Which examples to use."""

    least: ClassVar[dict[str, int]] = {"limit": 1, "shuffle_seed": 0, "few_shot": 0, "few_shot_seed": 0}

    task: str = "reviews"
    """Built-in task (reviews, judge, sst2, yat, clinc150, triviaqa, corpus) or the path of a task file."""
    data: str | None = None
    """File (JSONL, CSV, TSV, Parquet; documents also as plain text) or Hub id, instead of the task's own data."""
    data_config: str | None = None
    """Configuration of a data set on the Hub."""
    split: str | None = None
    """Split, in the syntax of the datasets package; of a local file, the rows whose column `split` says so."""
    text_column: str | None = None
    """Column with the text, if it is not one of the task's."""
    label_column: str | None = None
    """Column with the label, if it is not one of the task's."""
    limit: int | None = None
    """Use at most so many examples."""
    shuffle_seed: int | None = None
    """Shuffle with this seed before the limit; without it the order of the data is kept."""
    unique: bool = True
    """Keep only the first of several examples with the same text."""
    on_bad_example: Literal["error", "drop"] = "error"
    """What to do with an empty text, an unknown label and the like: stop, or leave the example out and say so."""
    few_shot: int = 0
    """Put so many labelled examples, drawn at random, before every prompt; they are left out of the examples."""
    few_shot_seed: int = 0
    """Seed of that draw."""
    chat: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Ask with the model's chat template, also where the task does not say `chat: true`."""
    no_chat: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Ask with a plain prompt, also where the task says `chat: true`."""

    def _check(self) -> None:
        if self.chat and self.no_chat:
            raise UserError("--chat and --no-chat say the opposite of each other. Leave out one.")
