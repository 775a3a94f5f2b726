"""npeff: which heuristics does this language model use on my task?"""

from typing import TYPE_CHECKING, Any

from npeff.utils.version import __version__

if TYPE_CHECKING:
    from npeff.api import (
        Analysis,
        Component,
        Decomposition,
        Estimate,
        Example,
        Probe,
        Run,
        UserError,
        analyse_run,
        collect_run,
        compare_run,
        decompose_run,
        lift_component,
        list_components,
        list_examples,
        open_decomposition,
        open_run,
        perturb_components,
        probe_texts,
        pull_run,
        push_run,
        stability_run,
        sweep_run,
        top_examples,
    )

__all__ = [
    "Analysis",
    "Component",
    "Decomposition",
    "Estimate",
    "Example",
    "Probe",
    "Run",
    "UserError",
    "__version__",
    "analyse_run",
    "collect_run",
    "compare_run",
    "decompose_run",
    "lift_component",
    "list_components",
    "list_examples",
    "open_decomposition",
    "open_run",
    "perturb_components",
    "probe_texts",
    "pull_run",
    "push_run",
    "stability_run",
    "sweep_run",
    "top_examples",
]

if not TYPE_CHECKING:  # a type checker should see the names above and no others

    def __getattr__(name: str) -> Any:
        """Load npeff.api at the first use of one of its names: `import npeff` itself takes no time."""
        if name not in __all__:
            raise AttributeError(f"module 'npeff' has no attribute {name!r}")
        from npeff import api

        return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
