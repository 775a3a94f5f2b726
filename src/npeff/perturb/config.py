"""Options of this room's commands: the command line, the Python call and the replay file are made from them."""

from dataclasses import field
from typing import ClassVar, Literal

import tyro

from npeff.store.layout import check_name
from npeff.utils import Record, UserError

ALL = "all"
Direction = Literal["whiten", "reject", "plain"]
Protocol = Literal["heldout", "paper"]


class SensingConfig(Record):
    """Compressed sensing."""

    mu: float = 4e-5
    """Weight of the residual is 1/mu: the smaller, the denser the vector. For a sketch of norm 1 and h of length 1."""
    inner_iterations: int = 1
    """Most iterations for each mu; more are slower and fit the sketch more closely."""
    long_steps: bool = False
    """Lengthen steps where the sketch allows (Barzilai and Borwein's rule, as the authors' later FPC-BB does): what is
    very sparse is found in tens of iterations instead of thousands, given 20 inner iterations."""

    least: ClassVar[dict[str, int]] = {"inner_iterations": 1}
    above: ClassVar[dict[str, int]] = {"mu": 0}


class PerturbConfig(Record):
    """Change the model's parameters along components, and measure on held-out examples which predictions change.

    Components of a later command are added to the results of the same name.
    """

    run: tyro.conf.Positional[str]
    """Run directory."""
    decomposition: str | None = None
    """Name of the decomposition; the newest that `npeff decompose` has made if not given. `all`: one after another."""
    component: tuple[int, ...] = ()
    """Numbers of the components to perturb; without any, --count of them are drawn at random."""
    group: tuple[int, ...] = ()
    """Numbers of groups of components, as `npeff analyse` finds them, to perturb in place of components: along the
    direction that their members share most, measured on the examples with the largest sums of their coefficients."""
    count: int = 8
    """How many components to draw, of those that enough examples use."""
    protocol: Protocol = "heldout"
    """heldout: measure on examples that took no part in the fit, the direction, or the choice of ridge, sign and
    length. paper: as in the paper, on the examples that the components are made of; its ratios are in-sample."""
    evaluate_on: str | None = None
    """Another run, collected with the same model and sketch, whose examples are the held-out ones."""
    nulls: int = 8
    """Random groups of examples that take the place of a component's, to see what chance gives; 0: none."""
    elsewhere: str | None = None
    """Text file to measure the damage on, next to the prompts of the built-in tasks; embedded passages if not given."""
    way: Literal["lift", "sensing"] = "lift"
    """lift: the exact vector, by a weighted backward pass over the run's examples. sensing: as in the paper, from the
    sketch alone."""
    direction: Direction = "whiten"
    """whiten: least effect on other examples. reject: as in the paper, orthogonal to other components. plain: the
    component itself."""
    threshold: float = 0.5
    """reject: components with a cosine of at least this size are not rejected from."""
    ridge: float | None = None
    """whiten: what is added to the mean Fisher; chosen on examples that carry no direction if not given."""
    carriers: float = 0.3
    """whiten, reject: share of the examples that carry the direction, which is solved for them; fewer lift faster."""
    fidelity: float = 0.999
    """lift: use as few examples as give this cosine with the whole sum; 1 uses all. A whitened direction needs a high
    one, because leaving examples out undoes the cancellation between them."""
    top: int = 16
    """Top examples of a component; held-out ones are at most a quarter of those to measure."""
    random: int = 128
    """Random examples to compare with, at most; a component's top examples among them do not count."""
    magnitude: float | None = None
    """Length of the change (20 in the paper); without it, the length that gives top examples --target-kl."""
    target_kl: float | None = None
    """Mean KL divergence of top examples to reach, so that methods are compared at equal effect. If not given, 0.01 on
    held-out examples; 0.1 in the paper's protocol, where examples feel about ten times as much of a change that they
    made themselves."""
    predict: bool = False
    """Also compute the ratio that derivatives predict; measuring then takes about twice as long."""
    ranks: bool = False
    """Also compute how much of each matrix's change a low rank would keep; takes seconds a component."""
    curve: tuple[float, ...] = ()
    """Also measure the ratio at these multiples of the magnitude, as 0.1 0.3 1 3, for a figure."""
    save: Literal["nothing", "delta", "adapter", "model"] = "nothing"
    """Write the change of the best sign: alone, as a low-rank adapter (PEFT's layout), or in a copy of the model."""
    adapter_share: float = 0.9
    """adapter: share of each matrix's squared length to keep."""
    memory_gb: float = 4.0
    """Memory for the vectors that are lifted together: one takes 4 bytes for each parameter."""
    seed: int = 0
    """Seed of the components and examples that are drawn."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: the best there is."""
    perturbation: str | None = None
    """Name of the results; made from decomposition, direction and way if not given."""
    overwrite: bool = False
    """Replace results of the same name that were made with other options."""
    sensing: SensingConfig = field(default_factory=SensingConfig)

    common: ClassVar[tuple[str, ...]] = (
        *("component", "group", "count", "decomposition", "direction", "protocol", "evaluate_on", "nulls", "target_kl"),
        *("top", "random", "elsewhere", "save", "perturbation", "overwrite", "device"),
    )
    renamed: ClassVar[dict[str, str]] = {"components": "component", "label": "perturbation"}
    least: ClassVar[dict[str, int]] = {"count": 1, "top": 1, "random": 1, "nulls": 0}
    most: ClassVar[dict[str, int]] = dict.fromkeys(("fidelity", "threshold", "carriers", "adapter_share"), 1)
    above: ClassVar[dict[str, int]] = dict.fromkeys((*most, "target_kl", "memory_gb", "magnitude", "ridge", "curve"), 0)

    @property
    def aim(self) -> float:
        """The KL divergence of top examples to reach, also if nobody says."""
        return self.target_kl or (0.1 if self.protocol == "paper" else 0.01)

    def _check(self) -> None:
        if self.protocol == "paper" and self.evaluate_on is not None:
            raise UserError("--evaluate-on is for held-out examples: leave --protocol paper out.")
        check_name(self.perturbation, "--perturbation")
        if self.component and self.group:
            raise UserError("--component and --group have results of their own: give one of them at a time.")
        if self.decomposition == ALL and (self.perturbation or self.component or self.group):
            raise UserError(
                f"--decomposition {ALL} goes without --perturbation, --component, --group, which are for a single one."
            )
