"""Themes and notes: what was acknowledged is there, whatever happens."""

from __future__ import annotations

import csv
import itertools
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from npeff import cli
from npeff.explore.config import ThemesConfig
from npeff.explore.themes import Themes, themes
from npeff.store.run import Run
from npeff.utils.errors import UserError
from tests.synthetic import add_decomposition, make_run

HOSTILE = '<script>alert(1)</script> \x1b[31m \u202e 👩‍👩‍👧 שלום \u2028 \x00 "quoted", comma'


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(40)])
    add_decomposition(run, components=4)
    return run


def test_the_latest_counts_and_everything_is_kept(run: Run) -> None:
    book = Themes(run, "npeff")
    assert book.current() == {}
    first = book.add(2, "  sports\n news ", "a note\nof two lines", who="Ada")
    assert (first.theme, first.note, first.who, first.source) == (
        "sports news",
        "a note\nof two lines",
        "Ada",
        "person",
    )
    assert time.strptime(first.when, "%Y-%m-%dT%H:%M:%SZ")
    book.add(0, "weather")
    second = book.add(2, "football", who="Bob")
    again = Themes(Run.open(run.path), "npeff")
    assert list(again.current()) == [0, 2]
    assert again.current()[2] == second
    assert again.history(2) == [first, second]
    assert again.current()[0].who
    book.add(2, "", " ")
    assert list(again.current()) == [0]
    assert len(again.history(2)) == 3


def test_a_person_counts_before_a_judge(run: Run) -> None:
    book = Themes(run, "npeff")
    book.add(1, "guess", source="judge:tiny")
    assert book.current()[1].source == "judge:tiny"
    book.add(1, "better guess", source="judge:other")
    assert book.current()[1].theme == "better guess"
    book.add(1, "known", who="Ada")
    book.add(1, "late guess", source="judge:tiny")
    assert book.current()[1].theme == "known"
    book.add(1, "", who="Ada")
    assert book.current() == {}  # a person does not want it named
    book.add(3, "guess", source="judge:tiny")
    book.add(3, "", source="judge:tiny")
    assert book.current() == {}


def test_themes_of_another_decomposition_of_the_same_name_are_not_shown(run: Run) -> None:
    book = Themes(run, "npeff")
    book.add(1, "old")
    tensors = (run.path / "decompositions" / "npeff" / "tensors.safetensors").read_bytes()
    add_decomposition(run, components=5, name="npeff")
    assert (run.path / "decompositions" / "npeff" / "tensors.safetensors").read_bytes() != tensors
    new = Themes(run, "npeff")
    assert new.current() == {}
    new.add(4, "new")
    assert list(new.current()) == [4]
    assert len(new.path.read_text().splitlines()) == 2
    with pytest.raises(UserError, match="replaced"):
        book.add(1, "too late")


def test_hostile_text_comes_back_as_it_was(run: Run) -> None:
    book = Themes(run, "npeff")
    added = book.add(0, "x", HOSTILE, who="مرحبا")
    assert book.current()[0] == added
    assert added.note == HOSTILE
    assert book.path.read_bytes().isascii()
    assert book.path.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize(
    ("component", "theme", "note"),
    [(4, "x", ""), (-1, "x", ""), (0, "x" * 201, ""), (0, "", "x" * 10_001), (0, "\ud800", ""), (0, "x", "\udfff")],
)
def test_what_is_refused(run: Run, component: int, theme: str, note: str) -> None:
    with pytest.raises(UserError):
        Themes(run, "npeff").add(component, theme, note)
    assert not Themes(run, "npeff").path.exists()


def test_limits_count_characters(run: Run) -> None:
    Themes(run, "npeff").add(0, "👩" * 200, "é" * 10_000, who="w" * 100)
    with pytest.raises(UserError, match="101"):
        Themes(run, "npeff").add(0, "x", who="w" * 101)


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_torn_last_line_is_ignored_and_then_cut_off(run: Run, cut: int) -> None:
    book = Themes(run, "npeff")
    book.add(0, "first")
    whole = book.path.read_bytes()
    book.add(1, "second")
    book.path.write_bytes(book.path.read_bytes()[:-cut])
    assert list(book.current()) == [0]
    book.add(2, "third")
    assert list(book.current()) == [0, 2]
    assert book.path.read_bytes().startswith(whole)
    assert b"second" not in book.path.read_bytes()


@pytest.mark.parametrize("line", [b"{", b"\x00\x00", b"[1]", b"{}", b'"x"', b"\xff\xfe"])
def test_a_damaged_line_is_named(run: Run, line: bytes) -> None:
    book = Themes(run, "npeff")
    book.add(0, "first")
    book.path.write_bytes(book.path.read_bytes() + line + b"\n")
    with pytest.raises(UserError, match=r"npeff\.jsonl, line 2 is damaged"):
        book.current()


def test_values_of_the_wrong_type_are_damage(run: Run) -> None:
    book = Themes(run, "npeff")
    book.add(0, "first")
    good = json.loads(book.path.read_text())
    del good["seal"]  # as an earlier version has written it
    for change in ({"component": "0"}, {"component": True}, {"theme": None}, {"when": 3}, {"decomposition": 1}):
        book.path.write_text(json.dumps(good | change) + "\n")
        with pytest.raises(UserError, match="line 1 is damaged"):
            book.current()
    old = {"label" if name == "theme" else name: value for name, value in good.items()}
    book.path.write_text(json.dumps(old) + "\n")
    assert book.current()[0].theme == "first"
    book.path.write_text(json.dumps(good | {"later": "version"}) + "\n\n")
    assert book.current()[0].theme == "first"


def test_unknown_decompositions(run: Run) -> None:
    for name in ("absent", "../run", ""):
        with pytest.raises(UserError, match="no finished decomposition"):
            Themes(run, name)


def write_without_end(book: Themes, turn: str, acknowledge: int) -> None:
    """Give themes until killed; a line to `acknowledge` for every theme that was taken."""
    for n in itertools.count():
        book.add(n % 4, f"{turn}-{n}", "note " * 400)
        os.write(acknowledge, f"{turn}-{n}\n".encode())


def test_every_acknowledged_edit_survives_kills(run: Run) -> None:
    book = Themes(run, "npeff")
    fork = multiprocessing.get_context("fork")
    acknowledged: list[str] = []
    for turn in range(6):
        # two writers at once: neither may tear the other's lines
        writers = []
        for who in "ab":
            reader, writer = os.pipe()
            process = fork.Process(target=write_without_end, args=(book, f"{turn}{who}", writer), daemon=True)
            process.start()
            os.close(writer)
            writers.append((process, reader))
        for process, reader in writers:
            with os.fdopen(reader) as lines:
                acknowledged += [next(lines).strip() for _ in range(5 + turn)]
                process.kill()
                acknowledged += [line.strip() for line in lines if line.endswith("\n")]
            process.join()
    found = [theme.theme for j in range(4) for theme in book.history(j)]
    assert set(acknowledged) <= set(found)
    assert len(found) == len(set(found)) <= len(acknowledged) + 12  # a kill may come between the disk and the answer
    book.add(0, "after all that")
    assert book.current()[0].theme == "after all that"


def test_the_command_lists_and_exports(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_decomposition(run, "clusters", 3)
    assert cli.main(["themes", str(run.path)]) == 0
    assert "No component" in capsys.readouterr().out
    Themes(run, "npeff").add(1, "sports", HOSTILE, who="Ada")
    Themes(run, "clusters").add(0, "=1+1", source="judge:tiny")
    rows = themes(ThemesConfig(str(run.path)))
    assert [(name, theme.component) for name, theme in rows] == [("clusters", 0), ("npeff", 1)]
    out = capsys.readouterr().out
    assert "sports  [Ada, 20" in out
    assert "[judge:tiny, 20" in out
    assert "\x1b" not in out
    arguments = ["themes", str(run.path), "--decomposition", "npeff"]
    assert cli.main([*arguments, "--csv", str(tmp_path / "l.csv")]) == 0
    with (tmp_path / "l.csv").open(newline="", encoding="utf-8") as handle:
        (row,) = csv.DictReader(handle)
    assert (row["theme"], row["note"], row["who"]) == ("sports", HOSTILE, "Ada")
    assert cli.main(["themes", str(run.path), "--decomposition", "absent"]) == 2
