"""The README as a newcomer pastes it, block after block into one shell, with the real model.

The shell has the path of a user's shell, and nothing of the environment that runs the tests: `npeff` is found because
the README says how to activate `.venv`, or not at all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, read_blocks

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
FORGOTTEN = ("PATH", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
"""What the shell of a newcomer does not have, or not in this way."""


def script_of(page: Path) -> str:
    """All blocks of a page that can be pasted, one after another; `make` has run before."""
    parts = ["set -ex"]
    for block in read_blocks(page):
        if block.language == "python":
            parts.append(f"python - <<'END_OF_BLOCK'\n{block.text}\nEND_OF_BLOCK")
        elif block.language == "sh" and not block.text.startswith("make "):
            parts.append(block.text)
    return "\n".join(parts)


@pytest.mark.smollm2
def test_the_recipes_of_the_readme_can_be_pasted(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {name: value for name, value in os.environ.items() if name not in FORGOTTEN}
    script = script_of(ROOT / "README.md")
    assert len(re.findall(r"^npeff ", script, re.MULTILINE)) >= 12
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**environment, "PATH": SYSTEM_PATH},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert (tmp_path / "pages" / "reviews" / "index.html").is_file()
