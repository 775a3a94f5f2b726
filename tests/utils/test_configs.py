from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npeff.cli import COMMANDS, main, parse
from npeff.collect.config import CollectConfig
from npeff.decompose.config import PaperConfig, SaeConfig
from npeff.perturb.config import PerturbConfig, SensingConfig
from npeff.utils.configs import LARGEST, from_dict, to_dict
from npeff.utils.errors import UserError


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    count: int
    kind: Literal["a", "b"] = "a"
    limit: int | None = None
    inner: Inner = field(default_factory=Inner)
    flag: bool = False


whole_numbers = st.integers(1 - LARGEST, LARGEST - 1)


@given(whole_numbers, st.sampled_from("ab"), st.none() | whole_numbers, st.floats(allow_nan=False), st.booleans())
def test_round_trip_through_json(count, kind, limit, rate, flag):
    config = Outer(count, kind, limit, Inner(rate, ("x", "y")), flag)
    assert from_dict(Outer, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"count": 1, "cuont": 2}, "Unknown option cuont"),
        ({"count": "1"}, "count cannot be '1'"),
        ({"count": True}, "count cannot be True"),
        ({"count": 1, "kind": "c"}, "kind cannot be 'c'"),
        ({"count": 1, "inner": {"names": "xy"}}, "names cannot be 'xy'"),
        ({"count": 1, "inner": 3}, "should be a mapping"),
        ({}, "count"),
    ],
)
def test_what_does_not_fit_is_named(values, words):
    with pytest.raises(UserError, match=words):
        from_dict(Outer, values)


def test_command_line_and_python_make_the_same_config():
    config = parse("collect", ["runs/x", "--task", "yat", "--limit", "5", "--no-gradient"])
    assert config == from_dict(CollectConfig, {"run": "runs/x", "data": {"task": "yat", "limit": 5}, "gradient": False})


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    assert command in capsys.readouterr().out


def test_overview_and_version(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)
    assert main(["--version"]) == 0
    assert main(["nonsense"]) == 2


@pytest.mark.parametrize(
    ("config", "values", "words"),
    [
        (PerturbConfig, {"nulls": -1}, "--nulls is -1; it should be at least 0"),
        (PerturbConfig, {"fidelity": 1.5}, "--fidelity is 1.5; it should be at most 1"),
        (PerturbConfig, {"adapter_share": 0}, "--adapter-share is 0; it should be above 0"),
        (PerturbConfig, {"curve": (1.0, 0.0)}, "--curve is 0.0; it should be above 0"),
        (PerturbConfig, {"target_kl": float("nan")}, "--target-kl is nan; it should be above 0"),
    ],
)
def test_numbers_outside_their_bounds_are_named(config, values, words):
    with pytest.raises(UserError, match=words):
        config("run", **values)
    for kind, wrong in ((SensingConfig, {"mu": 0}), (PaperConfig, {"joint_rate": 0}), (SaeConfig, {"sae_rate": -1})):
        with pytest.raises(UserError, match="it should be above 0"):
            kind(**wrong)
