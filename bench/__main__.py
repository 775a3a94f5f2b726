"""`make bench`: what the project promises of its speed and accuracy, measured; ONLY=collect runs one group.

Prints a table and writes bench/latest.json, a list of {"name", "value", "bar", "holds"}. Times are ratios within one
run, because machines differ and are shared. NPEFF_BENCH_DATA names a folder with sst2.jsonl, clinc150.jsonl and
triviaqa.jsonl; without it the embedded reviews serve.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import torch

GROUPS = (
    *("collect", "decompose", "analyse", "perturb", "groundtruth", "explain", "act", "explore", "models"),
    "behaviours",
)
LATEST = Path(__file__).parent / "latest.json"


def main() -> int:
    chosen = sys.argv[1:] or list(GROUPS)
    unknown = [name for name in chosen if name not in GROUPS]
    if unknown:
        print(f"There is no benchmark group {unknown[0]!r}; there are {', '.join(GROUPS)}.", file=sys.stderr)
        return 2
    folder = os.environ.get("NPEFF_BENCH_DATA")
    data = Path(folder) if folder else None
    if data is not None and not data.is_dir():
        print(f"NPEFF_BENCH_DATA names {data}, which is no folder.", file=sys.stderr)
        return 2
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    results = {entry["name"]: entry for entry in (json.loads(LATEST.read_text()) if LATEST.is_file() else [])}
    for group in chosen:
        for entry in importlib.import_module(f"bench.{group}").benchmarks(data):
            results[entry["name"]] = entry
            LATEST.write_text(json.dumps(list(results.values()), indent=2) + "\n")
            holds = "holds" if entry["holds"] else "DOES NOT HOLD"
            print(f"{entry['name']:32} {entry['value']:10.4g}   bar {entry['bar']:<12} {holds}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
