"""Adapters (PEFT): merged into the weights of their model, or kept beside them."""

import contextlib
import fnmatch
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from npeff.models.config import ModelConfig
from npeff.tasks.hub import hub_or_cache
from npeff.utils import UserError, first_line, read_object, replace

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def find_adapter(config: ModelConfig) -> ModelConfig:
    """Find the adapter that is meant, and its model if only the adapter was given.

    Args:
        config: Which model, or an adapter in its place.

    Returns:
        The same with the base model as the model, and a local directory as the adapter, if there is any.

    Raises:
        UserError: There is no such adapter, or it does not say which model it belongs to.
    """
    if config.adapter is not None:
        return replace(config, adapter=str(_local(config.adapter)))
    path = Path(config.model)
    folder = path if path.is_dir() else _of_the_hub(config)
    if folder is None or not (folder / CONFIG).is_file():
        return config
    base = read_object(folder / CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        hint = f"Give the model with --model and this with --adapter {config.model}."
        raise UserError(f"{config.model} is an adapter that does not say of which model. {hint}")
    print(f"{config.model} is an adapter of {base}.")
    # nobody has said that the code of that model can be trusted
    return replace(config, model=base, adapter=str(folder), revision=None, trust_remote_code=False)


def _of_the_hub(config: ModelConfig) -> Path | None:
    """Files of an adapter on the Hub, if the model's name is that of one."""
    from transformers.utils.peft_utils import find_adapter_config_file

    if not _is_hub_id(config.model):
        return None
    with hub_or_cache():
        try:
            file = find_adapter_config_file(config.model, revision=config.revision)
        except Exception:  # loading the model will tell what is wrong
            return None
    return _local(config.model, config.revision) if file else None


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith(".gguf")


def _local(name: str, revision: str | None = None) -> Path:
    """The directory of an adapter; one of the Hub is fetched."""
    from huggingface_hub import snapshot_download

    folder = Path(name)
    if not folder.exists() and _is_hub_id(name):
        with hub_or_cache():
            try:
                folder = Path(snapshot_download(name, revision=revision, allow_patterns=[CONFIG, WEIGHTS]))
            except Exception as error:  # there are many ways not to get a file
                raise UserError(f"{name} is no directory, nor an adapter on the Hub: {first_line(error)}.") from error
    missing = next((file for file in (CONFIG, WEIGHTS) if not (folder / file).is_file()), None)
    if missing:
        raise UserError(f"{name} is no adapter that npeff can read: there is no {missing} in it.")
    return folder


def apply_adapter(network: nn.Module, config: ModelConfig) -> nn.Module:
    """Put an adapter on a model.

    Args:
        network: The adapter's model.
        config: Its name, the adapter, and the patterns of parameters that are wanted.

    Returns:
        The model with the adapter merged into its weights; or, if a pattern names nothing but the adapter's own
        matrices, with these beside them.
    """
    own = {name for name, _ in network.named_parameters()}
    with warnings.catch_warnings(), _misfit(config):
        warnings.simplefilter("ignore")  # what they say is checked
        model, trained_on = _load(network, str(config.adapter))
        if trained_on and Path(trained_on).name != Path(config.model).name:  # it may still be the same one
            print(f"Adapter {config.adapter} was made for {trained_on}, and fits {config.model} by its shapes.")
        beside = model.get_base_model()
        added = [name for name, _ in beside.named_parameters() if name not in own and ".base_layer." not in name]
        for pattern in config.include:
            if fnmatch.filter(added, pattern) and not fnmatch.filter(own, pattern):
                return beside
        return model.merge_and_unload(safe_merge=True)


def _load(network: nn.Module, adapter: str) -> tuple[Any, str | None]:
    """A model with an adapter beside its weights, and the name of the model that the adapter was made for."""
    from peft import PeftConfig, PeftModel

    settings: Any = PeftConfig.from_pretrained(adapter)
    if settings.is_prompt_learning:
        raise ValueError(f"it adds tokens ({settings.peft_type.value}), and changes no weights")
    settings.inference_mode = True
    model: Any = PeftModel(network, settings, autocast_adapter_dtype=False)
    report = model.load_adapter(adapter, "default", torch_device="cpu", autocast_adapter_dtype=False)
    left = [*report.missing_keys, *report.unexpected_keys]
    if left:
        raise ValueError(f"{len(left)} matrices have no counterpart, as {left[0]}")
    return model, settings.base_model_name_or_path


@contextlib.contextmanager
def _misfit(config: ModelConfig) -> Iterator[None]:
    """A message for each of the many ways in which an adapter does not fit."""
    try:
        yield
    except ImportError as error:
        raise UserError("An adapter needs the package peft: pip install 'npeff[adapters]'") from error
    except Exception as error:
        hint = "Is it one of another model? Give the one that it was trained on with --model."
        raise UserError(
            f"Adapter {config.adapter} cannot be used with {config.model}: {first_line(error)}. {hint}"
        ) from error
