"""`npeff steer`: the model with a component turned up or down, beside the model as it is."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from npeff.act.config import SteerConfig
from npeff.collect.session import Prepared, answer_texts, prepare_to_edit, read_prompts, text_prompts
from npeff.decompose.base import Decomposition
from npeff.decompose.run import open_decomposition
from npeff.models.load import LoadedModel
from npeff.models.prompts import encode
from npeff.perturb.config import PerturbConfig, Protocol
from npeff.perturb.evaluate import Divergence
from npeff.perturb.lift import Lifter, Parameters, check_component, check_method, scale_to_unit
from npeff.perturb.protocol import Subject, make_plan
from npeff.perturb.weights import EditedWeights
from npeff.perturb.whitening import DirectionMaker
from npeff.store.run import Run
from npeff.utils import Record, UserError, replace
from npeff.utils.report import record_table

UNIT = 0.1
"""KL divergence of a component's top examples at strength 1, to second order."""


class Steered(Record):
    """What the model makes of a text at one strength of a component."""

    strength: float
    """The strength; 0 is the model as it is."""
    answer: str | None
    """Its answer to the run's prompt; None if it was not asked."""
    probability: float | None
    """What it gives that answer, among all of the task's answers."""
    text: str
    """What it goes on with; nothing if it is a classifier."""


def steer(config: SteerConfig) -> list[Steered]:
    """Print what the model makes of a text at every strength that is asked for.

    Args:
        config: The text, the component and the strengths.

    Returns:
        The model as it is, and then one for each strength.
    """
    run = Run.open(config.run)
    steering = Steering(run, open_decomposition(run, config.decomposition), config.component, config.device)
    found = steering.say(config.text, (0.0, *config.strength), config.tokens, config.plain)
    print(record_table("", found, {"strength": "g", "answer": "", "probability": ".1%", "text": ""}).markdown())
    return found


class Steering:
    """A run's model, in which one component can be turned up and down.

    with steering.hold(2.0) as model:
        ...     # model.network is changed; however the block ends, its weights come back bit for bit
    """

    def __init__(self, run: Run, decomposition: Decomposition, component: int, device: str | None = None) -> None:
        """Load the model, lift the component, and find out which length is strength 1.

        Args:
            run: The run.
            decomposition: One of its decompositions.
            component: Number of the component.
            device: Where to compute; where the run was collected, if not given.

        Raises:
            UserError: There is no such component, or it changes no answer.
        """
        check_method(decomposition)
        check_component(decomposition, component)
        self.run, self.prepared = run, prepare_to_edit(run, device)
        prompts = read_prompts(run, self.prepared)
        config = PerturbConfig(str(run.path), component=(component,))
        self.vector, subject = component_vector(run, decomposition, self.prepared, prompts, config)
        top = Divergence(self.prepared, prompts, subject.tune[-1].top.tolist())
        dz = top.derivatives(self.vector)
        effect = float(top.effects(dz).mean())
        if not 0 < effect < math.inf:
            raise UserError(f"Component {component} changes no answer of the examples that it is tuned on.")
        centred = dz - (top.probabilities * dz).sum(1, keepdim=True)
        own = float(centred.gather(1, torch.from_numpy(top.predictions)[:, None]).mean())
        self.unit = math.copysign(math.sqrt(UNIT / effect), own)
        """Length of the change at strength 1; below 0 if the vector itself points away from the model's answers."""

    @contextlib.contextmanager
    def hold(self, strength: float) -> Iterator[LoadedModel]:
        """Keep the component at a strength for a while.

        Args:
            strength: The strength.

        Yields:
            The model, which is changed inside the block and restored bit for bit behind it.
        """
        with EditedWeights(self.prepared.selection.modules) as weights:
            weights.add(self.vector, strength * self.unit)
            yield self.prepared.model

    def say(self, text: str, strengths: Sequence[float], tokens: int = 24, plain: bool = False) -> list[Steered]:
        """What the model makes of a text.

        Args:
            text: The text.
            strengths: Strengths of the component.
            tokens: Most tokens to go on with.
            plain: Without the run's prompt and its answers.

        Returns:
            One for each strength.
        """
        model, found = self.prepared.model, []
        ids = encode(model.tokenizer, text) if plain else text_prompts(self.run, [text], self.prepared)[0]
        for strength in strengths:
            with self.hold(strength):
                answer, probability = (None, None) if plain else _answer(self.prepared, ids)
                goes_on = "" if model.classifies or not tokens else _go_on(model, ids, tokens)
                found.append(Steered(strength, answer, probability, goes_on))
        return found


def _answer(prepared: Prepared, ids: Sequence[int]) -> tuple[str, float]:
    with torch.inference_mode():
        probability, answer = prepared.collector.answer_model.logits([ids])[0][0].double().softmax(0).max(0)
    return answer_texts(prepared, [int(answer)])[0], float(probability)


def _go_on(model: LoadedModel, ids: Sequence[int], tokens: int) -> str:
    network: Any = model.network
    inputs = torch.tensor([list(ids)], device=model.device)
    options = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": tokens, "do_sample": False}
    with torch.inference_mode():
        made = network.generate(inputs, pad_token_id=model.tokenizer.eos_token_id or 0, **options)
    return str(model.tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True))


def component_vector(
    run: Run, decomposition: Decomposition, prepared: Prepared, prompts: Sequence[Sequence[int]], config: PerturbConfig
) -> tuple[Parameters, Subject]:
    """Lift a component as `npeff perturb` does by default, also where nothing is held out.

    Args:
        run: The run.
        decomposition: One of its decompositions.
        prepared: The run's model.
        prompts: Token ids of all examples.
        config: The one component, the direction and the seed.

    Returns:
        A vector of length 1: module name → [d_out, columns]; and the component with its examples.
    """
    protocol: Protocol = "heldout" if decomposition.notes.held_out else "paper"
    config = replace(config, protocol=protocol, random=min(config.random, len(run.table) // 2))
    maker = DirectionMaker(run, decomposition, make_plan(run, decomposition, config), config, prepared)
    subject = maker.plan.component(config.component[0])
    (vector,) = Lifter(run, prepared, prompts).lift(maker.make([subject]).sums)
    scale_to_unit(vector)
    return vector, subject
