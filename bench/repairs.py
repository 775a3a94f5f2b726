"""What `npeff repair` promises to first order, from a run's rows alone: `python -m bench.repairs RUN [DRAWS]`.

Settings of the repair were looked at with this, on reviews that `bench.act` does not measure. On the test part of the
run's newest decomposition: the model, offsets of its answers, the repair, and random groups in place of components.
Changes are as long as third text allows at `LIMIT`, or shorter where the tune part asks for it.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch

from npeff.act.regression import changed, regress
from npeff.act.repair import SHARES, InSketch, read_wanted
from npeff.analyse.answers import change_of_answers
from npeff.collect.session import prepare_to_edit
from npeff.decompose.run import open_decomposition
from npeff.perturb.config import PerturbConfig
from npeff.perturb.elsewhere import background_rows
from npeff.perturb.lift import group_sum
from npeff.perturb.protocol import make_plan
from npeff.perturb.whitening import read_background
from npeff.store.run import Run

LIMIT = 1e-3


def main() -> None:
    run, draws = Run.open(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    decomposition = open_decomposition(run)
    plan = make_plan(run, decomposition, PerturbConfig(str(run.path), count=1))
    labels, _, Q = read_wanted(run, decomposition, plan.fit, ())
    tune, test, log_p = plan.tune.examples, plan.test.examples, run.tensor("probabilities").double().log()
    prepared = prepare_to_edit(run, "cpu")
    *text, third = (background_rows(run, prepared, seed).double() for seed in range(3))
    sketch = InSketch(run, read_background(run, plan.fit, 0), tune, Q, text, LIMIT)

    def show(way: str, after: torch.Tensor) -> None:
        right, loss = after.argmax(1).numpy() == labels[test], -(Q[test] * after.log_softmax(1)).sum(1).mean()
        print(f"{way:16} accuracy {right.mean():.1%}   loss {loss:.3f}", flush=True)

    def combined(vectors: torch.Tensor) -> torch.Tensor:
        tried = []
        for _, vector, _ in sketch.combine(vectors, range(len(vectors))):
            longest = math.sqrt(2 * LIMIT) / float((third @ vector).norm())
            D = {
                name: change_of_answers(run, part.tolist(), vector[None])
                for name, part in (("tune", tune), ("test", test))
            }
            for share in SHARES:
                s = torch.tensor([share * longest], dtype=torch.float64)
                loss = -(Q[tune] * changed(s, log_p[tune], D["tune"])).sum(1).mean()
                tried.append((float(loss), changed(s, log_p[test], D["test"])))
        return min(tried, key=lambda pair: pair[0])[1]

    labelled = np.concatenate([plan.fit, tune])
    each = torch.eye(log_p.shape[1], dtype=torch.float64)
    offsets = regress(log_p[labelled], each.expand(len(labelled), -1, -1), Q[labelled], 1e-6 * each)
    print(f"{len(plan.fit)} examples fitted, {len(tune)} to choose, {len(test)} measured")
    show("model", log_p[test])
    show("bias", log_p[test] + offsets)
    used = (decomposition.used > 0).nonzero().view(-1).tolist()
    show("repair", combined(decomposition.components[used].float()))
    for draw in range(draws):
        groups = [plan.null(draw * len(used) + j, 0).group for j in range(len(used))]
        vectors = [group_sum(run.source("fisher"), group)[0] for group in groups if group is not None]
        show(f"random groups {draw}", combined(torch.stack(vectors)))


if __name__ == "__main__":
    main()
