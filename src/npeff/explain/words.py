"""How much each word of an example carries of a component: the coefficient without the word.

The truth is plain leave-one-out: the text without the word, collected and fitted anew (`leave_out_exactly`). `LeaveOut`
needs less. What comes before a removed word is the same with and without it, so its keys and values are
computed once, and only what comes behind is run and backpropagated for every word; so is the first token, which most
models attend to for want of anything better, and which often has the longest gradient of all:

    g(without) ≈ Σ over these positions + a · (what the other positions gave to the gradient of the whole text)

with the factor a by which the gradient of these positions changed, in least squares. Positions behind the word
are exact; the first token lacks what comes to it through words that are not run again. Rows are read by a part of the
sketch, and computed in bfloat16 where that is faster. How well this agrees with the truth is measured by
`make bench ONLY=explain`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pyarrow as pa
import torch
from torch import nn

from npeff.analyse.probe import explain_texts
from npeff.collect.capture import Capture
from npeff.collect.directions import make_directions, predicted, split_length
from npeff.collect.session import Prepared, longest_prompt
from npeff.decompose.base import Decomposition
from npeff.decompose.npeff import FINAL_SWEEPS, FINAL_TOLERANCE
from npeff.decompose.solver import fit_coefficients, gram
from npeff.models.answers import TREE_TOLERANCE
from npeff.models.prompts import Prompts
from npeff.store.run import Run
from npeff.tasks.config import FIELD
from npeff.tasks.data import Dataset
from npeff.tasks.task import Before
from npeff.utils import Record, UserError

WORD = re.compile(r"(?:(?<!\w)['\u2019])?\w+(?:['\u2019-]\w+)*|[^\w\s]+")
"""A word, or punctuation."""
MOST_WORDS = 64
"""Words of a text that are removed one by one; of a longer one, phrases first."""
FIRST = 1
"""Tokens at the beginning of a prompt that are run again without every word."""
FULL = 256
"""Tokens that make a batch large enough to be fast."""
Span = tuple[int, int]
"""Words from the first to before the last: (3, 4) is the fourth word alone."""


class Words(Record):
    """An example as tokens and words."""

    text: str
    """Its text."""
    fields: Mapping[str, str]
    """Other columns that the prompt names."""
    words: list[str]
    """Words of the text, n of them."""
    places: list[tuple[int, int]]
    """Where each is in the text: first character, and that behind the last."""
    tokens: list[int]
    """Token ids of the prompt."""
    spans: list[tuple[int, int]]
    """Tokens of each word: first, and that behind the last. Other tokens are the template's."""

    def without(self, span: Span) -> str:
        """The text without some words, and without the blank before them."""
        first, last = self.places[span[0]][0], self.places[span[1] - 1][1]
        before, after = self.text[:first], self.text[last:]
        return (before.rstrip() if after[:1].isspace() or not after else before) + (after if before else after.lstrip())


def read_words(prepared: Prepared, before: Before, text: str, fields: Mapping[str, str] | None = None) -> Words:
    """Find the words of an example and their tokens.

    Args:
        prepared: Model and task.
        before: What stands before every question: a few-shot prefix, or turns of a chat.
        text: The example's text.
        fields: Other columns that the prompt names.

    Returns:
        The words that have tokens of their own.

    Raises:
        UserError: The tokenizer does not tell where its tokens stand, or the prompt does not fit the model.
    """
    task, tokenizer, fields = prepared.task, prepared.model.tokenizer, dict(fields or {})
    if not getattr(tokenizer, "is_fast", False):
        raise UserError("The model's tokenizer does not tell where in a text its tokens stand, so there are no words.")
    example = Dataset(pa.table({"text": [text], **{FIELD + name: [fields[name]] for name in task.fields}}), *before)
    writer = Prompts(task, tokenizer)
    (prompt,), (tokens,), (question,) = writer.write(example), writer.tokens(example), example.prompts(task)
    if not 0 < len(tokens) <= (most := longest_prompt(prepared)):
        raise UserError(f"The prompt has {len(tokens)} tokens, but the model takes 1 to {most}. Shorten the text.")
    encoded = tokenizer(prompt, add_special_tokens=not task.is_chat, return_offsets_mapping=True)
    offsets = encoded.offset_mapping[: len(tokens)]
    begin = prompt.rfind(question) + len(example.prefix) + task.text_start(fields)  # a template puts turns around it
    words, places, spans = [], [], []
    behind = 0
    for match in WORD.finditer(text):
        first, last = begin + match.start(), begin + match.end()
        # a token belongs to the word that its last character is in; a blank of its own, to the word behind it
        ends = [(first, last) if prompt[a:b] != " " else (first - 1, first) for a, b in offsets]
        own = [t for t, (_, b) in enumerate(offsets) if t >= behind and ends[t][0] < b <= ends[t][1]]
        if own:
            words.append(match[0])
            places.append(match.span())
            spans.append((own[0], own[-1] + 1))
            behind = own[-1] + 1
    return Words(text, fields, words, places, tokens, spans)


class Removed(Record):
    """An example and what is left of its coefficients without some of its words."""

    coefficients: torch.Tensor
    """Of the whole example, [C]."""
    without: torch.Tensor
    """Without each of n spans of words, [n, C]."""

    def effects(self, component: int) -> torch.Tensor:
        """Share of a component's coefficient that is lost without each span, [n]; below 0 where it grows."""
        whole = self.coefficients[component]
        return 1 - self.without[:, component] / whole if whole != 0 else torch.zeros(len(self.without))


def leave_out_exactly(
    run: Run, decomposition: Decomposition, prepared: Prepared, example: Words, spans: Sequence[Span]
) -> Removed:
    """Collect and fit the text without each of some spans of words.

    Args:
        run: The run.
        decomposition: One of its decompositions.
        prepared: The run's model, task and sketch.
        example: The example.
        spans: What to remove.

    Returns:
        Coefficients with and without.
    """
    texts = [example.text, *(example.without(span) for span in spans)]
    fields = [example.fields] * len(texts) if prepared.task.fields else ()
    coefficients = explain_texts(run, decomposition, texts, prepared, fields).coefficients
    return Removed(coefficients[0], coefficients[1:])


class _Whole(Record):
    """A batch of whole examples: what the variants of them build on."""

    V: torch.Tensor
    """Output directions, float64 [B, k, r]."""
    sums: torch.Tensor
    """Rows of the positions before each boundary between words, [B, k, boundaries, q]; the last are the whole rows."""
    boundaries: list[list[int]]
    """For each example, the positions that are boundaries."""
    cache: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each layer, [B, heads, T, d]."""

    def before(self, example: int, boundary: int) -> torch.Tensor:
        """Rows of the positions of an example before a boundary, [k, q]."""
        return self.sums[example, :, self.boundaries[example].index(boundary)]


class LeaveOut:
    """Coefficients of examples without some of their words, at a fraction of what collecting them would cost."""

    def __init__(self, run: Run, decomposition: Decomposition, prepared: Prepared) -> None:
        self.run, self.decomposition, self.prepared = run, decomposition, prepared
        self._model = prepared.collector.answer_model
        if decomposition.parts == "matrices":  # others go the exact way
            self._part, self._components = prepared.collector.sketch.part(decomposition.components)
            self._overlap = gram(decomposition.components).square().float()
            self._rounded = partial(torch.autocast, "cpu", torch.bfloat16, enabled=rounds(prepared))
        self._works: bool | None = None
        """Whether the short way is open to this model and method; known after the first example."""

    def remove(self, examples: Sequence[Words], spans: Sequence[Sequence[Span]]) -> list[Removed]:
        """Coefficients without each of some spans of words.

        Args:
            examples: m examples.
            spans: For each example, what to remove.

        Returns:
            One for each example.
        """
        if not all(self._short_way(example) for example in examples):
            pairs = zip(examples, spans, strict=True)
            return [leave_out_exactly(self.run, self.decomposition, self.prepared, *pair) for pair in pairs]
        found: dict[int, Removed] = {}
        prompts = [example.tokens for example in examples]
        for batch in self.prepared.collector.batches(prompts, self.prepared.config.batch_tokens):
            parts = self._batch([examples[i] for i in batch], [spans[i] for i in batch])
            found |= dict(zip(batch, parts, strict=True))
        return [found[i] for i in range(len(examples))]

    def _short_way(self, example: Words) -> bool:
        """Whether the rest of a prompt behind a cache gives the logits of the whole prompt; a word must not end it."""
        if self._works is None:
            fits = self.decomposition.parts == "matrices" and self._model.answers.kind in ("tokens", "vocabulary")
            self._works = fits and self._continues(example.tokens)
        return self._works and example.spans[-1][1] < len(example.tokens)

    def _continues(self, tokens: list[int]) -> bool:
        half = len(tokens) // 2
        try:
            with torch.inference_mode():
                cache, every = _new_cache([]), range(len(tokens))
                self._model.logits_after([tokens], cache, [every], [range(0)])
                again, left = _new_cache(_layers(cache)), [0, *every[half:]]
                rest = self._model.logits_after([[tokens[t] for t in left]], again, [left], [every[1:half]])
                whole = self._model.logits([tokens])[0]
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):  # models without such a cache
            return False
        error = float((rest - whole).abs().max() / whole.abs().max().clamp_min(1))
        return error < TREE_TOLERANCE[self.prepared.model.config.dtype]

    def _batch(self, examples: list[Words], spans: list[Sequence[Span]]) -> list[Removed]:
        whole = self._run_whole(examples)
        owners = [b for b, own in enumerate(spans) for _ in own]
        cuts = [(examples[b].spans[i][0], examples[b].spans[j - 1][1]) for b, own in enumerate(spans) for i, j in own]
        rests = [
            [*examples[b].tokens[: min(FIRST, start)], *examples[b].tokens[stop:]]
            for b, (start, stop) in zip(owners, cuts, strict=True)
        ]
        rows = torch.zeros(len(rests), *whole.sums.shape[1:2], whole.sums.shape[3])
        for batch in self._batches(rests):
            own = [owners[i] for i in batch]
            again, V = self._run_rests([rests[i] for i in batch], own, [cuts[i][0] for i in batch], whole)
            places = [(min(FIRST, cuts[i][0]), *cuts[i]) for i in batch]
            first, start, stop = (
                torch.stack([whole.before(b, place) for b, place in zip(own, column, strict=True)])
                for column in zip(*places, strict=True)
            )
            once = whole.sums[own, :, -1] - stop + first
            rows[batch] = _completed(again, V, whole.V[own], once, start - first)
        coefficients = self._fit(torch.cat([whole.sums[:, :, -1], rows]))
        without = torch.split(coefficients[len(examples) :], [len(own) for own in spans])
        return [Removed(*pair) for pair in zip(coefficients[: len(examples)], without, strict=True)]

    def _batches(self, rests: list[list[int]]) -> Iterator[list[int]]:
        """Put rests of about the same length together: padding costs as much as tokens."""
        for batch in self.prepared.collector.batches(rests, self.prepared.config.batch_tokens):
            lengths, first = [len(rests[i]) for i in batch], 0
            for i, length in enumerate(lengths):
                if (i - first) * lengths[first] >= FULL and length < lengths[first]:
                    yield batch[first:i]
                    first = i
            yield batch[first:]

    def _directions(self, z: torch.Tensor) -> torch.Tensor:
        """Output directions, float64 [B, k, r]; random ones are the same for all."""
        p = z.detach().double().softmax(1)
        if self.decomposition.kind == "gradient":
            return predicted(p)[:, None]
        return make_directions(self.prepared.config.directions, p, [0] * len(p))[0]

    def _run_whole(self, examples: list[Words]) -> _Whole:
        prompts = [example.tokens for example in examples]
        boundaries = [sorted({0, FIRST, len(e.tokens), *(t for span in e.spans for t in span)}) for e in examples]
        places, counted = _segments(boundaries, max(map(len, prompts)))
        with self._rounded(), Capture(self.prepared.selection.modules, self._part.fold_input) as capture:
            capture.start(len(prompts), len(prompts), max(map(len, prompts)))
            cache = _new_cache([])
            z = self._model.logits_after(
                prompts, cache, [range(len(each)) for each in prompts], [range(0)] * len(prompts)
            )
            V = self._directions(z)
            directions, lengths = split_length(V.float())
            parts = []
            for row in range(V.shape[1]):
                total = self._part.accumulator(len(places))

                def consumer(
                    module: Any, delta: torch.Tensor, folded: torch.Tensor, total: torch.Tensor = total
                ) -> None:
                    gathered = [part.reshape(-1, part.shape[-1])[places] for part in (delta, folded)]
                    self._part.accumulate(module, gathered[0] * counted[:, :, None], gathered[1], total)

                capture.backward(z, directions[:, row], consumer, keep_graph=row + 1 < V.shape[1])
                parts.append(
                    self._part.finish(total).view(len(prompts), -1, self._part.dim) * lengths[:, row, None, None]
                )
        sums = torch.stack(parts, 1).cumsum(2).cpu()
        sums = torch.nn.functional.pad(sums, (0, 0, 1, 0))  # nothing comes before the first boundary
        return _Whole(V, sums, boundaries, [(k.detach(), v.detach()) for k, v in _layers(cache)])

    def _run_rests(
        self, rests: list[list[int]], owners: list[int], starts: list[int], whole: _Whole
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the positions that are run again [n, k, q], and directions [n, k, r]."""
        longest = max(starts)
        cache = _new_cache([(k[owners, :, :longest], v[owners, :, :longest]) for k, v in whole.cache])
        with self._rounded(), Capture(self.prepared.selection.modules, self._part.fold_input) as capture:
            capture.start(len(rests), len(rests), max(map(len, rests)))
            firsts = [min(FIRST, start) for start in starts]
            positions = [
                [*range(first), *range(start, start + len(rest) - first)]
                for rest, first, start in zip(rests, firsts, starts, strict=True)
            ]
            z = self._model.logits_after(rests, cache, positions, [range(FIRST, start) for start in starts])
            V = self._directions(z)
            rows = capture.rows(z, V.float(), self._part)
        return rows.cpu(), V

    def _fit(self, rows: torch.Tensor) -> torch.Tensor:
        """Coefficients [n, C] of rows [n, k, q] at any length, components fixed."""
        size = (rows @ rows.mT).square().sum((1, 2)).sqrt()
        products = (rows @ self._components.cpu().T).square().sum(1)
        N = (products / torch.where(size > 0, size, 1.0)[:, None]).T.contiguous()
        return fit_coefficients(torch.zeros_like(N), N, self._overlap, FINAL_SWEEPS, FINAL_TOLERANCE).T


def rounds(prepared: Prepared) -> bool:
    """Whether words are weighed in bfloat16: the processor multiplies it faster, and the model has plain layers."""
    model = prepared.model
    able: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    plain = all(type(each.module) is nn.Linear for each in prepared.selection.modules) and not model.quantised
    fast = model.device.type == "cpu" and (able.get("avx512_bf16") or able.get("amx_bf16"))
    return bool(fast and plain and model.config.dtype == "float32")


def _completed(
    again: torch.Tensor, V: torch.Tensor, V_once: torch.Tensor, once: torch.Tensor, others: torch.Tensor
) -> torch.Tensor:
    """Rows of examples without some words, from those of the positions that were run again.

    Args:
        again: Rows of the positions that were run again without the words, [n, k, q].
        V: Output directions without the words, [n, k, r].
        V_once: Output directions of the whole examples.
        once: Rows of the same positions in the whole examples.
        others: Rows of the positions that were not run again, in the whole examples.

    Returns:
        [n, k, q].
    """
    # rows are V J: the directions of now as combinations of those of the whole example
    mix = (V @ V_once.mT @ torch.linalg.pinv(V_once @ V_once.mT, hermitian=True, rtol=1e-10)).float().cpu()
    once, others = mix @ once, mix @ others
    size = once.square().sum((1, 2))
    factor = torch.where(size > 0, (again * once).sum((1, 2)) / size.clamp_min(1e-30), 1.0)
    return again + factor[:, None, None] * others


def _segments(boundaries: list[list[int]], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the tokens between boundaries, [B · most segments, longest], and which of them count."""
    most = max(map(len, boundaries)) - 1
    pieces = [
        [range(b * width + start, b * width + stop) for start, stop in pairwise(own)]
        for b, own in enumerate(boundaries)
    ]
    padded = [*(piece for own in pieces for piece in [*own, *[range(0)] * (most - len(own))])]
    longest = max(map(len, padded))
    places = torch.tensor([[*piece, *[0] * (longest - len(piece))] for piece in padded])
    counted = torch.tensor([[1.0] * len(piece) + [0.0] * (longest - len(piece)) for piece in padded])
    return places, counted


def _new_cache(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    from transformers import DynamicCache

    return DynamicCache(layers) if layers else DynamicCache()


def _layers(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def phrases(words: int) -> list[Span]:
    """What is removed from a text one at a time: each word, or in a long text each phrase of a few words."""
    size = -(-words // MOST_WORDS) or 1
    return [(start, min(start + size, words)) for start in range(0, words, size)]
