"""Options of this room's commands: the command line, the Python call and the replay file are made from them."""

from typing import ClassVar

import tyro

from npeff.utils import Record


class ExplainConfig(Record):
    """Say what is inside components: their words, answers, heads and neurons, and names. Run it again to continue."""

    run: tyro.conf.Positional[str]
    """Run directory."""
    decomposition: str | None = None
    """Name of the decomposition; the newest that `npeff decompose` has made if not given."""
    component: tuple[int, ...] = ()
    """Numbers of the components; all of them if not given. Names are always given to all."""
    examples: int = 8
    """Top examples of each component whose words are weighed, and as many held-out ones."""
    words: bool = True
    """Weigh the words of examples."""
    parts: bool = True
    """Find heads and neurons, which needs each component as a vector of parameters: the longest step."""
    fidelity: float = 0.9
    """parts: use as few examples as give this cosine with the whole component."""
    memory_gb: float = 4.0
    """Memory for the vectors that are lifted together: one takes 4 bytes for each parameter."""
    seed: int = 0
    """Seed of the random groups that heads and neurons are compared with."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: the best there is."""

    common: ClassVar[tuple[str, ...]] = ("component", "decomposition", "examples", "words", "parts", "device")
    least: ClassVar[dict[str, int]] = {"examples": 1}
    above: ClassVar[dict[str, int]] = {"memory_gb": 0, "fidelity": 0}
    most: ClassVar[dict[str, int]] = {"fidelity": 1}


class CaseStudyConfig(Record):
    """Study one component: its examples with the carrying words removed and swapped, before and after, as a table."""

    run: tyro.conf.Positional[str]
    """Run directory."""
    component: tyro.conf.Positional[int]
    """Number of the component."""
    decomposition: str | None = None
    """Name of the decomposition; the newest that `npeff decompose` has made if not given."""
    examples: int = 4
    """Top examples to take, and as many held-out ones."""
    words: int = 2
    """Carrying words of each example to remove and to swap."""
    seed: int = 0
    """Seed of the words that are put in their place."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: the best there is."""

    common: ClassVar[tuple[str, ...]] = ("decomposition", "examples", "words", "device")

    least: ClassVar[dict[str, int]] = {"examples": 1, "words": 1}
