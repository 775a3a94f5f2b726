"""The form as a PDF that can be filled in, and the answers from a filled one.

To be imported only where a PDF is written or read: its libraries are optional (`npeff.study.kit.check_pdf_libraries`).
"""

import re
import unicodedata
from collections.abc import Container, Iterator
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
from reportlab.platypus import CondPageBreak, Flowable, HRFlowable, KeepTogether, Paragraph, SimpleDocTemplate, Spacer
from reportlab.platypus.flowables import CallerMacro

from npeff.study.kit import Group, Kit
from npeff.utils import UserError, sha256

MISSING = "\ufffd"
"""Stands for characters that the font cannot show."""
_WORDS = 500
"""Characters that the field for a theme takes."""
_INK, _QUIET, _LINE, _FIELD = map(HexColor, ("#1b1f24", "#5b6570", "#c4cad2", "#f3f6fa"))
_LOOK = {"borderWidth": 1, "fillColor": _FIELD, "textColor": _INK, "relative": True}
"""What all fields have in common."""
_TITLE = "Do these texts have a theme?"
_BOLD = "Helvetica-Bold"


def load_font(path: str | None = None) -> TTFont:
    """A font for `write_form`, to be embedded in the PDF.

    Args:
        path: A TrueType font; without it DejaVu Sans, which comes with matplotlib.

    Returns:
        The font.

    Raises:
        UserError: The file is no TrueType font.
    """
    path = path or str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")
    try:
        # reportlab never forgets a name, nor what it stands for
        font = TTFont(f"npeff-{sha256(Path(path))[:12]}", path)
    except (TTFError, OSError) as error:
        raise UserError(
            f"Cannot use the font {path}: {error}. Give a TrueType font, a file that ends in .ttf."
        ) from error
    pdfmetrics.registerFont(font)
    return font


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


def write_form(path: Path, kit: Kit, form: int, font: TTFont) -> None:
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


def _front(kit: Kit, font: TTFont) -> Iterator[Flowable]:
    yield _paragraph(_TITLE, font, fontName=_BOLD, fontSize=17, leading=22, spaceAfter=10)
    yield from (_paragraph(_markup(text, font), font) for text in kit.preamble)
    yield Spacer(0, 30)
    yield CallerMacro(lambda place: _draw_name(place.canv, kit))
    for number, sample in enumerate(kit.samples, 1):
        words = f": {_markup(sample.words, font)}" if sample.words else ""
        answer = _paragraph(f'Answer: <font name="{_BOLD}">{sample.theme}</font>{words}', font)
        yield KeepTogether([*_texts(f"Sample {number}", sample.texts, font), answer])
    yield Spacer(0, 6)
    yield HRFlowable(width="100%", color=_LINE)


def _group(kit: Kit, group: Group, font: TTFont) -> Iterator[Flowable]:
    # a heading never stands alone at the end of a page, nor an answer at the beginning of one
    yield CondPageBreak(90)
    fields = CallerMacro(lambda place: _draw_choices(place.canv, kit, group))  # above the place that it is called at
    yield KeepTogether([*_texts(f"Group {group.number}", group.texts, font), Spacer(0, 23), fields, Spacer(0, 8)])


def _texts(heading: str, texts: tuple[str, ...], font: TTFont) -> Iterator[Flowable]:
    yield _paragraph(heading, font, fontName=_BOLD, fontSize=11.5, leading=15, spaceBefore=8, spaceAfter=5)
    bullets = {"bulletText": "\u2022", "bulletIndent": 2, "bulletFontName": "Helvetica", "bulletFontSize": 9.5}
    yield from (_paragraph(_markup(text, font), font, leftIndent=14, spaceAfter=3, **bullets) for text in texts)
    if any(MISSING in _markup(text, font) for text in texts):
        note = f"{MISSING} stands for characters that cannot be shown here; the HTML page of this form shows them."
        yield _paragraph(_markup(note, font), font, fontSize=7.5, leading=10, textColor=_QUIET, leftIndent=14)


def _paragraph(markup: str, font: TTFont, **changes: Any) -> Paragraph:
    usual = {"fontName": font.fontName, "fontSize": 9.5, "leading": 13.5, "textColor": _INK, "spaceAfter": 6}
    return Paragraph(markup, ParagraphStyle("npeff", **{**usual, **changes}))


def _markup(text: str, font: TTFont) -> str:
    """`text` for a Paragraph, which would take < and & for markup."""
    return escape(drawable(text, font.face.charToGlyph)).replace("\n", "<br/>")


def _draw_name(canvas: Any, kit: Kit) -> None:
    canvas.setFont(_BOLD, 10)
    canvas.drawString(0, 5, "Your name")
    _draw_field(canvas, f"{kit.id}_name", "Your name", 62, 220, 100)


def _draw_choices(canvas: Any, kit: Kit, group: Group) -> None:
    canvas.setFont("Helvetica", 10)
    canvas.setFillColor(_INK)
    # with the kit's id, so that a form is known however it was saved
    name, title = f"{kit.id}_g{group.number}", f"Group {group.number}"
    look = {**_LOOK, "size": 15, "borderColor": _QUIET, "buttonStyle": "circle", "shape": "circle"}
    for theme, x in (("yes", 14), ("maybe", 61), ("no", 120)):
        button = {"name": f"{name}_theme", "value": theme, "tooltip": f"{title}: {theme}", "fieldFlags": "radio"}
        canvas.acroForm.radio(x=x, y=3, **button, **look)
        canvas.drawString(x + 18, 6.5, theme)
    canvas.drawString(168, 6.5, "theme")
    _draw_field(canvas, f"{name}_words", f"{title}: theme", 200, 269, _WORDS)


def _draw_field(canvas: Any, name: str, tooltip: str, x: float, width: float, longest: int) -> None:
    look = {**_LOOK, "height": 19, "fontName": "Helvetica", "fontSize": 9.5, "borderColor": _LINE}
    canvas.acroForm.textfield(name=name, tooltip=tooltip, x=x, y=0, width=width, maxlen=longest, **look)


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
    groups = (re.fullmatch(rf"{re.escape(kit)}_g(\d+)_theme", name) for name in values)
    rows = [
        (group[1], re.sub("^/?(Off$)?", "", values[group[0]]), values.get(f"{kit}_g{group[1]}_words", ""))
        for group in groups
        if group is not None
    ]
    if not rows:
        raise UserError(f"{path} is not a form of this kit ({kit}).")
    return values.get(f"{kit}_name", ""), rows


def _value(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
