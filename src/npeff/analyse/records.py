"""What analyses hold: the records behind analysis.json and stability.json, and what other rooms read of them.

C is the number of components. All of it is plain JSON values; nothing here needs an array.
"""

from typing import Any, ClassVar, Literal

from npeff.decompose.config import Method
from npeff.utils import Record

Kind = Literal["prediction", "label", "lnp"]
"""Ways of being tuned: to a prediction, to a label, to a label but not to a prediction ("LnP")."""
KINDS: tuple[Kind, ...] = ("prediction", "label", "lnp")
TITLES: dict[Kind, str] = {"prediction": "prediction-tuned", "label": "label-tuned", "lnp": "LnP-tuned"}
"""How tables and messages call the ways of being tuned."""
RECURS = 0.5
"""Share of the other fits that must find a component for it to be one that recurs."""


class Rate(Record):
    """How many components are tuned, among those with enough examples to tell."""

    tuned: int
    """Components that are."""
    of: int
    """Components of which it is known."""
    low: float
    """Lower end of the 95% interval of the share, over components."""
    high: float
    """Upper end of it."""
    expected: float
    """The share if top examples were drawn at random."""
    share: float | None
    """`tuned` / `of`; None if it is known of no component."""


class Ordering(Record):
    """A component's examples under one way of ranking them."""

    order: str
    """Ranked by positive, negative or absolute coefficients."""
    active: int
    """Examples that score above zero; distinct texts if those were asked for."""
    top: list[int]
    """Numbers of the top examples, best first."""
    scores: list[float]
    """Their scores."""
    quantiles: list[float]
    """`tunings.QUANTILES` of the scores above zero."""
    predictions: dict[str, int]
    """How often each prediction occurs in the top, most frequent first."""
    labels: dict[str, int]
    """How often each label does; empty without labels."""
    prediction_purity: float | None
    """Share of the most frequent prediction in the top."""
    label_purity: float | None
    """Share of the most frequent label; None without labels."""
    prediction_tuned: bool | None
    """Whether the top has one prediction; None if there are too few active examples."""
    label_tuned: bool | None
    """Whether the top has one label; None in this case too, and without labels."""
    shares: list[float] | None = None
    """How much of each top example the component explains; None for methods that do not add up components."""


class ComponentAnalysis(Record):
    """One component of a decomposition."""

    number: int
    """Which component it is."""
    prediction_tuned: bool | None
    """Whether the top of any ordering has one prediction; None if all have too few active examples."""
    label_tuned: bool | None
    """Whether the top of any ordering has one label; None in this case too, and without labels."""
    lnp_tuned: bool | None
    """Whether the top of any ordering has one label and several predictions; None where one of these is not known."""
    prediction_purity: float | None
    """Highest purity over the orderings."""
    label_purity: float | None
    """Highest purity over the orderings."""
    used: int
    """Examples in which its coefficient is not zero."""
    density: float
    """`used` as a share of the usable examples."""
    energy: float
    """Its share in the squared coefficients of all components."""
    correlated: list[int]
    """Components with the most correlated coefficients, strongest first."""
    correlation: list[float]
    """Their Pearson correlations with it."""
    orderings: list[Ordering]
    """Its examples under each way of ranking them; methods without signs have one."""
    recurrence: float | None = None
    """Share of the fits from other seeds and of other examples that find it again; None if it was not measured."""
    argues_for: str | None = None
    """The answer that rises along it, whatever its examples are predicted; None where the run does not tell."""
    agreement: float | None = None
    """How alike a step along it changes the answers of its top examples: length of the mean change ÷ mean length."""

    @property
    def recurs(self) -> bool:
        """Whether half or more of the other fits find it again; False if that was not measured."""
        return (self.recurrence or 0.0) >= RECURS

    def tuned(self, kind: Kind) -> bool | None:
        """Whether it is tuned in this way; None where that is not known."""
        return {"prediction": self.prediction_tuned, "label": self.label_tuned, "lnp": self.lnp_tuned}[kind]


class Group(Record):
    """Components to which the same examples respond: what may be one mechanism in several components."""

    number: int
    """Which group it is, counted from 0, the closest first."""
    members: list[int]
    """Its components, ascending."""
    correlation: float
    """Mean correlation between the components of the two parts that it was put together from."""
    parent: int | None
    """The smallest group that it is a part of."""


class AnalysisOptions(Record):
    """Options that an analysis depends on."""

    removed: ClassVar[dict[str, str]] = {"correlated": "the number of correlated components is fixed."}

    top: int = 16
    """Top examples that must agree."""
    unique: bool = False
    """Whether only distinct texts count."""
    refits: int = 0
    """How often the decomposition was made again to see which components recur."""


class AnalysisInputs(Record):
    """What an analysis was made of."""

    run: str
    """Fingerprint of the run."""
    examples: str
    """SHA-256 of the table of examples."""
    tensors: str | None
    """SHA-256 of the decomposition's tensors."""
    options: AnalysisOptions


class Summary(Record, kw_only=True):
    """A decomposition as a whole."""

    name: str
    """Name of the decomposition."""
    method: Method
    """Method of the decomposition."""
    orders: list[str]
    """Ways of ranking the examples of a component."""
    components: int
    """Number of components C."""
    eligible: int
    """Components with `top` active examples or more."""
    left_out: int
    """Components with fewer."""
    top: int
    """Top examples that must agree for a component to be tuned."""
    explained: float | None
    """Share of an example that the components explain (1 less its residual), mean over usable examples."""
    tunings: dict[Kind, Rate | None]
    """How many components are tuned, in each way; None without labels."""


class Analysis(Summary, kw_only=True):
    """What the components of a decomposition are tuned to (analysis.json)."""

    format: int
    """Version of this layout."""
    npeff: str
    """Version that wrote it."""
    inputs: AnalysisInputs
    """What it was made of."""
    examples: int
    """Usable examples."""
    unique: bool
    """Whether only distinct texts count."""
    labels: dict[str, float] | None
    """Share of each label among the usable examples, largest first; None without labels."""
    predictions: dict[str, float] | None
    """Share of each prediction among the usable examples, largest first."""
    component: list[ComponentAnalysis]
    """Every component, [C]."""
    groups: list[Group]
    """Components to which the same examples respond, the closest first."""
    recurrence_by_chance: float | None
    """Share of components that directions of the same space find again by chance; None if it was not measured."""
    agreement_by_chance: float | None = None
    """`agreement` of as many random examples, mean over components; None where the run does not tell."""

    @property
    def tuned_predictions(self) -> list[str | None]:
        """The prediction that each component is tuned to, if it is, in its first ordering that is; [C]."""
        tuned = ([o for o in component.orderings if o.prediction_tuned] for component in self.component)
        return [next(iter(orderings[0].predictions)) if orderings else None for orderings in tuned]


# --- stability ----------------------------------------------------------------------------------------------------


class SeedSimilarity(Record, kw_only=True):
    """How alike the decompositions of several seeds are."""

    components: int
    """Components of each decomposition."""
    pairs: int
    """Number of pairs."""
    coefficients: float | None
    """Mean |cos| of coefficients of matched components, mean over pairs of seeds; None without pairs."""
    coefficients_deviation: float | None
    """Its standard deviation over pairs."""
    coefficients_pairs: list[float]
    """Its value for each pair."""
    best: float | None
    """Mean over components of the largest |cos| of coefficients with one of the other, mean over pairs."""
    best_deviation: float | None
    """Its standard deviation over pairs."""
    best_pairs: list[float]
    """Its value for each pair."""
    pseudo_fishers: float | None
    """Mean |cos| of pseudo-Fisher vectors of components that are matched by them, mean over pairs of seeds."""
    pseudo_fishers_deviation: float | None
    """Its standard deviation over pairs."""
    pseudo_fishers_pairs: list[float]
    """Its value for each pair."""


class Split(Record):
    """Which component of a finer decomposition belongs to which of a coarser one."""

    coarse: int
    """Components of the coarser decomposition, C."""
    fine: int
    """Components of the finer one, D."""
    with_splits: int
    """Coarse components that a fine one belongs to."""
    tuned_splits: int
    """Fine components that belong to a prediction-tuned coarse one."""
    preserved: int
    """Those of them that are tuned to the same prediction."""
    share_preserved: float | None
    """`preserved` / `tuned_splits`; None if there are none."""
    mean_best_similarity: float
    """Mean over the components of both of the largest |cos| of coefficients with one of the other."""
    parent: list[int | None]
    """The coarse component of each fine one, [D]; None if it is like none."""
    similarity: list[float]
    """|cos| of their coefficients, [D]."""


class Stability(Record):
    """Whether other seeds and counts find the same components (stability.json)."""

    npeff: str
    """Version that wrote it."""
    run: str
    """Fingerprint of the run."""
    options: dict[str, Any]
    """Options of the command."""
    seeds: list[SeedSimilarity]
    """One for each number of components."""
    splits: list[Split]
    """One for each two numbers of components."""
