"""Options of this room's commands: the command line, the Python call and the replay file are made from them."""

import re
from dataclasses import field
from typing import ClassVar, Literal

import tyro

from npeff.models.config import ModelConfig, ModelOptions, SamplesConfig
from npeff.tasks.config import DataConfig
from npeff.utils import Record, UserError


class DirectionsConfig(Record):
    """How the expectation over answers is taken."""

    directions: str = "auto"
    """exact; spectral:K (K leading eigenpairs); spectral:0.95 (as many as keep that share); projection:K (the
    paper's random projections); sampling:K; or auto: exact up to 16 answers, else spectral:8."""
    max_rows: int = 64
    """Most rows that spectral by share may take."""
    rank: int | None = None
    """Reduce each example's rows to this many by SVD."""
    directions_seed: int = 0
    """Seed of projection and sampling."""

    least: ClassVar[dict[str, int]] = {"max_rows": 1, "rank": 1}

    def _check(self) -> None:
        parse_directions(self.directions)


SketchKind = Literal["blocks", "kron", "sparse", "dense"]


class SketchConfig(Record):
    """How gradients are projected."""

    sketch: SketchKind = "blocks"
    """blocks: fast and for any model. kron: the default of earlier versions, slower. sparse: the paper's. dense: plus
    and minus one, for a small dimension."""
    dim: int = 16384
    """Length p of a projected gradient."""
    copies: int = 1
    """blocks and kron only: independent copies that are added; more are more accurate, and slower."""
    side: int | None = None
    """blocks and kron only: rows of the two small matrices, by default twice the root of the dimension."""
    sketch_seed: int = 0
    """Seed of the projection. Runs can be compared only under the same one."""

    least: ClassVar[dict[str, int]] = {"dim": 1, "copies": 1}

    def _check(self) -> None:
        if self.side is not None and self.side**2 < self.dim:
            raise UserError(f"A --side of {self.side} is too small: its square must be at least --dim {self.dim}.")
        if self.sketch == "blocks" and self.side is not None and self.side % 8:
            raise UserError(f"The sketch blocks needs a --side that 8 divides, not {self.side}.")
        if self.sketch == "sparse" and self.dim % 32:
            raise UserError(f"The sparse sketch needs a --dim that 32 divides, not {self.dim}.")


_RULE = re.compile(r"\s*(loss|entropy)\s*([<>])\s*(\d+\.?\d*|\.\d+)\s*")


class PositionsConfig(Record):
    """Which positions of running documents to ask at, for tasks such as corpus."""

    chunk: int = 600
    """Documents are cut at white space into chunks of so many characters at most; a context begins with its chunk."""
    every: int = 8
    """Ask at every so many-th token of a chunk."""
    per_chunk: int | None = None
    """Ask at so many tokens of each chunk instead, drawn at random."""
    rule: str | None = None
    """Ask only where it holds of the model's loss and entropy in nats: "loss < 0.1", or "loss > 4, entropy < 1"."""

    least: ClassVar[dict[str, int]] = {"chunk": 1, "every": 1, "per_chunk": 1}

    def _check(self) -> None:
        self.bounds()

    def bounds(self) -> list[tuple[str, str, float]]:
        """What the rule says.

        Returns:
            For each of its parts loss or entropy, < or >, and a number.

        Raises:
            UserError: It says nothing that is known.
        """
        parts = [_RULE.fullmatch(part) for part in self.rule.split(",")] if self.rule is not None else []
        if not all(parts):
            raise UserError(f'--rule {self.rule!r} is not understood; write "loss < 0.1", or "loss > 4, entropy < 1".')
        return [(part[1], part[2], float(part[3])) for part in parts if part]


class CollectConfig(Record):
    """Collect per-example Fishers of a model on a task into a run directory. Run it again to continue."""

    common: ClassVar[tuple[str, ...]] = (
        *("task", "data", "text_column", "label_column", "limit", "chat", "model", "adapter", "dtype", "device"),
        *("batch_tokens", "dry_run"),
    )
    removed: ClassVar[dict[str, str]] = {"padding": "results never depended on the side of the padding."}
    least: ClassVar[dict[str, int]] = {"shard_examples": 1, "batch_tokens": 1}

    run: tyro.conf.Positional[str]
    """Directory of the run; made if it is not there, continued if it is."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    directions: DirectionsConfig = field(default_factory=DirectionsConfig)
    sketch: SketchConfig = field(default_factory=SketchConfig)
    positions: PositionsConfig = field(default_factory=PositionsConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    fisher: bool = True
    """Keep the rows of the per-example Fishers (NPEFF)."""
    gradient: bool = True
    """Keep the gradient of the predicted answer (G-NPEFF, gradient clustering, SVD of gradients)."""
    activation: bool = True
    """Keep the last token's residual activation (sparse autoencoder, SVD of activations)."""
    storage: Literal["float16", "float32"] = "float16"
    """Precision of stored rows; they are scaled to unit norm, so half precision loses nothing that matters."""
    shard_examples: int = 256
    """Examples per shard: what a broken run can lose at most."""
    batch_tokens: int = 1024
    """Tokens per batch, padding included; more need more memory."""
    share_prompt: bool = True
    """Suffix answers only: run the prompt once for all suffixes, as a token tree."""
    dry_run: bool = False
    """Only measure a few batches and print the time, disk and memory that the run would take."""

    def _check(self) -> None:
        if not (self.fisher or self.gradient or self.activation):
            raise UserError("Nothing to collect: switch on at least one of --fisher, --gradient, --activation.")

    @property
    def collected(self) -> list[str]:
        """Names of the kinds of rows that are kept."""
        return [name for name in ("fisher", "gradient", "activation") if getattr(self, name)]


class CheckedData(DataConfig):
    """Which examples to use."""

    # given as an argument, and by --examples: an option of the same name would be taken and then ignored
    task: tyro.conf.Suppress[tyro.conf.Fixed[str]] = "reviews"
    limit: tyro.conf.Suppress[tyro.conf.Fixed[int | None]] = None


class CheckConfig(Record):
    """Show what a model is asked and says; compare captured rows with plain autograd, with and without batching."""

    common: ClassVar[tuple[str, ...]] = (
        *("examples", "asked", "data", "text_column", "label_column", "chat", "adapter", "dtype", "device", "exclude"),
    )

    model: tyro.conf.Positional[str]
    """Model, as --model of `npeff collect`."""
    task: tyro.conf.Positional[str] = "reviews"
    """Task, as --task of `npeff collect`."""
    examples: int = 3
    """How many examples to compare with autograd."""
    data: CheckedData = field(default_factory=CheckedData)
    options: ModelOptions = field(default_factory=ModelOptions)
    directions: DirectionsConfig = field(default_factory=DirectionsConfig)
    sketch: SketchConfig = field(default_factory=SketchConfig)
    asked: int = 64
    """How many examples to ask, to see which answers the model gives."""

    least: ClassVar[dict[str, int]] = {"examples": 1, "asked": 1}


def parse_directions(text: str) -> tuple[str, float]:
    """What the option --directions says.

    Args:
        text: The option's value, such as spectral:8.

    Returns:
        Kind and amount: the number of rows, or the share to keep where it is below 1; 0 where there is none.

    Raises:
        UserError: It says nothing that is known.
    """
    match = re.fullmatch(r"(auto|exact)|(spectral|projection|sampling):(\d+|0?\.\d+)", text)
    amount = float(match[3] or 0) if match else 0
    if match and (match[1] or amount >= 1 or (match[2] == "spectral" and amount > 0)):
        return match[1] or match[2], amount
    known = "auto, exact, spectral:8, spectral:0.95, projection:64, sampling:64"
    raise UserError(f"Unknown directions {text!r}. Use {known}.")
