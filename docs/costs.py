"""The table of costs in the README: python docs/costs.py prints it.

Formulas as in scaling.md. Three numbers are measured: the cost of a collection in training steps, and the time and the
tokens of an example of the demo on two cores. Everything else follows from the shapes of the models.
"""

from __future__ import annotations

from dataclasses import dataclass

from npeff.collect.estimate import amount, duration

STEPS = 1.02
"""Cost of a collection with one row ÷ a training step; performance.md."""
DEMO_SECONDS, DEMO_TOKENS = 0.15, 19.3
"""Time of one example of the demo on two cores, and its tokens on average."""

EXAMPLES, TOKENS, DIM, SIDE = 1000, 50, 16384, 256


@dataclass(frozen=True)
class Shape:
    """A Llama-like model: q, k, v and o of every block, and the three matrices of its MLP."""

    name: str
    width: int
    blocks: int
    key_width: int
    inner: int
    parameters: float
    """All of them, with embeddings."""
    weight_bytes: int = 4

    @property
    def layers(self) -> list[tuple[int, int]]:
        """Rows and columns of the selected matrices of a block."""
        d, k, f = self.width, self.key_width, self.inner
        return [(d, d), (d, d), (k, d), (k, d), (f, d), (f, d), (d, f)]

    @property
    def selected(self) -> int:
        return self.blocks * sum(rows * columns for rows, columns in self.layers)

    @property
    def sketch_bytes(self) -> int:
        return 4 * SIDE * self.blocks * sum(rows + columns for rows, columns in self.layers)


MODELS = (
    Shape("SmolLM2-135M", 576, 30, 192, 1536, 135e6),
    Shape("SmolLM2-360M", 960, 32, 320, 2560, 362e6),
    Shape("SmolLM2-1.7B", 2048, 24, 2048, 8192, 1.71e9),
    Shape("Llama-2-7B", 4096, 32, 4096, 11008, 6.74e9, weight_bytes=2),
)


def speed() -> float:
    """Operations per second of two cores, from the demo."""
    return STEPS * 6 * MODELS[0].selected * DEMO_TOKENS / DEMO_SECONDS


def table() -> str:
    """The table, as Markdown."""
    lines = ["| model | work | two CPU cores | disk | memory |", "|---|---|---|---|---|"]
    for model in MODELS:
        work = EXAMPLES * STEPS * 6 * model.selected * TOKENS
        disk = EXAMPLES * (2 * DIM * 2 + 4 * model.width)
        memory = model.parameters * model.weight_bytes + model.sketch_bytes
        cells = [model.name, f"{work / 1e15:.2g} PFLOP", duration(work / speed()), amount(disk)]
        lines.append(f"| {' | '.join(cells)} | {amount(memory)} + batch |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
