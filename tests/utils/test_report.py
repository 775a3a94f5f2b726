"""Tables as Markdown, CSV and LaTeX, by hand and with hostile texts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from npeff.utils.report import Column, Emphasis, Table, as_literal, as_markdown, write_report

TABLE = Table(
    "Components tuned, in %",
    [
        Column("method"),
        Column("lnp", ".1f", title="LnP"),
        Column("chance", ".2g", only="csv"),
        Column("words", title="in words", only="text"),
        Column("left out"),
    ],
    [
        ["G-NPEFF", Emphasis(3.84), 0.00012, "50% | $5", 3],
        ["GC", Emphasis(0.5, "underlined"), None, "[x] → \\", 0],
        ["SVD", None, 0.5, "not **bold**", None],
    ],
)

MARKDOWN = r"""| method | LnP | in words | left out |
| --- | ---: | --- | ---: |
| G-NPEFF | **3.8** | 50% \| \$5 | 3 |
| GC | <u>0.5</u> | \[x\] → \\ | 0 |
| SVD | | not \*\*bold\*\* | |"""

LATEX = r"""% Components tuned, in %
\begin{tabular}{lrlr}
\toprule
method & LnP & in words & left out \\
\midrule
G-NPEFF & \textbf{3.8} & 50\% | \$5 & 3 \\
GC & \underline{0.5} & {[}x{]} $\to$ \textbackslash{} & 0 \\
SVD &  & not **bold** &  \\
\bottomrule
\end{tabular}
"""


def test_by_hand(tmp_path: Path) -> None:
    assert TABLE.markdown() == MARKDOWN
    assert TABLE.latex() == LATEX
    write_report(tmp_path / "a.b", ["# Title\n", TABLE, "", "The end.\n"], csv=TABLE)
    text = f"# Title\n\nComponents tuned, in %\n\n{MARKDOWN}\n\nThe end.\n"
    assert (tmp_path / "a.b.md").read_text() == text == as_markdown(["# Title", TABLE, "The end."])
    assert (tmp_path / "a.b.tex").read_text() == LATEX
    rows = list(csv.reader((tmp_path / "a.b.csv").read_text().splitlines()))
    assert rows[0] == ["method", "lnp", "chance", "left out"]
    assert rows[1:] == [["G-NPEFF", "3.84", "0.00012", "3"], ["GC", "0.5", "", "0"], ["SVD", "", "0.5", ""]]


def test_flags_and_empty_tables(tmp_path: Path) -> None:
    table = Table("", [Column("tuned")], [[True], [False]])
    assert table.markdown().splitlines()[2:] == ["| yes |", "| no |"]
    table.write_csv(tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text().split() == ["tuned", "1", "0"]
    assert Table("", [Column("n")]).markdown() == "| n |\n| --- |"


@pytest.mark.parametrize(
    "text",
    ["a|b", "\\", "\\|", "**", "** x **", "<u>", "`", "%", "}{", "a & b", "\\input{x}", "^~#$_", "a\nb", "\x1b["],
)
def test_no_text_escapes_from_its_cell(text: str) -> None:
    table = Table("x", [Column("t"), Column("n")], [[text, 1]])
    assert len(table.markdown().splitlines()) == 3
    (row,) = table.latex().splitlines()[5:-2]
    assert row.endswith(r" & 1 \\")
    plain = row.removesuffix(r" & 1 \\").replace("{[}", "[").replace("{]}", "]")
    for command, character in {
        r"\textbackslash{}": "\\",
        r"\textasciitilde{}": "~",
        r"\textasciicircum{}": "^",
        r"\textless{}": "<",
        r"\textgreater{}": ">",
    }.items():
        plain = plain.replace(command, f"\0{character}")
    for character in "&%$#_{}":
        plain = plain.replace(f"\\{character}", f"\0{character}")
    first, *others = plain.split("\0")
    assert not set(first + "".join(part[1:] for part in others)) & set("\\&%$#_{}~^")
    assert plain.replace("\0", "") == "".join(char if char.isprintable() else " " for char in text)


@pytest.mark.parametrize("text", ["http://x.org/a_b", "@someone", "a&amp;b", "<b>", "[a](b)", "![a](b)", "1 < 2 & $3$"])
def test_a_literal_text_reads_as_it_is_and_links_to_nothing(text: str) -> None:
    html = MarkdownIt("gfm-like", {"linkify": False}).render(f"x {as_literal(text)}")
    shown = html.removeprefix("<p>x ").removesuffix("</p>\n")
    assert "<" not in shown
    assert shown.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") == text
    assert "://" not in as_literal(text)
    assert "@" not in as_literal(text)
