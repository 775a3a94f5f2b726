"""Markdown tables as LaTeX."""

from __future__ import annotations

from pathlib import Path

from npeff.analyse.report import as_literal
from npeff.utils.tables import latex, write_tables

MARKDOWN = r"""# Components tuned, in %

| method | LnP | by chance | ratio (paper) | text |
|---|---|---|---|---|
| G-NPEFF | **3.8** | 0.01% | 15.1 (16.5) | 50% \| \$5 & `a_b` |
| GC | <u>0.5</u> | 2e-05% | 1.94 ± 0.1 | [x] → \\ |
| SVD | | | - | not \*\*bold\*\* |

Mean over seeds

| n |
|:--|
| 1 |
"""

LATEX = r"""% Components tuned, in %
\begin{tabular}{lrrrl}
\toprule
method & LnP & by chance & ratio (paper) & text \\
\midrule
G-NPEFF & \textbf{3.8} & 0.01\% & 15.1 (16.5) & 50\% | \$5 \& \texttt{a\_b} \\
GC & \underline{0.5} & 2e-05\% & 1.94 $\pm$ 0.1 & {[}x{]} $\to$ \textbackslash{} \\
SVD &  &  & - & not **bold** \\
\bottomrule
\end{tabular}

% Mean over seeds
\begin{tabular}{r}
\toprule
n \\
\midrule
1 \\
\bottomrule
\end{tabular}
"""


def test_tables_by_hand(tmp_path: Path) -> None:
    assert latex(MARKDOWN) == LATEX
    assert latex("no table\n") == ""
    write_tables(tmp_path / "a.b", MARKDOWN)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.b.md": MARKDOWN, "a.b.tex": LATEX}


def test_no_text_escapes_from_its_cell() -> None:
    for text in ("a|b", "\\", "\\|", "**", "** x **", "<u>", "`", "%", "}{", "a & b", "\\input{x}", "^~#$_"):
        (row,) = latex(f"| t | n |\n|---|---|\n| {as_literal(text)} | 1 |\n").splitlines()[5:-2]
        assert row.endswith(r" & 1 \\"), text
        plain = row.removesuffix(r" & 1 \\")
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
        rest = first + "".join(part[1:] for part in others)
        assert not set(rest) & set("\\&%$#_{}~^"), text
        assert plain.replace("\0", "") == text
