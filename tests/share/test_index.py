"""What of a run is shared, and indexes that are not trusted."""

from __future__ import annotations

import json

import pytest

from npeff.share.index import INDEX, is_shared_name, read_index
from npeff.utils.errors import UserError
from tests.share.conftest import edit_index, refused

NAMES = ["../escape.json", "/escape.json", "decompositions/../../escape.json", "decompositions//x.json"]
NAMES += ["C:/escape.json", "decompositions\\x.json", ".ssh/config.json", "decompositions/.x/x.json", "site/index.html"]
NAMES += [
    "decompositions/x/code.py",
    "shards/00000.pt",
    "shards/../x.safetensors",
    "perturbations/p/model/1/config.json",
]
NAMES += ["decompositions/x/a\nb.json", "decompositions/" * 8 + "x.json", "", "decompositions/x./a.json"]


@pytest.mark.parametrize("name", NAMES)
def test_names_outside_a_run_are_refused(copied, tmp_path, name):
    assert not is_shared_name(name)
    edit_index(copied, lambda values: values["files"].update({name: {"size": 1, "sha256": "0" * 64}}))
    refused(copied, tmp_path / "run", "no file of a run")
    assert not (tmp_path / "escape.json").exists()


def test_names_that_are_one_on_some_systems_are_refused(shared):
    values = json.loads((shared / INDEX).read_text())
    values["files"]["decompositions/NPEFF/config.json"] = values["files"]["decompositions/npeff/config.json"]
    with pytest.raises(UserError, match="no file of a run"):
        read_index(json.dumps(values).encode(), "here")


def test_unknown_formats_and_broken_indexes_are_refused(copied, tmp_path):
    whole = (copied / INDEX).read_text()
    edit_index(copied, lambda values: values.update(format=99))
    refused(copied, tmp_path / "run", "Upgrade npeff")
    edit_index(copied, lambda values: values.update(format=1, run="0" * 64))
    refused(copied, tmp_path / "run", "another run than it holds")
    edit_index(copied, lambda values: values["files"]["manifest.json"].update(size="1"))
    refused(copied, tmp_path / "run", "is damaged")
    (copied / INDEX).write_text(whole[:50])
    refused(copied, tmp_path / "run", "is damaged")
    (copied / INDEX).unlink()
    refused(copied, tmp_path / "run", "not a shared run.*hf://owner/name")
