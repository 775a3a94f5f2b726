"""What a model is really asked, and what it says: on a sample of the examples, before anything is collected."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch

from npeff.collect.session import Prepared, answer_texts
from npeff.collect.summary import ADVICE, CLASSES_ADVICE, answer_lines, answer_warnings
from npeff.models.prompts import SECOND, has_template
from npeff.store.examples import accuracy
from npeff.tasks.data import Dataset
from npeff.utils import Record, percent

SAMPLE = 64
"""Examples that are asked."""
LITTLE = 0.005
"""Where the answers have less of the probability than this, the model would say something else."""
_LONGEST = 2000
"""Characters of the prompt that are shown."""


class Asked(Record):
    """What a model was asked, and what it said."""

    lines: tuple[str, ...]
    """For people to read."""
    warnings: tuple[str, ...]
    """Why components of this task would say little; none if the model does it."""
    accuracy: float | None
    """Share of right answers; None without labels."""
    mass: float
    """Mean probability of all answers together."""
    entropy: float
    """Mean entropy of an example's answers, in bits."""


def ask(prepared: Prepared, dataset: Dataset, prompts: Sequence[list[int]], count: int = SAMPLE) -> Asked:
    """Ask a model some of the examples.

    Args:
        prepared: Model and task.
        dataset: The examples.
        prompts: Token ids of their prompts.
        count: How many to ask at most; they are spread over all of them.

    Returns:
        What it was asked, and what it said.
    """
    rows, task, model = spread(len(prompts), count), prepared.task, prepared.model
    z = torch.empty(len(rows), prepared.collector.answer_model.count)
    mass = torch.empty(len(rows))
    for batch in prepared.collector.batches([prompts[row] for row in rows], prepared.config.batch_tokens):
        found = prepared.collector.answer_model.ask([prompts[rows[i]] for i in batch])
        z[batch], mass[batch] = (part.float().cpu() for part in found)
    chosen = prepared.answers.number([prompts[row] for row in rows], z.argmax(1)[:, None])
    predictions = chosen[:, 0].numpy()
    said = {"prediction": predictions, "prediction_text": answer_texts(prepared, predictions)}
    columns = {"label": dataset.table["label"].take(rows), "set_aside": pa.nulls(len(rows), pa.string())}
    table, share = pa.table(said | columns), float(mass.mean())
    unused = has_template(model.tokenizer) and not task.is_chat and not model.classifies
    warnings = list(answer_warnings(table, task.labels))
    if task.labels and share < LITTLE:
        warnings.append(f"Warning: the answers together have {percent(share)} of the probability: it would say others.")
    if warnings:
        advice = CLASSES_ADVICE if model.classifies else ADVICE
        warnings.append(advice + (" Or --chat, which uses the model's chat template." if unused else ""))
    log_p = z.double().log_softmax(1)
    entropy = float(-(log_p.exp() * log_p).sum(1).mean() / np.log(2))
    about = f"answers together have {percent(share, 3)} of the probability, " if task.labels else ""
    lines = [
        *_prompt(prepared, prompts[rows[0]]),
        *([f"{model.config.model} has a chat template, and is asked without it; --chat uses it."] if unused else []),
        f"Asked on {len(rows)} examples:",
        *(f"  {line}" for line in answer_lines(table, task.labels)),
        f"  {about}entropy {entropy:.2f} of {np.log2(z.shape[1]):.3g} bits",
    ]
    return Asked(tuple(lines), tuple(warnings), accuracy(table, task.labels), share, entropy)


def spread(total: int, count: int) -> list[int]:
    """At most `count` of `total` numbers, evenly spread: data are often sorted by label."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(int)).tolist()


def _prompt(prepared: Prepared, ids: list[int]) -> list[str]:
    """A prompt as the model sees it, special tokens included, and how answers follow."""
    tokenizer, answers = prepared.model.tokenizer, prepared.answers
    text, classes = tokenizer.decode([token % SECOND for token in ids]), answers.kind == "classes"
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}\n[... {len(text) - _LONGEST} characters ...]\n{text[-_LONGEST // 2 :]}"
    own = answers.tokens if answers.kind != "generated" else [answers.tokens[i] for i in answers.own[tuple(ids)]]
    texts = answers.names if classes else [tokenizer.decode(list(each)) for each in own[:10]]
    listed = [repr(text) for text in texts[:10]]
    more = f", ... ({len(own)} in all)" if len(own) > 10 else ""
    verb = "chooses" if classes else "goes on with"
    follow = f"and {verb} {' or '.join(listed)}{more}" if listed else "and goes on with any token"
    return [f"The model reads ({len(ids)} tokens)", *(f"  | {line}" for line in text.split("\n")), follow]
