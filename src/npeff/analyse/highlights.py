"""Which components to show first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from npeff.analyse.records import ComponentAnalysis

_OVERLAP = 0.25


def highlights(components: Sequence[ComponentAnalysis], count: int = 5) -> list[ComponentAnalysis]:
    """The components to show first: LnP-tuned before label-tuned before others, then by purity of labels, then energy.

    So that the list shows different things, a component is passed over if it shares more than a quarter of its top
    examples with one chosen before, or if half of the list is about its most frequent label already.

    Args:
        components: Those of an analysis.
        count: How many to choose at most.

    Returns:
        The chosen ones, first to show first.
    """
    eligible = [component for component in components if component.prediction_tuned is not None]
    eligible.sort(
        key=lambda component: (
            -bool(component.lnp_tuned),
            -bool(component.label_tuned),
            -(component.label_purity or component.prediction_purity or 0),
            -component.energy,
        )
    )
    chosen: list[ComponentAnalysis] = []
    about: Counter[str] = Counter()
    for component in eligible:
        first = component.orderings[0]
        top, label = set(first.top), next(iter(first.labels or first.predictions), "")
        twin = any(len(top & set(other.orderings[0].top)) > _OVERLAP * len(top) for other in chosen)
        if not twin and about[label] < (count + 1) // 2 and len(chosen) < count:
            chosen.append(component)
            about[label] += 1
    return chosen
