"""`npeff params`."""

from __future__ import annotations

from npeff.models.config import ModelOptions, ParamsConfig
from npeff.models.params import params


def test_both_lists_add_up_to_the_model(model_directory, capsys):
    options = ModelOptions(device="cpu", exclude=("*.q_proj.*",))
    selection = params(ParamsConfig(str(model_directory), options))
    lines = capsys.readouterr().out.splitlines()
    totals = [line for line in lines if not line.startswith(" ")]
    assert totals[0].startswith(f"Selected: {selection.size:,} parameters, ")
    assert totals[1].startswith("Left out: ")
    for title, following in zip(totals, (*totals[1:], None), strict=True):
        part = lines[lines.index(title) + 1 : lines.index(following) if following else None]
        assert sum(int(line.split()[0].replace(",", "")) for line in part) == int(
            title.split(": ")[1].split()[0].replace(",", "")
        )
    assert any(line.endswith("model.layers.*.self_attn.q_proj.weight (2 tensors)") for line in lines)
