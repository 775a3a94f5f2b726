"""The form as a PDF that can be filled in, and the answers from a filled one.

To be imported only where a PDF is written or read: its libraries are optional (`npeff.study.kit.check_pdf_libraries`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import matplotlib
import pypdf
from reportlab.lib.colors import HexColor
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import ParagraphStyle
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFError, TTFont
from reportlab.platypus import CondPageBreak, HRFlowable, KeepTogether, Paragraph, SimpleDocTemplate, Spacer
from reportlab.platypus.flowables import Flowable

from npeff.study.kit import Group, Kit, Sample
from npeff.utils.errors import UserError
from npeff.utils.files import sha256

MISSING = "\ufffd"
"""Stands for characters that the font cannot show."""
_WORDS = 500
"""Characters that the field for a theme takes."""
_INK, _QUIET, _LINE, _FIELD = map(HexColor, ("#1b1f24", "#5b6570", "#c4cad2", "#f3f6fa"))
_TITLE = "Do these texts have a theme?"
_BOLD = "Helvetica-Bold"


@dataclass(frozen=True)
class Font:
    """A TrueType font that is embedded in the PDF."""

    name: str
    """As reportlab knows it."""
    covered: Container[int]
    """Code points it has a shape for."""

    def style(self, **changes: Any) -> ParagraphStyle:
        """How a paragraph in this font looks."""
        usual = {"fontName": self.name, "fontSize": 9.5, "leading": 13.5, "textColor": _INK, "spaceAfter": 6}
        return ParagraphStyle("npeff", **{**usual, **changes})

    def markup(self, text: str) -> str:
        """`text` for a Paragraph, which would take < and & for markup."""
        return escape(drawable(text, self.covered)).replace("\n", "<br/>")


def load_font(path: str | None = None) -> Font:
    """A font for `write_form`.

    Args:
        path: A TrueType font; without it DejaVu Sans, which comes with matplotlib.

    Returns:
        The font.

    Raises:
        UserError: The file is no TrueType font.
    """
    path = path or str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")
    try:
        name = f"npeff-{sha256(Path(path))[:12]}"  # reportlab never forgets a name, nor what it stands for
        font = TTFont(name, path)
    except (TTFError, OSError) as error:
        raise UserError(
            f"Cannot use the font {path}: {error}. Give a TrueType font, a file that ends in .ttf."
        ) from error
    pdfmetrics.registerFont(font)
    return Font(name, font.face.charToGlyph)


def drawable(text: str, covered: Container[int]) -> str:
    """Mark the characters of a text that would not be shown, or not be shown right.

    Letters that are written from right to left are among them: a PDF has no idea of direction.

    Args:
        text: What is to be shown.
        covered: Code points that the font has a shape for.

    Returns:
        The text with `MISSING` for every run of such characters.
    """

    def shown(char: str) -> bool:
        if char == "\n":
            return True
        odd = unicodedata.category(char) in ("Cc", "Cs", "Co", "Cn")
        return ord(char) in covered and not odd and unicodedata.bidirectional(char) not in ("R", "AL", "AN")

    text = text.replace("\t", "    ").replace("\r\n", "\n").replace("\u2028", "\n").replace("\u2029", "\n")
    marked = "".join(char if shown(char) else "\0" for char in text)
    # a space between two that cannot be shown belongs to them
    return re.sub(r"\0(?: *\0)*", MISSING, marked)


# --- writing ------------------------------------------------------------------------------------------------------


def write_form(path: Path, kit: Kit, form: int, font: Font) -> None:
    """Write one form of a kit; the same kit and font give the same bytes.

    Args:
        path: File to write.
        kit: The kit.
        form: Number of the form.
        font: Font of the texts.
    """

    def footer(canvas: Any, document: Any) -> None:
        canvas.saveState()
        canvas.setFont("Helvetica", 8)
        canvas.setFillColor(_QUIET)
        which = f", form {form} of {len(kit.forms)}" if len(kit.forms) > 1 else ""
        canvas.drawString(document.leftMargin + 6, 30, f"kit {kit.id}{which}")
        canvas.drawRightString(A4[0] - document.rightMargin - 6, 30, f"page {document.page}")
        canvas.restoreState()

    margins = {"leftMargin": 57, "rightMargin": 57, "topMargin": 50, "bottomMargin": 55}
    # invariant: no date, so that the same kit gives the same file
    document = SimpleDocTemplate(str(path), pagesize=A4, title=_TITLE, author="npeff", invariant=1, **margins)
    story = [*_front(kit, font), *(part for group in kit.of_form(form) for part in _group(kit, group, font))]
    document.build(story, onFirstPage=footer, onLaterPages=footer)


def _front(kit: Kit, font: Font) -> Iterator[Flowable]:
    yield Paragraph(_TITLE, font.style(fontName=_BOLD, fontSize=17, leading=22, spaceAfter=10))
    yield from (Paragraph(font.markup(text), font.style()) for text in kit.preamble)
    yield Spacer(0, 6)
    yield _Row(24, lambda canvas: _draw_name(canvas, kit))
    for number, sample in enumerate(kit.samples, 1):
        yield KeepTogether([_heading(f"Sample {number}", font), *_texts(sample.texts, font), _answer(sample, font)])
    yield Spacer(0, 6)
    yield HRFlowable(width="100%", color=_LINE)


def _heading(text: str, font: Font) -> Flowable:
    return Paragraph(text, font.style(fontName=_BOLD, fontSize=11.5, leading=15, spaceBefore=8, spaceAfter=5))


def _answer(sample: Sample, font: Font) -> Flowable:
    words = f": {font.markup(sample.words)}" if sample.words else ""
    return Paragraph(f'Answer: <font name="{_BOLD}">{sample.theme}</font>{words}', font.style())


def _group(kit: Kit, group: Group, font: Font) -> Iterator[Flowable]:
    # a heading never stands alone at the end of a page, nor an answer at the beginning of one
    yield CondPageBreak(90)
    parts = [_heading(f"Group {group.number}", font), *_texts(group.texts, font), Spacer(0, 3)]
    yield KeepTogether([*parts, _Row(20, lambda canvas: _draw_choices(canvas, kit, group)), Spacer(0, 8)])


def _texts(texts: tuple[str, ...], font: Font) -> Iterator[Flowable]:
    bullets = {"bulletIndent": 2, "bulletFontName": "Helvetica", "bulletFontSize": 9.5}
    style = font.style(leftIndent=14, spaceAfter=3, **bullets)
    yield from (Paragraph(font.markup(text), style, bulletText="\u2022") for text in texts)
    if any(MISSING in drawable(text, font.covered) for text in texts):
        note = f"{MISSING} stands for characters that cannot be shown here; the HTML page of this form shows them."
        yield Paragraph(font.markup(note), font.style(fontSize=7.5, leading=10, textColor=_QUIET, leftIndent=14))


class _Row(Flowable):  # type: ignore[misc]
    """Fields in the flow of a page; `fill` gets the canvas, with the origin in the lower left corner."""

    def __init__(self, height: float, fill: Callable[[Any], None]) -> None:
        super().__init__()
        self.height, self._fill = height, fill

    def wrap(self, width: float, _: float) -> tuple[float, float]:
        return width, self.height

    def draw(self) -> None:
        self._fill(self.canv)


def _draw_name(canvas: Any, kit: Kit) -> None:
    canvas.setFont(_BOLD, 10)
    canvas.drawString(0, 5, "Your name")
    _draw_field(canvas, f"{kit.id}_name", "Your name", 62, 220, 100)


def _draw_choices(canvas: Any, kit: Kit, group: Group) -> None:
    canvas.setFont("Helvetica", 10)
    canvas.setFillColor(_INK)
    colours = {"borderColor": _QUIET, "fillColor": _FIELD, "textColor": _INK}
    look = {"size": 15, "borderWidth": 1, "buttonStyle": "circle", "shape": "circle", **colours}
    name = field_name(kit.id, group.number, "theme")
    for theme, x in (("yes", 14), ("maybe", 61), ("no", 120)):
        tooltip = f"Group {group.number}: {theme}"
        canvas.acroForm.radio(
            name=name, tooltip=tooltip, value=theme, x=x, y=3, fieldFlags="radio", relative=True, **look
        )
        canvas.drawString(x + 18, 6.5, theme)
    canvas.drawString(168, 6.5, "theme")
    _draw_field(canvas, field_name(kit.id, group.number, "words"), f"Group {group.number}: theme", 200, 269, _WORDS)


def _draw_field(canvas: Any, name: str, tooltip: str, x: float, width: float, longest: int) -> None:
    colours = {"borderColor": _LINE, "fillColor": _FIELD, "textColor": _INK}
    look = {"height": 19, "fontName": "Helvetica", "fontSize": 9.5, "borderWidth": 1, **colours}
    canvas.acroForm.textfield(name=name, tooltip=tooltip, x=x, y=0, width=width, maxlen=longest, relative=True, **look)


def field_name(kit: str, number: int, part: str) -> str:
    """Name of a field: with the kit's id, so that a form is known however it was saved."""
    return f"{kit}_g{number}_{part}"


# --- reading ------------------------------------------------------------------------------------------------------


def read_form(path: Path, kit: str) -> tuple[str, list[tuple[str, str, str]]]:
    """What a filled form says.

    Args:
        path: The PDF.
        kit: Id of the kit.

    Returns:
        The annotator's name, and for each group its number, yes, maybe, no or nothing, and the theme.

    Raises:
        UserError: The file is damaged, has no fields, or is a form of another kit.
    """
    try:
        fields = pypdf.PdfReader(path).get_fields() or {}
        values = {name: _value(field.get("/V")) for name, field in fields.items()}
    except Exception as error:  # of a damaged file pypdf lets exceptions of every kind through
        raise UserError(f"Cannot read {path} as a PDF: {error}.") from error
    if not fields:
        raise UserError(f"{path} has no form fields. Save the filled form itself; a print of it has lost them.")
    pattern = re.compile(re.escape(kit) + r"_g(\d+)_theme")
    numbers = sorted(int(match[1]) for name in values if (match := pattern.fullmatch(name)))
    if not numbers:
        raise UserError(f"{path} is not a form of this kit ({kit}).")
    rows = []
    for number in numbers:
        theme = values[field_name(kit, number, "theme")].removeprefix("/")
        words = values.get(field_name(kit, number, "words"), "")
        rows.append((str(number), "" if theme == "Off" else theme, words))
    return values.get(f"{kit}_name", ""), rows


def _value(value: Any) -> str:
    if value is None:
        return ""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
