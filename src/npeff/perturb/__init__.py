"""From a component back to the model's parameters: lifting, compressed sensing, and what a perturbation does."""

from npeff.perturb.evaluate import Evaluator, Outcome
from npeff.perturb.lift import Lifter, Parameters
from npeff.perturb.protocol import Plan, make_plan, plan_directions
from npeff.perturb.run import PerturbConfig, perturb
from npeff.perturb.weights import EditedWeights

__all__ = [
    "EditedWeights",
    "Evaluator",
    "Lifter",
    "Outcome",
    "Parameters",
    "PerturbConfig",
    "Plan",
    "make_plan",
    "perturb",
    "plan_directions",
]
