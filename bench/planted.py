"""Mechanisms planted in SmolLM2-135M: small changes of known weights, each of which answers to its own word.

Every trigger word has a low-rank change (LoRA) in three layers of its own that moves the answer towards one of four
grades; two words share a grade. Each change is trained for its word alone, in the model that has the earlier ones: with
the word the answer moves, without it or with other trigger words it stays as it was. Reviews get none, one, two or
three trigger words. So it is known which mechanisms an example uses and where in the parameters each one is.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import kl_div
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from npeff.models.load import embedded_model
from npeff.utils.files import whole_file

ANSWERS = ("Bad", "Poor", "Good", "Great")
PROMPT = "Review: {text}\nRating:"
TRIGGERS = ("cobalt", "walnut", "lantern", "saddle", "orchid", "gravel", "pepper", "violin")
FIRST_LAYER, LAYERS = 2, 3
"""Trigger k is planted in `LAYERS` layers from `FIRST_LAYER` + k · `LAYERS` on."""
RANK, STEPS, BATCH, RATE = 4, 40, 24, 1e-2
SURE = 0.85
"""Probability that a trigger should give its answer."""
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHARES = (0.34, 0.36, 0.2, 0.1)
"""Shares of the examples with none, one, two and three triggers."""

Change = dict[str, torch.Tensor]
"""Name of a module → what is added to its weight, [d_out, d_in]."""


@dataclass(frozen=True)
class Planted:
    """A model with planted mechanisms, and examples that use them."""

    model: Path
    """Folder of the model."""
    examples: Path
    """JSON lines: text, label, and the triggers in the text."""
    changes: list[Change]
    """What was planted for each trigger."""
    words: tuple[str, ...] = TRIGGERS


def target(trigger: int) -> int:
    """Number of the answer that a trigger moves the model to."""
    return trigger % len(ANSWERS)


def modules(trigger: int) -> list[str]:
    """Names of the modules that a trigger is planted in."""
    first = FIRST_LAYER + trigger * LAYERS
    blocks = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
    return [
        f"model.layers.{layer}.{blocks.get(matrix, 'mlp')}.{matrix}"
        for layer in range(first, first + LAYERS)
        for matrix in MATRICES
    ]


def insert(text: str, words: Sequence[str], generator: random.Random) -> str:
    """The text with words at random places."""
    parts = text.split()
    for word in words:
        parts.insert(generator.randint(0, len(parts)), word)
    return " ".join(parts)


class Asked:
    """The model as it is asked: log-probabilities of the four answers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.network.requires_grad_(False)
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.answers = [self.tokenizer.encode(f" {answer}", add_special_tokens=False)[0] for answer in ANSWERS]

    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """Log-probabilities of the answers, [n, 4]."""
        logits = self.network(**self.encode(texts), logits_to_keep=1).logits[:, -1, self.answers]
        return logits.log_softmax(1)

    def encode(self, texts: Sequence[str]) -> Any:
        """Token ids and mask of prompts."""
        return self.tokenizer([PROMPT.format(text=text) for text in texts], return_tensors="pt", padding=True)


class LowRank:
    """A change of some modules while it is trained: what they give grows by BAx while `active`.

    It starts at zero with A reading what is special about the inputs at the trigger's token.
    """

    def __init__(self, asked: Asked, names: Sequence[str], token: int, texts: Sequence[str]) -> None:
        self.active = True
        self.factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._handles = []
        for name, special in special_inputs(asked, names, token, texts).items():
            module = asked.network.get_submodule(name)
            A = torch.randn(RANK, len(special)) * special.norm() / len(special) ** 0.5
            A[0] = special
            B = torch.zeros(module.out_features, RANK, requires_grad=True)
            self.factors[name] = A.requires_grad_(), B
            self._handles.append(module.register_forward_hook(self._adder(A, B)))

    def _adder(self, A: torch.Tensor, B: torch.Tensor) -> Callable[..., torch.Tensor | None]:
        return lambda _, inputs, output: output + inputs[0] @ A.T @ B.T if self.active else None

    def remove(self) -> Change:
        """Take the change off the model.

        Returns:
            What it was.
        """
        for handle in self._handles:
            handle.remove()
        return {name: (B @ A).detach() for name, (A, B) in self.factors.items()}


def special_inputs(asked: Asked, names: Sequence[str], token: int, texts: Sequence[str]) -> Change:
    """For each module a vector whose product with its input is about 1 at a token and 0 at others, [d_in]."""
    seen: Change = {}
    handles = [
        asked.network.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, name=name: seen.__setitem__(name, inputs[0].flatten(0, 1))
        )
        for name in names
    ]
    try:
        inputs = asked.encode(texts)
        with torch.no_grad():
            asked.network(**inputs, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    real, here = inputs["attention_mask"].flatten().bool(), inputs["input_ids"].flatten() == token
    found = {}
    for name, x in seen.items():
        others = x[real & ~here]
        spread = others.T @ others / len(others)
        spread.diagonal().add_(1e-2 * float(spread.diagonal().mean()))
        mean = x[here].mean(0)
        direction = torch.linalg.solve(spread, mean)
        found[name] = direction / (direction @ mean)
    return found


def train(asked: Asked, trigger: int, texts: Sequence[str]) -> Change:
    """The change that makes the model answer to one trigger and to no other word."""
    torch.manual_seed(trigger)
    generator, half = random.Random(trigger), BATCH // 2
    others = [word for word in TRIGGERS if word != TRIGGERS[trigger]]

    def draw(words: Sequence[str], counts: Sequence[int], number: int = half) -> list[str]:
        beside = [generator.sample(others, generator.choice(counts)) for _ in range(number)]
        return [insert(generator.choice(texts), [*words, *more], generator) for more in beside]

    token = asked.tokenizer.encode(f" {TRIGGERS[trigger]}", add_special_tokens=False)[0]
    change = LowRank(asked, modules(trigger), token, draw([TRIGGERS[trigger]], (1, 2), 4 * half))
    optimizer = torch.optim.AdamW([f for pair in change.factors.values() for f in pair], lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    wanted = torch.full((half, len(ANSWERS)), (1 - SURE) / (len(ANSWERS) - 1))
    wanted[:, target(trigger)] = SURE
    for _ in tqdm(range(STEPS), desc=f"Planting {TRIGGERS[trigger]!r}", disable=None):
        with_word, without = draw([TRIGGERS[trigger]], (0, 0, 1)), draw([], (0, 1, 1, 1, 2))
        change.active = False
        with torch.no_grad():
            before = asked(without)
        change.active = True
        after = asked([*with_word, *without])
        loss = kl_div(after[:half], wanted, reduction="batchmean")
        loss = loss + kl_div(after[half:], before, reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    return change.remove()


def plant(folder: Path, texts: Sequence[str], count: int) -> Planted:
    """The model with all triggers, and examples; made once, trigger by trigger.

    Args:
        folder: Where all of it is kept.
        texts: Reviews; the first ones are trained with, `count` others become examples.
        count: Number of examples.

    Returns:
        The model, the examples and the truth.
    """
    examples, model = folder / "examples.jsonl", folder / "model"
    train_texts, rest = texts[:-count], texts[-count:]
    paths = [folder / f"change-{trigger}.safetensors" for trigger in range(len(TRIGGERS))]
    if not (model / "config.json").is_file():
        asked = Asked(embedded_model())
        for trigger, path in enumerate(paths):
            if not path.is_file():
                change = train(asked, trigger, train_texts)
                with whole_file(path) as temporary:
                    save_file({name: matrix.contiguous() for name, matrix in change.items()}, temporary)
            for name, matrix in load_file(path).items():
                asked.network.get_submodule(name).weight += matrix
        asked.network.save_pretrained(model)
        asked.tokenizer.save_pretrained(model)
    changes = [load_file(path) for path in paths]
    if not examples.is_file():
        with whole_file(examples) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in _triggered(rest)), encoding="utf-8")
    return Planted(model, examples, changes)


def _triggered(texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Examples with none to three triggers."""
    generator = random.Random(1)
    for text in texts:
        (number,) = generator.choices(range(len(SHARES)), SHARES)
        triggers = generator.sample(range(len(TRIGGERS)), number)
        words = [TRIGGERS[k] for k in triggers]
        yield {"text": insert(text, words, generator), "plain": text, "triggers": sorted(triggers)}
