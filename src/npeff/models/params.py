"""`npeff params`: what a parameter selection selects."""

from __future__ import annotations

import re
from dataclasses import replace

from npeff.models.config import ParamsConfig
from npeff.models.load import load_model
from npeff.models.select import Selection, select_parameters


def params(config: ParamsConfig) -> Selection:
    """Print the selection as a table: equal names of all blocks together in a line."""
    model = load_model(replace(config.options, model=config.name))
    selection = select_parameters(model.network, config.options.include, config.options.exclude)
    sizes = {name: parameter.numel() for name, parameter in model.network.named_parameters()}
    whole = sum(sizes.values())
    groups: dict[str, list[int]] = {}
    left_out = set(selection.left_out)
    for title, names in (("selected", [n for n in sizes if n not in left_out]), ("left out", list(left_out))):
        groups.clear()
        for name in sorted(names):
            groups.setdefault(re.sub(r"\d+", "*", name), []).append(sizes[name])
        total = sum(sum(group) for group in groups.values())
        print(f"{title}: {total:,} parameters, {total / whole:.1%} of the model")
        for name, group in sorted(groups.items(), key=lambda item: -sum(item[1])):
            print(f"  {sum(group):>14,} {sum(group) / whole:>7.1%}  {len(group):>4} x {name}")
    return selection
