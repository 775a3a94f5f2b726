"""The PDF: filled in by another program and read again; texts of every kind."""

from __future__ import annotations

import ctypes
import re
import shutil
import sys
from pathlib import Path
from random import Random

import pypdf
import pypdfium2
import pytest
from pypdf.generic import NameObject
from pypdfium2 import raw

from npeff.study.config import MakeConfig
from npeff.study.kit import Answer, Group, Kit, Sample, read_kit, read_sheet, read_sheets
from npeff.study.make import make
from npeff.study.pdf import MISSING, drawable, load_font, write_form
from npeff.utils.errors import UserError
from tests.browser import HOSTILE


def fill(source: Path, target: Path, values: dict[str, str]) -> None:
    """Fill fields by name, as a viewer does, and save."""
    writer = pypdf.PdfWriter(clone_from=source)
    for page in writer.pages:
        writer.update_page_form_field_values(page, values, auto_regenerate=False)
    writer.write(target)


def fill_groups(made: Path, form: int, target: Path, name: str, answers: dict[int, Answer]) -> None:
    kit = read_kit(made)
    values = {f"{kit.id}_name": name}
    for number, answer in answers.items():
        values |= {f"{kit.id}_g{number}_theme": f"/{answer.theme}", f"{kit.id}_g{number}_words": answer.words}
    fill(made / f"{kit.form_name(form)}.pdf", target, values)


def test_a_filled_form_is_read_again(made: Path, tmp_path: Path) -> None:
    answers = {1: Answer("yes", "numbers"), 2: Answer("maybe", "größere Zahlen, 数"), 3: Answer("no"), 9: Answer("yes")}
    fill_groups(made, 1, tmp_path / "filled.pdf", "Ada Lovelace", answers)
    sheet = read_sheet(tmp_path / "filled.pdf", read_kit(made))
    assert sheet.who == "Ada Lovelace"
    assert sheet.answers == answers  # the others were left open
    assert not sheet.automatic


def test_a_form_filled_in_a_viewer(made: Path, tmp_path: Path) -> None:
    """PDFium is what Chrome shows PDF with: click on the circles and type into the fields, then save."""
    kit = read_kit(made)
    document = pypdfium2.PdfDocument(made / "form-1.pdf")
    document.init_forms()
    for page in document:
        for name, places in _widgets(document, page).items():
            number = int(name.split("_g")[1].split("_")[0]) if "_g" in name else 0
            if name.endswith("theme") and number % 4 == 3:
                continue  # left open
            _click(document, page, sorted(places)[number % 4] if name.endswith("theme") else places[0])
            if name.endswith(("words", "name")):
                for char in f"thème 数 {number}":
                    raw.FORM_OnChar(document.formenv.raw, page.raw, ord(char), 0)
        raw.FORM_ForceToKillFocus(document.formenv.raw)
    document.save(tmp_path / "filled.pdf")
    sheet = read_sheet(tmp_path / "filled.pdf", kit)
    assert sheet.who == "thème 数 0"
    assert sheet.answers == {
        n: Answer("no") if n % 4 == 2 else Answer("yes" if n % 4 == 0 else "maybe", f"thème 数 {n}")
        for n in range(1, 11)
        if n % 4 != 3
    }


def _widgets(document: pypdfium2.PdfDocument, page: pypdfium2.PdfPage) -> dict[str, list[tuple[float, float]]]:
    """Name of each field of a page → the middles of its places."""
    middles: dict[str, list[tuple[float, float]]] = {}
    for index in range(raw.FPDFPage_GetAnnotCount(page.raw)):
        annotation, box = raw.FPDFPage_GetAnnot(page.raw, index), raw.FS_RECTF()
        raw.FPDFAnnot_GetRect(annotation, box)
        length = raw.FPDFAnnot_GetFormFieldName(document.formenv.raw, annotation, None, 0)
        buffer = ctypes.create_string_buffer(length)
        place = ctypes.cast(buffer, ctypes.POINTER(raw.FPDF_WCHAR))
        raw.FPDFAnnot_GetFormFieldName(document.formenv.raw, annotation, place, length)
        name = buffer.raw.decode("utf-16-le").rstrip("\0")
        middles.setdefault(name, []).append(((box.left + box.right) / 2, (box.top + box.bottom) / 2))
        raw.FPDFPage_CloseAnnot(annotation)
    return middles


def _click(document: pypdfium2.PdfDocument, page: pypdfium2.PdfPage, place: tuple[float, float]) -> None:
    for act in (raw.FORM_OnMouseMove, raw.FORM_OnLButtonDown, raw.FORM_OnLButtonUp):
        act(document.formenv.raw, page.raw, 0, *place)


def test_forms_of_one_person_are_put_together(made: Path, tmp_path: Path) -> None:
    fill_groups(made, 1, tmp_path / "1.pdf", "Ada", {1: Answer("no")})
    fill_groups(made, 2, tmp_path / "2.pdf", "Ada", {11: Answer("yes", "films")})
    fill_groups(made, 2, tmp_path / "bob.pdf", "", {11: Answer("no")})
    sheets = read_sheets([tmp_path / "1.pdf", tmp_path / "bob.pdf", tmp_path / "2.pdf"], read_kit(made))
    assert {sheet.who: dict(sheet.answers) for sheet in sheets} == {
        "Ada": {1: Answer("no"), 11: Answer("yes", "films")},
        "bob": {11: Answer("no")},  # no name: the file's
    }
    shutil.copy(tmp_path / "1.pdf", tmp_path / "copy.pdf")
    with pytest.raises(UserError, match="'Ada' has answered group 1 in another"):
        read_sheets([tmp_path / "1.pdf", tmp_path / "copy.pdf"], read_kit(made))


def test_every_field_is_in_the_form_and_open(made: Path) -> None:
    kit = read_kit(made)
    fields = pypdf.PdfReader(made / "form-2.pdf").get_fields() or {}
    wanted = {f"{kit.id}_g{n}_{what}" for n in range(11, 21) for what in ("theme", "words")} | {f"{kit.id}_name"}
    assert set(fields) == wanted
    for name, field in fields.items():
        if name.endswith("theme"):
            assert set(field["/_States_"]) >= {"/yes", "/maybe", "/no"}
        assert field.get("/V") in (None, "", "/Off")


def test_texts_are_on_the_pages(made: Path) -> None:
    kit = read_kit(made)
    pages = pypdf.PdfReader(made / "form-1.pdf").pages
    shown = " ".join(" ".join(page.extract_text().split()) for page in pages)
    for group in kit.of_form(1):
        assert f"Group {group.number} " in shown
        assert all(text in shown for text in group.texts)
    assert "Group 11" not in shown
    for sample in kit.samples:
        assert all(text in shown for text in sample.texts)
    assert "Answer: yes: How to repair things that are broken." in shown
    assert all(text in shown for text in kit.preamble)


def test_wrong_files_are_refused(made: Path, tmp_path: Path) -> None:
    kit = read_kit(made)
    other = Kit(("other",), (), kit.groups[:10])
    write_form(tmp_path / "other.pdf", other, 1, load_font())
    with pytest.raises(UserError, match="not a form of this kit"):
        read_sheet(tmp_path / "other.pdf", kit)
    with pytest.raises(UserError, match="has no answers"):
        read_sheet(made / "form-1.pdf", kit)
    printed = pypdf.PdfWriter(clone_from=made / "form-1.pdf")
    del printed.root_object[NameObject("/AcroForm")]
    printed.write(tmp_path / "printed.pdf")
    with pytest.raises(UserError, match="no form fields"):
        read_sheet(tmp_path / "printed.pdf", kit)
    content = (made / "form-1.pdf").read_bytes()
    for number, damaged in enumerate([b"", b"not a PDF", content[: len(content) // 2], content[200:]]):
        path = tmp_path / f"damaged-{number}.pdf"
        path.write_bytes(damaged)
        with pytest.raises(UserError):
            read_sheet(path, kit)


def test_damaged_bytes_never_end_in_a_traceback(tmp_path: Path) -> None:
    kit = Kit(("preamble",), (), (Group(1, 1, ("text", "more")),))
    write_form(tmp_path / "form.pdf", kit, 1, load_font())
    fill(tmp_path / "form.pdf", tmp_path / "filled.pdf", {f"{kit.id}_g1_theme": "/yes", f"{kit.id}_name": "Ada"})
    content = (tmp_path / "filled.pdf").read_bytes()
    spots = [match.start() for match in re.finditer(rb"[/<>\[\]]|\d 0 R|obj", content)]
    random = Random(0)
    refused = 0
    for _ in range(60):
        damaged = bytearray(content)
        for place in random.choices(spots, k=random.choice((1, 3, 10))):
            damaged[place : place + random.choice((0, 1, 5))] = random.choice(
                (b"", b"\xff", b"<<", b"9 0 R", b"/Kids ")
            )
        (tmp_path / "damaged.pdf").write_bytes(damaged)
        try:
            assert read_sheet(tmp_path / "damaged.pdf", kit).answers == {1: Answer("yes")}
        except UserError:
            refused += 1
    assert 0 < refused < 60


def test_without_the_libraries_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "reportlab", None)
    with pytest.raises(UserError, match=r"pip install 'npeff\[study\]'"):
        make(MakeConfig("absent", str(tmp_path / "kit")))


def test_hostile_texts_make_a_form_all_the_same(tmp_path: Path) -> None:
    texts = [*HOSTILE, "中文 text", "<b>bold</b> & <br/> <para>", "x" * 700, "\n\n\n", "</para>", "&#0; &nbsp;"]
    groups = tuple(Group(n + 1, 1, (text, "plain")) for n, text in enumerate(texts))
    kit = Kit(("<i>preamble</i> שלום",), (Sample(("<b>", "مرحبا"), "yes", "<u>&"),), groups)
    write_form(tmp_path / "form.pdf", kit, 1, load_font())
    shown = "".join(page.extract_text() for page in pypdf.PdfReader(tmp_path / "form.pdf").pages)
    assert "<script>window.ran = 1</script>" in shown
    assert "<b>bold</b> & <br/> <para>" in shown.replace("\n", " ")
    assert f"{MISSING} text" in shown
    assert "the HTML page of this form shows them" in shown.replace("\n", " ")
    assert shown.count("Group ") == len(texts)


def test_what_a_font_lacks_is_replaced_visibly() -> None:
    covered = {ord(char) for char in "abc ()א\x07"}
    assert drawable("a中文 字b", covered) == f"a{MISSING}b"
    assert drawable("(אב) c", covered) == f"({MISSING}) c"
    assert drawable("a\x07b\tc\r\nc", covered) == f"a{MISSING}b    c\nc"
    assert drawable("", covered) == ""


def test_a_font_of_ones_own(tmp_path: Path) -> None:
    import matplotlib

    mono = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"
    kit = Kit(("preamble",), (), (Group(1, 1, ("text", "more")),))
    write_form(tmp_path / "form.pdf", kit, 1, load_font(str(mono)))
    assert b"DejaVuSansMono" in (tmp_path / "form.pdf").read_bytes()
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    with pytest.raises(UserError, match="Cannot use the font"):
        load_font(str(tmp_path / "broken.ttf"))
