"""What the files of a run must hold: checked when they are opened, because they may come from elsewhere."""

from dataclasses import field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from npeff.tasks.task import Before
from npeff.utils import Record, UserError, from_dict
from npeff.utils.files import SEAL, parse_json, without_seal

FORMAT = 1
"""Version of the layout of a run directory."""

KINDS = ("fisher", "gradient", "activation")
"""What a decomposition may ask for; switches of `npeff collect` have the same names."""


class AskedChat(Record):
    """How a model was asked through its chat template."""

    rendered: str
    """All that the model saw, up to where its answer begins; the columns of the prompt in braces."""
    turns: list[dict[str, str]] = field(default_factory=list)
    """Turns before the question: system prompt and few-shot examples."""


class AskedTask(Record):
    """What the model was asked. Rows that come from elsewhere have no task: then all of it is empty."""

    name: str = ""
    """Name of the task."""
    prompt: str = ""
    """Template of the prompt."""
    answers: str = ""
    """tokens, suffixes, vocabulary, classes or generated."""
    labels: list[str] = field(default_factory=list)
    """Answer texts; none for the vocabulary and generated answers."""
    prefix: str = ""
    """Few-shot examples before every prompt."""
    chat: AskedChat | None = None
    """How the chat template was used; null for a plain prompt."""
    pair: str | None = None
    """Template of the second text; null where there is none."""
    places: list[dict[str, Any]] | None = None
    """What is asked one after another behind the prompt; null where it is one question."""

    @property
    def before(self) -> Before:
        """What stands before every question."""
        return self.prefix, tuple(self.chat.turns) if self.chat else ()


class ShardRecord(Record):
    """What was noted when a shard was written (shards/00000.json while a collection is under way)."""

    file: str
    """Where it is, from the run directory."""
    start: int
    """Number of its first example."""
    stop: int
    """Number behind its last example."""
    sha256: str
    """Hash of the file."""


class Manifest(Record):
    """What a run is (manifest.json)."""

    identity: dict[str, Any]
    """What makes two collections the same: config without what only changes speed, prompt and labels, hash of the
    model."""
    shard_examples: int
    """Examples per shard."""
    npeff: str = ""
    """Version that wrote it."""
    command: str = ""
    """What `npeff replay` runs again."""
    config: dict[str, Any] = field(default_factory=dict)
    """Options of that command."""
    task: AskedTask = field(default_factory=AskedTask)
    """What the model was asked."""
    format: int = FORMAT
    """Version of the layout of a run directory; a newer one is refused."""
    complete: bool = False
    """Whether the collection has ended."""
    parameters: int = 0
    """Number of selected parameters."""
    model_parameters: int = 0
    """Number of all parameters of the model; 0 if it was not noted."""
    excluded_parameters: int = 0
    """How many of those that are selected by default --include and --exclude leave out."""
    dropped: list[str] = field(default_factory=list)
    """What was left out of the data, in words."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of Python and of packages."""
    examples: int = 0
    """Number of examples m."""
    inputs_sha256: str = ""
    """Hash of texts and labels."""
    shards: list[ShardRecord] = field(default_factory=list)
    """All shards of a finished run."""
    examples_sha256: str = ""
    """Hash of the example table of a finished run."""

    @property
    def collected(self) -> list[str]:
        """Kinds of rows that were kept: fisher, gradient, activation."""
        return list(self.identity["collected"])

    @property
    def model(self) -> str:
        """Name of the model, and of the adapter on it if there is one."""
        names = self.config["model"]["model"], self.config["model"].get("adapter")
        return " with ".join(str(name) for name in names if name)


def read_manifest(path: Path) -> Manifest:
    """What a run directory's manifest says.

    Args:
        path: The file.

    Returns:
        The manifest.

    Raises:
        UserError: It is damaged, or was written by a newer npeff.
    """
    values = parse_json(path)
    version = values.get("format") if isinstance(values, dict) else None
    if type(version) is not int or version < 1:
        raise UserError(f"{path} is damaged: its format is missing or wrong.")
    if version > FORMAT:
        raise UserError(
            f"{path.parent} was written by a newer npeff ({values.get('npeff')}, format {version}); this one reads "
            f"formats up to {FORMAT}. Upgrade npeff. (If it was not, {path.name} is damaged.)"
        )
    try:
        manifest = from_dict(Manifest, without_seal(path, values))
        _check_manifest(manifest)
    except UserError as error:
        if SEAL in str(error):  # says itself what to do
            raise
        raise UserError(f"{path} is damaged: {error} Restore it from a copy.") from error
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    """Raise UserError for entries that this module has not written."""
    for name in ("examples", "shard_examples"):
        if not 0 < getattr(manifest, name) < 2**40:
            raise UserError(f"{name} is wrong.")
    collected = manifest.identity.get("collected")
    if not isinstance(collected, list) or not all(kind in KINDS for kind in collected):
        raise UserError("identity.collected is missing or wrong.")
    if manifest.complete and len(manifest.shards) != -(-manifest.examples // manifest.shard_examples):
        raise UserError("examples, shard_examples or the number of shards is wrong.")


_TEXT, _NUMBER = (pa.types.is_string, pa.types.is_large_string), (pa.types.is_integer,)
_COLUMNS = {"text": _TEXT, "label": _NUMBER, "prediction": _NUMBER, "prediction_text": _TEXT, "rank": _NUMBER}
_COLUMNS["set_aside"] = (*_TEXT, pa.types.is_null)
"""Columns of a finished run's example table that everything else builds on."""


def wrong_columns(table: pa.Table, manifest: Manifest) -> str | None:
    """Why a table is not the one that a manifest describes.

    Args:
        table: An example table.
        manifest: Of the run that it should be of.

    Returns:
        What is wrong with it, or None.
    """
    if len(table) != manifest.examples:
        return f"it has {len(table)} examples, the manifest says {manifest.examples}"
    if not manifest.complete:
        return None
    # rows that come from elsewhere, without a task, have neither labels nor predictions
    required = _COLUMNS if manifest.task.prompt else ("text", "rank", "set_aside")
    answers = len(manifest.task.labels) or 2**31
    for name, kinds in _COLUMNS.items():
        count = table.column_names.count(name)
        if count == 0 and name not in required:
            continue
        if count != 1 or not any(kind(table.schema.field(name).type) for kind in kinds):
            return f"its column {name!r} is missing or of the wrong type"
        if table[name].null_count and name not in ("label", "set_aside"):
            return f"its column {name!r} has gaps"
        limit = answers if name in ("label", "prediction") else 2**31
        if pa.types.is_integer(table[name].type) and table[name].null_count < len(table):
            extremes = pc.min_max(table[name]).as_py()
            if not 0 <= extremes["min"] <= extremes["max"] < limit:
                return f"its column {name!r} has numbers that cannot be"
    return None
