"""The form as a PDF that can be filled in, and the answers from a filled one."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from npeff.study.kit import Group, Kit, Sample
from npeff.utils.errors import UserError
from npeff.utils.files import sha256

INSTALL = "PDF forms need reportlab and pypdf: pip install 'npeff[evalkit]'."
MISSING = "\ufffd"
"""Stands for characters that the font cannot show."""
_WORDS = 500
"""Characters that the field for a theme takes."""
_INK, _QUIET, _LINE, _FIELD = "#1b1f24", "#5b6570", "#c4cad2", "#f3f6fa"


def check_library() -> None:
    """Say what to install if the libraries for PDF are not there."""
    try:
        import pypdf  # noqa: F401
        import reportlab  # noqa: F401
    except ImportError as error:
        raise UserError(INSTALL) from error


@dataclass(frozen=True)
class Font:
    """A TrueType font that is embedded in the PDF."""

    name: str
    covered: Container[int]
    """Code points it has a shape for."""


def load_font(path: str | None = None) -> Font:
    """The font at `path`, or DejaVu Sans, which comes with matplotlib."""
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.ttfonts import TTFError, TTFont

    if path is None:
        import matplotlib

        path = str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")
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
    """`text` with `MISSING` for every run of characters that would not be shown, or not be shown right.

    Letters that are written from right to left are among them: a PDF has no idea of direction.
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
    """Write one form of a kit; the same kit and font give the same bytes."""
    from reportlab.lib.pagesizes import A4
    from reportlab.platypus import SimpleDocTemplate

    def footer(canvas: Any, document: Any) -> None:
        canvas.saveState()
        canvas.setFont("Helvetica", 8)
        canvas.setFillColor(_QUIET)
        which = f", form {form} of {len(kit.forms)}" if len(kit.forms) > 1 else ""
        canvas.drawString(document.leftMargin + 6, 30, f"kit {kit.id}{which}")
        canvas.drawRightString(A4[0] - document.rightMargin - 6, 30, f"page {document.page}")
        canvas.restoreState()

    document = SimpleDocTemplate(
        str(path),
        pagesize=A4,
        leftMargin=57,
        rightMargin=57,
        topMargin=50,
        bottomMargin=55,
        title="Do these texts have a theme?",
        author="npeff",
        invariant=1,  # no date, so that the same kit gives the same file
    )
    story = [*_front(kit, font), *(part for group in kit.of_form(form) for part in _group(kit, group, font))]
    document.build(story, onFirstPage=footer, onLaterPages=footer)


def _styles(font: Font) -> dict[str, Any]:
    from reportlab.lib.styles import ParagraphStyle

    body = ParagraphStyle("body", fontName=font.name, fontSize=9.5, leading=13.5, textColor=_INK, spaceAfter=6)
    return {
        "body": body,
        "text": ParagraphStyle(
            "text", body, leftIndent=14, bulletIndent=2, spaceAfter=3, bulletFontName="Helvetica", bulletFontSize=9.5
        ),
        "quiet": ParagraphStyle("quiet", body, fontSize=7.5, leading=10, textColor=_QUIET, leftIndent=14),
        "title": ParagraphStyle("title", body, fontName="Helvetica-Bold", fontSize=17, leading=22, spaceAfter=10),
        "heading": ParagraphStyle(
            "heading", body, fontName="Helvetica-Bold", fontSize=11.5, leading=15, spaceBefore=8, spaceAfter=5
        ),
    }


def _front(kit: Kit, font: Font) -> Iterator[Any]:
    from reportlab.platypus import HRFlowable, KeepTogether, Paragraph, Spacer

    styles = _styles(font)
    yield Paragraph("Do these texts have a theme?", styles["title"])
    yield from (Paragraph(_markup(text, font), styles["body"]) for text in kit.preamble)
    yield Spacer(0, 6)
    yield _name_row(kit)
    for number, sample in enumerate(kit.samples, 1):
        yield KeepTogether([*_sample(number, sample, font, styles)])
    yield Spacer(0, 6)
    yield HRFlowable(width="100%", color=_LINE)


def _sample(number: int, sample: Sample, font: Font, styles: dict[str, Any]) -> Iterator[Any]:
    from reportlab.platypus import Paragraph

    yield Paragraph(f"Sample {number}", styles["heading"])
    yield from _texts(sample.texts, font, styles)
    words = f": {_markup(sample.words, font)}" if sample.words else ""
    yield Paragraph(f'Answer: <font name="Helvetica-Bold">{sample.theme}</font>{words}', styles["body"])


def _group(kit: Kit, group: Group, font: Font) -> Iterator[Any]:
    from reportlab.platypus import CondPageBreak, KeepTogether, Paragraph, Spacer

    styles = _styles(font)
    texts = [*_texts(group.texts, font, styles)]
    # a heading never stands alone at the end of a page, nor an answer at the beginning of one
    yield CondPageBreak(90)
    parts = [Paragraph(f"Group {group.number}", styles["heading"]), *texts[:-1]]
    yield KeepTogether([*parts, texts[-1], Spacer(0, 3), _answer_row(kit, group), Spacer(0, 8)])


def _texts(texts: tuple[str, ...], font: Font, styles: dict[str, Any]) -> Iterator[Any]:
    from reportlab.platypus import Paragraph

    yield from (Paragraph(_markup(text, font), styles["text"], bulletText="\u2022") for text in texts)
    if any(MISSING in drawable(text, font.covered) for text in texts):
        said = f"{MISSING} stands for characters that cannot be shown here; the HTML page of this form shows them."
        yield Paragraph(_markup(said, font), styles["quiet"])


def _markup(text: str, font: Font) -> str:
    """`text` for a Paragraph, which would take < and & for markup."""
    return escape(drawable(text, font.covered)).replace("\n", "<br/>")


def _row(height: float, draw: Any) -> Any:
    """Something of its own in the flow of a page; `draw` gets the canvas, with the origin in the lower left corner."""
    from reportlab.platypus.flowables import Flowable

    row = Flowable()
    row.wrap = lambda width, _: (width, height)
    row.draw = lambda: draw(row.canv)
    return row


def _name_row(kit: Kit) -> Any:
    def draw(canvas: Any) -> None:
        canvas.setFont("Helvetica-Bold", 10)
        canvas.drawString(0, 5, "Your name")
        _text_field(canvas, f"{kit.id}_name", "Your name", 62, 220, 100)

    return _row(24, draw)


def _answer_row(kit: Kit, group: Group) -> Any:
    def draw(canvas: Any) -> None:
        canvas.setFont("Helvetica", 10)
        canvas.setFillColor(_INK)
        for place, theme in enumerate(("yes", "maybe", "no")):
            x = 14 + (0, 47, 106)[place]
            canvas.acroForm.radio(
                name=field_name(kit.id, group.number, "theme"),
                tooltip=f"Group {group.number}: {theme}",
                value=theme,
                x=x,
                y=3,
                size=15,
                borderColor=_colour(_QUIET),
                fillColor=_colour(_FIELD),
                textColor=_colour(_INK),
                borderWidth=1,
                buttonStyle="circle",
                shape="circle",
                fieldFlags="radio",
                relative=True,
            )
            canvas.drawString(x + 18, 6.5, theme)
        canvas.drawString(168, 6.5, "theme")
        _text_field(canvas, field_name(kit.id, group.number, "words"), f"Group {group.number}: theme", 200, 269, _WORDS)

    return _row(20, draw)


def _text_field(canvas: Any, name: str, tooltip: str, x: float, width: float, longest: int) -> None:
    canvas.acroForm.textfield(
        name=name,
        tooltip=tooltip,
        x=x,
        y=0,
        width=width,
        height=19,
        fontName="Helvetica",
        fontSize=9.5,
        borderWidth=1,
        borderColor=_colour(_LINE),
        fillColor=_colour(_FIELD),
        textColor=_colour(_INK),
        maxlen=longest,
        relative=True,
    )


def _colour(value: str) -> Any:
    from reportlab.lib.colors import HexColor

    return HexColor(value)


def field_name(kit: str, number: int, what: str) -> str:
    """Name of a field: with the kit's id, so that a form is known however it was saved."""
    return f"{kit}_g{number}_{what}"


# --- reading ------------------------------------------------------------------------------------------------------


def read_form(path: Path, kit: str) -> tuple[str, list[tuple[int, str, str]]]:
    """The annotator's name and (group, yes/maybe/no or nothing, words) from a filled form of the kit with this id."""
    check_library()
    import pypdf

    try:
        fields = pypdf.PdfReader(path).get_fields() or {}
        values = {name: _value(field.get("/V")) for name, field in fields.items()}
    except Exception as error:  # of a damaged file pypdf lets exceptions of every kind through
        raise UserError(f"Cannot read {path} as a PDF: {error}.") from error
    if not fields:
        raise UserError(f"{path} has no form fields. Save the filled form itself; a print of it has lost them.")
    pattern = re.compile(re.escape(kit) + r"_g(\d+)_theme")
    numbers = [int(match[1]) for name in values if (match := pattern.fullmatch(name))]
    if not numbers:
        raise UserError(f"{path} is not a form of this kit ({kit}).")
    rows = []
    for number in sorted(numbers):
        theme = values[field_name(kit, number, "theme")].removeprefix("/")
        rows.append((number, "" if theme == "Off" else theme, values.get(field_name(kit, number, "words"), "")))
    return values.get(f"{kit}_name", ""), rows


def _value(value: Any) -> str:
    if value is None:
        return ""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
