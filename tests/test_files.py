"""Directories that appear whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from npeff.errors import UserError
from npeff.files import whole_directory


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
