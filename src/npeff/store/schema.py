"""What the files of a run must hold: checked when they are opened, because they may come from elsewhere."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

FORMAT = 1
"""Version of the layout of a run directory."""

# what a decomposition may ask for: tensor in the shards, and the switch of `npeff collect` that adds it
KINDS = {
    "fisher": ("rows", "--fisher"),
    "gradient": ("gradient", "--gradient"),
    "activation": ("activation", "--activation"),
}


def wrong_entries(manifest: dict[str, Any]) -> list[str]:
    """Names of the entries that are not what this module has written."""
    kinds: dict[str, type] = {"complete": bool, "identity": dict, "examples": int, "shard_examples": int}
    kinds |= {"inputs_sha256": str, "config": dict, "task": dict}
    if manifest.get("complete"):
        kinds |= {"shards": list, "examples_sha256": str}
    wrong = [name for name, kind in kinds.items() if type(manifest.get(name)) is not kind]
    if wrong:
        return wrong
    wrong = [name for name in ("examples", "shard_examples") if not 0 < manifest[name] < 2**40]
    collected = manifest["identity"].get("collected")
    if not isinstance(collected, list) or not all(kind in list(KINDS) for kind in collected):
        wrong.append("identity.collected")
    task = manifest["task"]
    described = "prompt" in task  # rows that come from elsewhere have no task
    labels = task.get("labels", None if described else [])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        wrong.append("task.labels")
    texts = ("name", "prompt", "answers", "prefix")
    wrong += [f"task.{name}" for name in texts if not isinstance(task.get(name, None if described else ""), str)]
    if not wrong and manifest["complete"]:
        records = manifest["shards"]
        if len(records) != -(-manifest["examples"] // manifest["shard_examples"]):
            wrong.append("examples, shard_examples or the number of shards")
        elif not all(isinstance(record, dict) and isinstance(record.get("sha256"), str) for record in records):
            wrong.append("shards")
    return wrong


_COLUMNS = {
    "text": (pa.types.is_string, pa.types.is_large_string),
    "label": (pa.types.is_integer,),
    "prediction": (pa.types.is_integer,),
    "prediction_text": (pa.types.is_string, pa.types.is_large_string),
    "rank": (pa.types.is_integer,),
    "set_aside": (pa.types.is_string, pa.types.is_large_string, pa.types.is_null),
}
"""Columns of a finished run's example table that everything else builds on."""


def wrong_columns(table: pa.Table, manifest: dict[str, Any]) -> str | None:
    """Why a table is not the one that a manifest describes."""
    if len(table) != manifest["examples"]:
        return f"it has {len(table)} examples, the manifest says {manifest['examples']}"
    if not manifest["complete"]:
        return None
    # rows that come from elsewhere, without a task, have neither labels nor predictions
    required = _COLUMNS if "prompt" in manifest["task"] else ("text", "rank", "set_aside")
    answers = len(manifest["task"].get("labels") or ()) or 2**31
    for name, kinds in _COLUMNS.items():
        count = table.column_names.count(name)
        if count == 0 and name not in required:
            continue
        if count != 1 or not any(kind(table.schema.field(name).type) for kind in kinds):
            return f"its column {name!r} is missing or of the wrong type"
        if table[name].null_count and name not in ("label", "set_aside"):
            return f"its column {name!r} has gaps"
        values = table[name].drop_null()
        limit = answers if name in ("label", "prediction") else 2**31
        if pa.types.is_integer(values.type) and len(values):
            extremes = pc.min_max(values).as_py()
            if not 0 <= extremes["min"] <= extremes["max"] < limit:
                return f"its column {name!r} has numbers that cannot be"
    return None
