"""`npeff params`: which parameters of a model are selected."""

import re
from collections import defaultdict

from npeff.models.config import ParamsConfig
from npeff.models.load import load_model
from npeff.models.select import Selection, parameter_sizes, select_parameters
from npeff.utils import replace


def params(config: ParamsConfig) -> Selection:
    """Print which parameters are selected and which are left out; those of the same name in all layers in one line.

    Args:
        config: Model and patterns.

    Returns:
        The selection.
    """
    network = load_model(replace(config.options, model=config.model)).network
    selection = select_parameters(network, config.options.include, config.options.exclude)
    sizes = parameter_sizes(network)
    whole, unselected = sum(sizes.values()), set(selection.left_out)
    for title, left_out in (("Selected", False), ("Left out", True)):
        groups: dict[str, list[int]] = defaultdict(list)
        for name, size in sizes.items():
            if (name in unselected) is left_out:
                groups[re.sub(r"\d+", "*", name)].append(size)
        total = sum(map(sum, groups.values()))
        print(f"{title}: {total:,} parameters, {total / whole:.1%} of the model")
        for name, group in sorted(groups.items(), key=lambda item: -sum(item[1])):
            times = f" ({len(group)} tensors)" if len(group) > 1 else ""
            print(f"  {sum(group):>14,}  {sum(group) / whole:>6.1%}  {name}{times}")
    return selection
