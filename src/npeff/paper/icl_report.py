"""The table of `npeff icl` in the layout of the paper: Markdown, CSV, figures and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npeff.utils.files import write_csv, write_json
from npeff.utils.report import BLUE, RED, draw_figure, plain_axes
from npeff.utils.tables import write_tables

MEASURES = {"accuracy": "Accuracy", "similarity_0": "Similarity 0-shot", "similarity_k": "Similarity ICL"}


def write(directory: Path, found: dict[str, Any]) -> None:
    """Write table.csv, .md, .png, .svg and, last, .json."""
    names = ("title", "name", "components", "left_out", "undecided", *MEASURES)
    write_csv(directory / "table.csv", [names, *([row[name] for name in names] for row in found["rows"])])
    write_tables(directory / "table", markdown(found))
    draw_figure(directory / "table", _draw, found)
    write_json(directory / "table.json", found)


def markdown(found: dict[str, Any]) -> str:
    """Percentages, a column per decomposition; the highest of a row is bold."""
    rows, shots = found["rows"], found["options"]["shots"]
    lines = [
        f"{found['task']}, {found['model']}, {found['examples']} examples: accuracy {100 * found['accuracy_0']:.1f}% "
        f"0-shot, {100 * found['accuracy_k']:.1f}% {shots}-shot (best of {found['options']['sets']} contexts); the two "
        f"agree on {100 * found['similarity_0_k']:.1f}%.",
        "",
        f"| | {' | '.join(row['title'] for row in rows)} |",
        "|---" * (len(rows) + 1) + "|",
    ]
    for measure, title in MEASURES.items():
        cells = [f"{100 * row[measure]:.1f}" for row in rows]
        best = max(row[measure] for row in rows)
        cells = [f"**{cell}**" if row[measure] == best else cell for cell, row in zip(cells, rows, strict=True)]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    silent = [f"{row['title']} {row['undecided']}" for row in rows if row["undecided"]]
    if silent:
        lines += ["", f"Examples without a vote, for which the first label was taken: {', '.join(silent)}."]
    return "\n".join(lines) + "\n"


def _draw(axes: Any, found: dict[str, Any]) -> None:
    """A group of bars per decomposition; lines at the accuracies of the model itself."""
    colours = {"accuracy": BLUE, "similarity_0": "#a7a7a7", "similarity_k": RED}
    for k, (measure, title) in enumerate(MEASURES.items()):
        places = [n + 0.27 * (k - 1) for n in range(len(found["rows"]))]
        values = [100 * row[measure] for row in found["rows"]]
        axes.bar(places, values, width=0.25, color=colours[measure], label=title)
    for name, style in (("accuracy_0", ":"), ("accuracy_k", "--")):
        shots = 0 if name == "accuracy_0" else found["options"]["shots"]
        axes.axhline(100 * found[name], color="black", linewidth=0.8, linestyle=style, label=f"{shots}-shot accuracy")
    axes.set_xticks(range(len(found["rows"])), [row["title"] for row in found["rows"]])
    axes.set(ylim=(0, 100), ylabel="% of examples", title=f"{found['task']}, {found['examples']} examples")
    axes.legend(frameon=False, fontsize=7)
    plain_axes(axes)
