import csv
import json

import pytest

from npeff.decompose.checkpoint import History
from npeff.utils.configs import from_dict, to_dict


def falling(losses, ending="converged"):
    history = History()
    for loss in losses:
        history.add(loss, step=0.5, stage="joint")
    history.ending = ending
    return history


def test_settles_when_ten_passes_bring_little():
    history = falling([1.0, *([0.5] * 10)])
    assert not history.settled(0.1)
    history.add(0.49)
    assert history.settled(0.1)
    assert not history.settled(0.001)
    assert not history.settled(0.1, since=5)


@pytest.mark.parametrize(
    ("history", "words"),
    [
        (History(), "Nothing was fitted"),
        (falling([0.3], "exact"), "is 0.3000. The solution is exact"),
        (falling([0.9] + [0.5] * 12), "from 0.9000 to 0.5000 in 12 passes. Converged: the last 10 passes"),
        (falling([0.9, 0.5, 0.5]), "another pass would change nothing"),
        (falling([0.9, 0.5], "out of passes"), "Not converged: the last passes still improved it by 0.44"),
        (falling([0.9, 0.5], "all steps taken"), "All steps were taken"),
    ],
)
def test_verdict_is_in_words(history, words):
    assert words in history.verdict(1e-4)


def test_verdict_names_components_that_were_started_again():
    history = falling([0.9, 0.5])
    history.reseeded = 3
    assert "3 components had died" in history.verdict(1e-4)


def test_is_written_and_read_back(tmp_path):
    history = falling([0.9, 0.5, 0.4])
    again = from_dict(History, json.loads(json.dumps(to_dict(history))))
    assert again == history
    again.add(0.3)
    assert again.steps[-1].seconds >= history.steps[-1].seconds
    history.write_csv(tmp_path / "history.csv")
    with (tmp_path / "history.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert [float(row["loss"]) for row in rows] == [0.9, 0.5, 0.4]
    assert float(rows[1]["improvement"]) == pytest.approx(0.4 / 0.9)
    history.plot(tmp_path / "history")
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "history.svg").read_text()
