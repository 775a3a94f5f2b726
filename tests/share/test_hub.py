"""Folders, zip files and the Hub, by the real client against a Hub of our own."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from npeff.share.config import PullConfig, PushConfig
from npeff.share.hub import INDEX
from npeff.share.run import pull, push
from npeff.utils.errors import UserError
from tests.share.conftest import edit_index, files_of, refused
from tests.share.local_hub import COMMIT, LocalHub


def test_one_file_to_send(made, shared, tmp_path):
    place = tmp_path / "sst2.zip"
    push(PushConfig(str(made), str(place)))
    push(PushConfig(str(made), str(place)))
    pull(PullConfig(str(place), str(tmp_path / "run")))
    assert files_of(tmp_path / "run").keys() == files_of(shared).keys() - {INDEX}
    assert {name: c for name, c in files_of(tmp_path / "run").items() if name != "README.md"} == {
        name: c for name, c in files_of(shared).items() if name not in (INDEX, "README.md")
    }


def test_places_that_are_none(made, tmp_path):
    for name in ("hf://name", "hf://a/b/c", "hf:///x"):
        with pytest.raises(UserError, match="hf://owner/name"):
            push(PushConfig(str(made), name))
    refused(tmp_path / "nowhere", tmp_path / "run", "not a shared run")
    refused(tmp_path, tmp_path / "run", "--revision is for", revision="main")
    with pytest.raises(UserError, match="--public is for"):
        push(PushConfig(str(made), str(tmp_path / "place"), public=True))
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(UserError, match="is not a folder"):
        push(PushConfig(str(made), str(file)))
    assert file.read_text() == "mine"


def zipped(folder: Path, target: Path, extra: zipfile.ZipInfo | None = None) -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in files_of(folder).items():
            archive.writestr(name, content)
        if extra is not None:
            archive.writestr(extra, b"/etc/passwd")
    return target


@pytest.mark.parametrize("name", ["../escape.json", "/escape.json", "decompositions/x/run.py"])
def test_an_archive_cannot_write_elsewhere(copied, tmp_path, name):
    refused(zipped(copied, tmp_path / "a.zip", zipfile.ZipInfo(name)), tmp_path / "run", "does not list")
    edit_index(copied, lambda values: values["files"].update({name: {"size": 11, "sha256": "0" * 64}}))
    refused(zipped(copied, tmp_path / "a.zip", zipfile.ZipInfo(name)), tmp_path / "run", "no file of a run")
    assert not (tmp_path / "escape.json").exists()


def test_links_doubles_and_damage_in_an_archive_are_refused(copied, tmp_path):
    link = zipfile.ZipInfo("examples.parquet.json")
    link.external_attr = 0o120777 << 16
    refused(zipped(copied, tmp_path / "a.zip", link), tmp_path / "run", "that no shared run has")
    with pytest.warns(UserWarning, match="Duplicate name"):
        zipped(copied, tmp_path / "a.zip", zipfile.ZipInfo("manifest.json"))
    refused(tmp_path / "a.zip", tmp_path / "run", "that no shared run has")
    whole = zipped(copied, tmp_path / "a.zip").read_bytes()
    (tmp_path / "a.zip").write_bytes(whole[:-100])
    refused(tmp_path / "a.zip", tmp_path / "run", "Cannot read")
    middle = whole.index((copied / "examples.parquet").read_bytes()) + 200
    (tmp_path / "a.zip").write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    refused(tmp_path / "a.zip", tmp_path / "run", "Cannot read .*examples.parquet")


def lying(place: Path, target: Path, name: str, real: int, said: int) -> Path:
    """A zip file of `place` in which `name` is `real` zeros, compressed, and is said to be `said` bytes long."""
    zipped(place, target)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, content in files_of(place).items():
            archive.writestr(each, b"\0" * real if each == name else content)
    content = target.read_bytes()
    entry = content.rindex(name.encode()) - 46  # of the directory at the end, which readers go by
    assert content[entry : entry + 4] == b"PK\x01\x02"
    target.write_bytes(content[: entry + 24] + struct.pack("<I", said) + content[entry + 28 :])
    return target


def test_an_entry_that_lies_about_its_size_is_refused(copied: Path, tmp_path: Path) -> None:
    name = "examples.parquet"
    said = (copied / name).stat().st_size
    archive = lying(copied, tmp_path / "a.zip", name, real=50_000_000, said=said)
    assert archive.stat().st_size < 1_000_000
    refused(archive, tmp_path / "run", f"Cannot read .*{name}")
    staging = tmp_path / ".run.pull.partial" / name
    assert staging.stat().st_size <= said
    refused(lying(copied, tmp_path / "b.zip", name, 50_000_000, 50_000_000), tmp_path / "run", f"{name}.*another size")
    refused(lying(copied, tmp_path / "c.zip", INDEX, 100_000_001, 100_000_001), tmp_path / "run", "do not trust it")


SCRIPT = """
import shutil
import sys
from npeff.cli import main

run, pulled, missing = sys.argv[1:]
assert main(["pull", "hf://owner/name", missing]) == 2
assert main(["push", run, "hf://owner/name"]) == 0
shutil.rmtree(f"{run}/decompositions/clusters")
assert main(["push", run, "hf://owner/name"]) == 0
assert main(["pull", "hf://owner/name", pulled]) == 2
assert main(["pull", "hf://owner/name", pulled, "--revision", "main"]) == 0
"""


def test_the_hub_client_pushes_and_pulls(made: Path, shared: Path, tmp_path: Path) -> None:
    """In a process of its own, since the client reads the address of the Hub when it is imported."""
    run = Path(shutil.copytree(made, tmp_path / "made"))
    damaged = "decompositions/npeff/tensors.safetensors"
    with LocalHub(damaged={damaged: 1}) as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": "nobody",
        }
        arguments = [sys.executable, "-c", SCRIPT, str(run), str(tmp_path / "run"), str(tmp_path / "missing")]
        ended = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    absent, broken = (line for line in ended.stderr.splitlines() if line.startswith("npeff pull: "))
    assert "If it is private" in absent
    assert f"{damaged} of hf://owner/name is damaged" in broken
    assert "%|" not in ended.stderr  # no progress bars where nobody watches
    assert hub.created["visibility"] == "private"
    assert hub.commits == ["Share made"] * 2
    assert hub.parents == [None, COMMIT]
    kept = {name for name in files_of(shared) if "clusters" not in name}
    assert hub.files is not None
    assert hub.files.keys() == kept | {".gitattributes"}
    assert files_of(tmp_path / "run").keys() == kept - {INDEX}
    assert hub.asked[damaged] == 2
    assert hub.asked["examples.parquet"] == 1  # the second pull went on where the first had ended
    assert not (tmp_path / "missing").exists()
    assert not (tmp_path / "run" / ".cache").exists()
    assert "npeff pull hf://owner/name RUN" in (tmp_path / "run" / "README.md").read_text()
