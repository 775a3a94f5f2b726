"""npeff: which heuristics does this language model use on my task?"""

import importlib
from typing import TYPE_CHECKING, Any

from npeff.utils.version import __version__ as __version__

if TYPE_CHECKING:  # a type checker should see the names of npeff.api and no others
    from npeff.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Load npeff.api at the first use of one of its names: `import npeff` itself takes no time."""
        if name == "__all__":
            return __dir__()
        if name.startswith("__") or name not in __dir__():  # Python asks modules for names of its own
            raise AttributeError(f"module 'npeff' has no attribute {name!r}")
        return getattr(importlib.import_module("npeff.api"), name)


def __dir__() -> list[str]:
    return sorted([*importlib.import_module("npeff.api").__all__, "__version__"])
