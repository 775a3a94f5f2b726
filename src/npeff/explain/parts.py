"""Which attention heads and neurons a direction in parameter space is made of, and whether these carry its effect.

A head is its rows of the query matrix and its columns of the output matrix; its rows of keys and values too, or, where
several heads share them, these are a part of their own (`kv`). A neuron is its rows of the matrices that read the
residual stream and its column of the one that writes to it. No two parts share a parameter, so energies add up to 1.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import numpy as np
import torch

from npeff.collect.session import Prepared
from npeff.models.select import CapturedModule
from npeff.perturb.evaluate import Divergence
from npeff.perturb.lift import Parameters
from npeff.perturb.weights import forward_ad, moving
from npeff.perturb.where import split_name
from npeff.utils import Array, Record, rounded

LEADING = 12
"""Heads and neurons that are listed."""
CURVE = (0.01, 0.03, 0.1, 0.3)
"""Shares of the parts at which sufficiency and necessity are measured."""
RANDOM_AT = 0.1
"""Share at which random parts of the same energy are measured, too."""
TEXT_PARTS = 8
"""Equal parts that texts of different lengths are divided into for the mean of traces."""
_READERS = ("gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1", "dense_h_to_4h")
_WRITERS = ("down_proj", "fc2", "dense_4h_to_h", "mlp.c_proj")
_OUTPUTS = ("o_proj", "out_proj", "attn.c_proj", "attention.dense", "self_attn.dense")
Key = tuple[int, str, int]
"""Layer, kind (head, kv, neuron, other) and number of a part."""


class Part(Record):
    """A head, or a neuron, of a direction."""

    layer: int
    """Its block."""
    kind: str
    """`head`, `kv` (keys and values that several heads share), `neuron` or `other`."""
    number: int
    """Which of its layer."""
    share: float
    """Its part of the direction's squared length."""
    null: float
    """The same in directions of random groups of examples, on average."""


class CausalPoint(Record):
    """What some of the parts do to held-out examples, by derivatives: ÷ what the whole direction does."""

    parts: float
    """Share of the heads and neurons, those with most energy."""
    energy: float
    """Their part of the squared length."""
    kept: float
    """Effect of these alone: sufficiency."""
    left: float
    """Effect of all others: what is not necessary."""
    random: float | None = None
    """Effect of random parts of the same energy alone."""


class Parts(Record):
    """Where a direction is."""

    heads: list[list[float]]
    """Share of each head, [layers][heads]; shared keys and values are divided equally among their heads."""
    layers: list[float]
    """Share of each layer."""
    leading_heads: list[Part]
    """Heads with most energy."""
    leading_neurons: list[Part]
    """Neurons with most energy."""
    neurons: float
    """Share of all neurons together."""
    curve: list[CausalPoint] = field(default_factory=list)
    """What the leading parts keep of the effect on held-out examples."""


class Anatomy:
    """The heads and neurons of a model, as rows and columns of its matrices."""

    def __init__(self, network: Any, modules: Sequence[CapturedModule]) -> None:
        settings = network.config.get_text_config()
        self.heads = int(settings.num_attention_heads)
        self.kv = int(getattr(settings, "num_key_value_heads", None) or self.heads)
        self.size = int(getattr(settings, "head_dim", None) or settings.hidden_size // self.heads)
        self.owners: dict[str, tuple[int, Array]] = {}
        """Module → the axis of its matrix that parts divide, and the place in `keys` of the part at each index."""
        places: dict[Key, int] = {}
        for module in modules:
            layer, kind = split_name(module.name)
            axis, owners = self._divide(kind, *module.shape, module.bias)
            numbers = [places.setdefault((layer, *owner), len(places)) for owner in owners]
            self.owners[module.name] = (axis, np.array(numbers))
        self.keys = list(places)
        """All parts."""

    def _divide(self, kind: str, rows: int, columns: int, bias: bool) -> tuple[int, list[tuple[str, int]]]:
        """The axis that is divided, and the part (kind, number) of each row or column."""
        heads = [("head", i // self.size) for i in range(self.heads * self.size)]
        kv = [("head" if self.kv == self.heads else "kv", i // self.size) for i in range(self.kv * self.size)]
        name = kind.rpartition(".")[2]
        by_rows = {"q_proj": heads, "k_proj": kv, "v_proj": kv, "qkv_proj": heads + kv + kv, "c_attn": heads + kv + kv}
        by_rows["query_key_value"] = [("head", i // (3 * self.size)) for i in range(3 * len(heads))]
        if name in by_rows and len(by_rows[name]) == rows:
            return 0, by_rows[name]
        if name in _READERS:
            neurons = rows // 2 if name == "gate_up_proj" else rows
            return 0, [("neuron", i % neurons) for i in range(rows)]
        written = [("neuron", i) for i in range(columns - bias)] if kind.endswith(_WRITERS) else heads
        if kind.endswith((*_WRITERS, *_OUTPUTS)) and len(written) == columns - bias:
            return 1, [*written, *[("other", 0)] * bias]  # a bias that is written to the stream belongs to nobody
        return 0, [("other", 0)] * rows

    def energies(self, vector: Parameters) -> Array:
        """Share of each part in the squared length of a vector.

        Args:
            vector: Module name → [d_out, columns].

        Returns:
            [parts], in the order of `keys`.
        """
        total = np.zeros(len(self.keys))
        for name, matrix in vector.items():
            axis, owners = self.owners[name]
            np.add.at(total, owners, matrix.square().sum(1 - axis).double().cpu().numpy())
        return total / (total.sum() or 1.0)

    def only(self, vector: Parameters, parts: Array) -> Parameters:
        """A vector with nothing but some of its parts.

        Args:
            vector: Module name → [d_out, columns].
            parts: Which parts, bool [parts].

        Returns:
            The vector, zero elsewhere.
        """
        kept = {}
        for name, matrix in vector.items():
            axis, owners = self.owners[name]
            mask = torch.from_numpy(parts[owners]).to(matrix)
            kept[name] = matrix * (mask[:, None] if axis == 0 else mask[None])
        return kept


def describe(anatomy: Anatomy, vector: Parameters, nulls: Array) -> Parts:
    """The heads and neurons of a vector.

    Args:
        anatomy: The model's parts.
        vector: Module name → [d_out, columns].
        nulls: Mean energies of directions of random groups, [parts].

    Returns:
        Shares; without the causal check.
    """
    energies = anatomy.energies(vector)
    layers = sorted({layer for layer, _, _ in anatomy.keys if layer >= 0})
    heat = np.zeros((len(layers), anatomy.heads))
    by_layer, neurons = np.zeros(len(layers)), 0.0
    group = anatomy.heads // anatomy.kv
    for (layer, kind, number), energy in zip(anatomy.keys, energies, strict=True):
        if layer >= 0:
            by_layer[layers.index(layer)] += energy
        neurons += energy * (kind == "neuron")
        if kind == "head":
            heat[layers.index(layer), number] += energy
        elif kind == "kv":
            heat[layers.index(layer), number * group : (number + 1) * group] += energy / group

    def leading(kinds: tuple[str, ...]) -> list[Part]:
        own = [n for n, key in enumerate(anatomy.keys) if key[1] in kinds]
        best = sorted(own, key=lambda n: -energies[n])[:LEADING]
        return [Part(*anatomy.keys[n], *rounded([float(energies[n]), float(nulls[n])])) for n in best]

    return Parts(
        heads=[rounded(row) for row in heat.tolist()],
        layers=rounded(by_layer.tolist()),
        leading_heads=leading(("head", "kv")),
        leading_neurons=leading(("neuron",)),
        neurons=float(neurons),
    )


def check_parts(
    prepared: Prepared, anatomy: Anatomy, vector: Parameters, prompts: Sequence[Sequence[int]], seed: int = 0
) -> list[CausalPoint]:
    """What the leading parts of a direction keep of its effect on examples.

    Logits' derivatives are linear in the direction, so that what is left without some parts needs no pass of its own.

    Args:
        prepared: The model.
        anatomy: Its parts.
        vector: Module name → [d_out, columns].
        prompts: Token ids of held-out examples.
        seed: Of the random parts.

    Returns:
        A point for each share of `CURVE`.
    """
    energies = anatomy.energies(vector)
    movable = np.array([kind != "other" for _, kind, _ in anatomy.keys])
    order = [n for n in np.argsort(-energies, kind="stable") if movable[n]]
    answers = Divergence(prepared, prompts, range(len(prompts)))
    whole = answers.derivatives(vector)
    size = answers.effects(whole).mean() or 1.0

    def measured(chosen: Sequence[int]) -> tuple[float, float, float]:
        mask = np.isin(np.arange(len(energies)), chosen)
        dz = answers.derivatives(anatomy.only(vector, mask))
        kept, left = (float(answers.effects(part).mean() / size) for part in (dz, whole - dz))
        return float(energies[mask].sum()), kept, left

    points = []
    for share in CURVE:
        energy, kept, left = measured(order[: max(1, round(share * len(order)))])
        random = None
        if share == RANDOM_AT:
            shuffled = np.random.default_rng(seed).permutation(order)
            enough = int(np.searchsorted(energies[shuffled].cumsum(), energy)) + 1
            random = measured(shuffled[:enough].tolist())[1]
        points.append(CausalPoint(share, energy, kept, left, random))
    return points


def trace(
    prepared: Prepared, blocks: Sequence[torch.nn.Module], prompt: Sequence[int], vector: Parameters
) -> list[list[float]]:
    """How a change along a vector travels: size of the derivative of the residual stream, ÷ the stream's own size.

    Args:
        prepared: The model.
        blocks: Its blocks.
        prompt: Token ids of an example.
        vector: Module name → [d_out, columns].

    Returns:
        [layers][positions].
    """
    sizes: list[list[float]] = []
    with moving(prepared.selection.modules, vector) as derivative:

        def keep(_: Any, __: Any, output: Any) -> None:
            stream = (output[0] if isinstance(output, tuple) else output)[:1]
            own = forward_ad.unpack_dual(stream).primal[0].norm(dim=1)
            sizes.append((derivative(stream)[0].norm(dim=1) / own.clamp_min(1e-30)).tolist())

        hooks = [block.register_forward_hook(keep) for block in blocks]
        try:
            prepared.collector.answer_model.logits([list(prompt)])
        finally:
            for hook in hooks:
                hook.remove()
    return [rounded(row[: len(prompt)]) for row in sizes]


def mean_trace(
    prompts: Sequence[Sequence[int]], sizes: Sequence[Sequence[Sequence[float]]], tokens: Sequence[str]
) -> tuple[list[str], list[list[float]]]:
    """The mean of what `trace` finds of several examples.

    Args:
        prompts: Token ids of the examples.
        sizes: What `trace` found of each, [layers][positions].
        tokens: The first example's tokens.

    Returns:
        What stands at each place (the tokens that all examples begin with, equal parts of the rest, the tokens that all
        end with) and mean sizes, [layers][places].
    """
    before, after = (_shared([prompt[::way] for prompt in prompts]) for way in (1, -1))
    after = min(after, min(map(len, prompts)) - before)
    parts = TEXT_PARTS if max(map(len, prompts)) > before + after else 0
    columns = []
    for prompt, own in zip(prompts, sizes, strict=True):
        end = len(prompt) - after
        rest = (before + (np.arange(parts) + 0.5) / TEXT_PARTS * (end - before)).astype(int).clip(max=len(prompt) - 1)
        columns.append(np.array(own)[:, [*range(before), *rest, *range(end, len(prompt))]])
    names = [*tokens[:before], *(f"text {n + 1}/{parts}" for n in range(parts)), *tokens[len(prompts[0]) - after :]]
    return names, [rounded(row) for row in np.mean(columns, 0).tolist()]


def _shared(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with."""
    same = [len(set(each)) == 1 for each in zip(*prompts, strict=False)]
    return [*same, False].index(False)


def attention_from_end(network: Any, prompt: Sequence[int], heads: Sequence[Part]) -> list[list[float]]:
    """What the last token of a prompt looks at in some heads.

    Args:
        network: The model.
        prompt: Token ids.
        heads: Heads; of shared keys and values, the first head that uses them counts.

    Returns:
        Weights that add up to 1, [heads][positions]; empty for a model that does not tell.
    """
    settings = network.config.get_text_config()
    heads_in_all = settings.num_attention_heads
    group = heads_in_all // (getattr(settings, "num_key_value_heads", None) or heads_in_all)
    before = network.config._attn_implementation
    try:
        network.set_attn_implementation("eager")
        with torch.inference_mode():
            ids = torch.tensor([list(prompt)], device=next(network.parameters()).device)
            maps = network(input_ids=ids, output_attentions=True, use_cache=False).attentions
        return [
            rounded(maps[head.layer][0, head.number * (group if head.kind == "kv" else 1), -1].tolist())
            for head in heads
        ]
    except (AttributeError, ValueError, TypeError, IndexError):
        return []
    finally:
        network.set_attn_implementation(before)
