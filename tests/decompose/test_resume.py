from dataclasses import dataclass, replace

import pytest
import torch

from npeff.decompose.baselines import SaeState
from npeff.decompose.checkpoint import Checkpoint, History, State
from npeff.decompose.config import FitConfig, PaperConfig, SaeConfig
from npeff.decompose.methods import create
from npeff.decompose.npeff import AlsState
from npeff.decompose.solver import PaperState
from npeff.store.rows import ArrayRows
from tests.decompose.reference import planted

CONFIGS = {
    "als": FitConfig(components=6, checkpoint_passes=4, max_passes=14, tolerance=0, chunk=50),
    "als, nothing kept": FitConfig(
        components=6, checkpoint_passes=4, max_passes=14, tolerance=0, chunk=50, memory_gb=0
    ),
    "paper": FitConfig(
        components=6,
        solver="paper",
        checkpoint_passes=1,
        paper=PaperConfig(frozen_steps=15, joint_steps=30, frozen_rate=1e-3, joint_rate=1e-3),
    ),
    "clusters": FitConfig(method="clusters", components=8, checkpoint_passes=2, tolerance=0, max_passes=12),
    "sae": FitConfig(
        method="sae", components=6, checkpoint_passes=2, sae=SaeConfig(top_k=2, sae_steps=50, sae_patience=30)
    ),
}


STATES = {"als": AlsState, "paper": PaperState, "clusters": State, "sae": SaeState}


@dataclass
class Counted:
    """A state that a checkpoint may hold."""

    x: int = 0


class KilledError(Exception):
    pass


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("at", [1, 6])
def test_killed_and_resumed_gives_the_same_bits(name, at, tmp_path, monkeypatch):
    config = CONFIGS[name]
    _, source = planted(0, each=2 if config.method == "npeff" else 1, noise=3.0 if name == "clusters" else 0.02)
    at_step = at * (3 if name == "paper" else 1)
    saved = killed_and_resumed(config, source, at_step, STATES[name.split(",")[0]], tmp_path, monkeypatch)
    assert (saved is not None) == (at == 6)


@pytest.mark.parametrize(("at", "length"), [(9, 64), (16, 64), (18, 512)])
def test_killed_in_passes_over_short_rows_and_after_them(at, length, tmp_path, monkeypatch):
    """15 steps over short rows, then others; the first of both stages are before any pass."""
    monkeypatch.setattr("npeff.decompose.blocks.MOST_ROWS", 100)
    monkeypatch.setattr("npeff.decompose.blocks.SHORTEST", 32)
    _, source = planted(0, dim=512, noise=1.0)
    config = replace(CONFIGS["als"], checkpoint_passes=2)
    saved = killed_and_resumed(config, source, at, AlsState, tmp_path, monkeypatch)
    assert saved[1]["H"].shape[1] == length


def killed_and_resumed(config, source, at, state, tmp_path, monkeypatch):
    """Check that a fit which is killed before step `at` can be continued; gives what its checkpoint held."""
    whole = create(config, Checkpoint(tmp_path / "whole", "key")).fit(source)
    add = History.add

    def add_and_die(self, *values, **named):
        if len(self.steps) == at:
            raise KilledError
        return add(self, *values, **named)

    checkpoint = Checkpoint(tmp_path / "killed", "key")
    with monkeypatch.context() as patched:
        patched.setattr(History, "add", add_and_die)
        with pytest.raises(KilledError):
            create(config, checkpoint).fit(source)
    saved = checkpoint.load(state)
    resumed = create(config, checkpoint).fit(source)
    assert torch.equal(resumed.components, whole.components)
    assert torch.equal(resumed.coefficients, whole.coefficients)
    assert [step.loss for step in resumed.history.steps] == [step.loss for step in whole.history.steps]
    return saved


def test_checkpoints_do_not_change_the_result(tmp_path):
    _, source = planted(0)
    with_them = create(CONFIGS["als"], Checkpoint(tmp_path, "key")).fit(source)
    without = create(CONFIGS["als"]).fit(source)
    assert torch.equal(with_them.components, without.components)


def test_a_checkpoint_of_another_fit_is_not_taken_up(tmp_path):
    checkpoint = Checkpoint(tmp_path, "one")
    checkpoint.save(4, [torch.ones(3, 2), torch.zeros(1, 2)], {"H": torch.ones(2, 5)}, Counted(1))
    checkpoint.save(8, [torch.ones(3, 2), torch.zeros(1, 2)], {"H": torch.zeros(2, 5)}, Counted(2))
    W, shared, state = checkpoint.load(Counted)
    assert W.tolist() == [[1, 1]] * 3 + [[0, 0]]
    assert (shared["H"] == 0).all()
    assert state.x == 2
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert Checkpoint(tmp_path, "other").load(Counted) is None
    assert Checkpoint(tmp_path / "nothing", "one").load(Counted) is None
    checkpoint.clear()
    assert not tmp_path.exists()


def test_more_passes_continue_a_checkpoint(tmp_path):
    _, source = planted(0)
    short = FitConfig(components=6, checkpoint_passes=4, max_passes=4, tolerance=0)
    long = FitConfig(components=6, checkpoint_passes=4, max_passes=8, tolerance=0)
    create(short, Checkpoint(tmp_path, "key")).fit(source)
    continued = create(long, Checkpoint(tmp_path, "key")).fit(source)
    assert torch.equal(continued.components, create(long).fit(source).components)


def test_source_is_not_changed():
    rows = torch.randn(30, 8)
    before = rows.clone()
    for config in CONFIGS.values():
        create(FitConfig(method=config.method, components=3, max_passes=2, sae=config.sae)).fit(ArrayRows(rows))
    assert torch.equal(rows, before)


def test_what_a_killed_writer_left_goes_when_its_checkpoint_is_taken_up(tmp_path):
    """It is killed when the new checkpoint is there and the old one has not gone yet."""
    checkpoint = Checkpoint(tmp_path / "point", "key")
    checkpoint.save(4, [torch.ones(2, 2)], {}, Counted())
    old = (tmp_path / "point" / "pass-000004-0.safetensors").read_bytes()
    checkpoint.save(8, [torch.zeros(2, 2)], {}, Counted())
    expected = sorted(path.name for path in (tmp_path / "point").iterdir())
    (tmp_path / "point" / "pass-000004-0.safetensors").write_bytes(old)
    saved = checkpoint.load(Counted)
    assert saved is not None
    assert torch.equal(saved[0], torch.zeros(2, 2))
    assert sorted(path.name for path in (tmp_path / "point").iterdir()) == expected
