"""The Hugging Face Hub, asked once and briefly; where it cannot be reached, what its client has in its cache."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from npeff.utils import UserError, first_line

SECONDS = 5.0
"""How long the Hub has to answer at all."""


@contextlib.contextmanager
def hub_or_cache() -> Iterator[str]:
    """Inside the block, the client of the Hub uses only its cache if the Hub cannot be reached.

    By itself the client asks six times for every file, with longer and longer pauses.

    Yields:
        Why the Hub cannot be reached; empty if it can.
    """
    reason = _unreachable()
    with contextlib.ExitStack() as restore:
        for name in ("huggingface_hub.constants", "datasets.config"):
            if reason and name in sys.modules:
                settings = vars(sys.modules[name])
                restore.callback(settings.update, HF_HUB_OFFLINE=settings["HF_HUB_OFFLINE"])
                settings["HF_HUB_OFFLINE"] = True
        yield reason


def _unreachable() -> str:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # the client has changed the library that it uses, and with it the errors
        return first_line(error)
    return ""


def load_hub_data(name: str, config: str | None, split: str | None) -> Any:
    """A data set of the Hub, through the package `datasets`.

    Args:
        name: Id on the Hub.
        config: Configuration, if it has several.
        split: Split, in the syntax of `datasets`.

    Returns:
        A `datasets.Dataset`.

    Raises:
        UserError: The package is missing, the data set cannot be loaded, or it has several splits and none was chosen.
    """
    try:
        import datasets
    except ImportError as error:
        needed = "reading it from the Hub needs the package datasets: pip install 'npeff[hub]'"
        raise UserError(f"{name!r} is not a local file, and {needed}.") from error
    with hub_or_cache() as unreachable:
        try:
            data = datasets.load_dataset(name, config, split=split)
        except Exception as error:  # anything from a proxy's refusal to a misspelt split; the Hub's own words tell best
            raise UserError(
                f"Cannot load {name!r}{f' ({config})' if config else ''} from the Hub: {first_line(error)}"
                f"{f' (the Hub cannot be reached: {unreachable})' if unreachable else ''}. "
                "Check the name, the configuration, the split and the network, or give a local file."
            ) from error
    if isinstance(data, dict):
        if len(data) != 1:
            raise UserError(f"{name!r} has the splits {', '.join(map(str, data))}; choose one with --split.")
        (data,) = data.values()
    return data
