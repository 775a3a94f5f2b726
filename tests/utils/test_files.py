"""Files and directories that appear whole or not at all, and are known when they have changed."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from npeff.utils.errors import UserError
from npeff.utils.files import read_json, remove_partials, whole_directory, write_json


def test_a_directory_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    place = tmp_path / "place"
    with whole_directory(place) as new:
        (new / "a").write_text("first")
    with pytest.raises(UserError, match="Could not write"), whole_directory(place) as new:
        (new / "missing" / "a").write_text("second")
    assert (place / "a").read_text() == "first"
    rename = Path.rename

    def fails_for_the_new_one(path, target):
        if path.suffix == ".new":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails_for_the_new_one)
    with pytest.raises(UserError, match="Input/output error"), whole_directory(place) as new:
        (new / "a").write_text("third")
    assert (place / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_a_directory_whose_writer_was_killed_between_two_renames_is_not_lost(tmp_path):
    place = tmp_path / "place [1]"
    with whole_directory(place) as new:
        (new / "a").write_text("first")
    place.rename(tmp_path / f".{place.name}.01234567.old")
    with pytest.raises(ZeroDivisionError), whole_directory(place):
        raise ZeroDivisionError  # the next writer does not finish either
    assert (place / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == [place.name]


@pytest.mark.parametrize("below", [False, True])
def test_what_killed_writers_leave_is_removed(tmp_path, below):
    """Also what safetensors was writing: it has a temporary file of its own, whose name we do not choose."""
    (tmp_path / "deep").mkdir()
    for name in ("a.json", ".lock", ".a.json.01234567.partial", ".tmpwYqbHb", "deep/.tmpAb12Cd", "deep/b.safetensors"):
        (tmp_path / name).write_text("")
    remove_partials(tmp_path, below=below)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"a.json", ".lock", "deep/b.safetensors"} | (set() if below else {"deep/.tmpAb12Cd"})


def test_every_flipped_bit_of_a_sealed_file_is_found(tmp_path):
    """The name of the seal included: without it the file must not pass for one that was never sealed."""
    path = tmp_path / "sealed.json"
    value = {"loss": [1.0, 0.25], "name": "npeff", "none": None}
    write_json(path, value, sealed=True)
    whole = path.read_bytes()
    for place in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            found = read_json(path)
        except UserError:
            continue
        assert found == value, changed  # only white space has changed
