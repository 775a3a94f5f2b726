"""A run is a directory: what was collected, in shards that appear whole or not at all.

    RUN/manifest.json       format, config, versions, fingerprints, hashes of everything below
    RUN/examples.parquet    one row per example: text, label, prediction, probability, PEF norm, ...
    RUN/shards/00000.safetensors, ...   rows, gradients, activations and probabilities of a block of examples

While a collection is under way each finished shard has a record beside it (00000.json); the last step gathers the
records into the manifest. So a killed collection continues behind its last whole shard.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from npeff.store.examples import inputs_hash, usable
from npeff.store.layout import EXAMPLES, MANIFEST, SHARDS
from npeff.store.rows import Shard, StoredRows, read_tensors, tensor_names
from npeff.store.schema import Manifest, ShardRecord, read_manifest, wrong_columns
from npeff.utils import Array, UserError, out_of_memory, read_record, remove_partials, sha256, whole_file, write_record


class Run:
    """A run directory."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._checked: set[int] = set()

    # --- opening -----------------------------------------------------------------------------------------------

    @staticmethod
    def open(path: str | Path) -> Run:
        """Open a finished run."""
        run = Run.open_unfinished(path)
        if not run.manifest.complete:
            raise UserError(f"{path} is not finished: run `npeff collect` on it again and it continues.")
        return run

    @staticmethod
    def open_unfinished(path: str | Path) -> Run:
        """Open a run whether or not its collection has ended.

        Args:
            path: Run directory.

        Returns:
            The run.

        Raises:
            UserError: It is no run directory.
        """
        path = Path(path)
        if not (path / MANIFEST).is_file():
            raise UserError(f"{path} is not a run directory: it has no {MANIFEST}. `npeff collect` makes one.")
        return Run(path, read_manifest(path / MANIFEST))

    @staticmethod
    def create(path: str | Path, manifest: Manifest, examples: pa.Table) -> Run:
        """Start a run with its inputs.

        Args:
            path: Run directory; it may hold nothing but what a killed start has left.
            manifest: What the run is; what is known of the examples is filled in.
            examples: One line per example: source_row, text, label, answer and fields.

        Returns:
            The run, without shards.

        Raises:
            UserError: The directory holds other files.
        """
        path = Path(path)
        known = {EXAMPLES, SHARDS, ".lock"}
        strangers = [item.name for item in path.iterdir() if item.name not in known] if path.is_dir() else []
        if [name for name in strangers if not name.endswith(".partial")]:
            raise UserError(f"{path} holds other files ({', '.join(strangers[:3])}). Choose a new directory.")
        write_examples(path / EXAMPLES, examples)
        manifest = replace(manifest, examples=len(examples), inputs_sha256=inputs_hash(examples))
        write_record(path / MANIFEST, manifest, sealed=True)
        return Run(path, manifest)

    # --- what is in it -----------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """Identifies what was collected: config, model and examples."""
        identity = {"identity": self.manifest.identity, "inputs": self.manifest.inputs_sha256}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    @property
    def shards(self) -> list[Shard]:
        """All shards, whether or not they are there yet."""
        size, total = self.manifest.shard_examples, self.manifest.examples
        return [Shard(i, start, min(start + size, total)) for i, start in enumerate(range(0, total, size))]

    @cached_property
    def table(self) -> pa.Table:
        """The example table, as it was written.

        Returns:
            One line per example, [m]; `store.examples` says what its columns mean.

        Raises:
            UserError: It is missing or damaged.
            OSError: There is not enough memory.
            ValueError: The same, as PyArrow may say it.
            pa.ArrowException: The same.
        """
        path = self.path / EXAMPLES
        if self.manifest.complete and not self.examples_are_whole():
            raise UserError(f"{path} is missing or has changed. `npeff verify {self.path}` repairs it.")
        try:
            # without threads: pyarrow waits forever for one that could not be started for lack of memory
            with pq.ParquetFile(path, pre_buffer=False) as file:
                table = file.read(use_threads=False)
        except (OSError, ValueError, pa.ArrowException) as error:
            if out_of_memory(error):
                raise
            raise UserError(f"Cannot read {path}: {error}. `npeff verify {self.path}` repairs it.") from error
        wrong = wrong_columns(table, self.manifest)
        if wrong:
            raise UserError(f"{path} is not an example table of this run: {wrong}.")
        return table

    @property
    def usable(self) -> Array:
        """Which examples were not set aside, bool [m]."""
        return usable(self.table)

    @property
    def has_rows(self) -> bool:
        """Whether there are shards at all; a run may be shared without them."""
        return (self.path / SHARDS).is_dir()

    @property
    def how_to_get_rows(self) -> str:
        """What to do about rows that were not shared."""
        return f"`npeff verify {self.path}` collects them with the run's own model; or have it pushed with --rows."

    def _check_rows(self) -> None:
        if not self.has_rows:
            raise UserError(f"{self.path} was shared without its rows, which this needs. {self.how_to_get_rows}")

    def source(self, kind: str) -> StoredRows:
        """The rows of a run.

        Args:
            kind: `fisher`, `gradient` or `activation`.

        Returns:
            A source that reads them from the shards.

        Raises:
            UserError: The run was collected, or shared, without them.
        """
        self._check_rows()
        if kind not in self.manifest.collected:
            raise UserError(f"{self.path} has no {kind} rows. Collect a run with --{kind}.")
        ranks = self.table["rank"].to_numpy().astype(np.int64)
        ranks = ranks if kind == "fisher" else self.usable.astype(np.int64)
        return StoredRows(self.shards, self.whole_shard, "rows" if kind == "fisher" else kind, ranks)

    def tensor(self, name: str) -> torch.Tensor:
        """A per-example tensor of all shards, [m, ...]; for the small ones, such as `probabilities`."""
        self._check_rows()
        return torch.cat([read_tensors(self.whole_shard(shard), [name])[name] for shard in self.shards])

    def has_tensor(self, name: str) -> bool:
        """Whether the shards have a tensor of this name."""
        self._check_rows()
        return all(name in tensor_names(self.whole_shard(shard)) for shard in self.shards)

    # --- writing shards ----------------------------------------------------------------------------------------

    def write_shard(self, shard: Shard, tensors: dict[str, torch.Tensor]) -> None:
        """Write a shard, then its record.

        Args:
            shard: Which one.
            tensors: What was collected about its examples.
        """
        path = self.path / shard.file
        with whole_file(path) as temporary:
            save_file(tensors, temporary)
        record = ShardRecord(shard.file, shard.start, shard.stop, sha256(path))
        write_record(self.path / shard.record, record, sealed=True)
        self._checked.add(shard.number)

    def is_written(self, shard: Shard) -> bool:
        """Whether a shard of an unfinished run is on disk, whole.

        Args:
            shard: Which one.

        Returns:
            False also where its record is damaged: then it is collected again.
        """
        with suppress(UserError):
            return (self.path / shard.record).is_file() and self.whole_shard(shard).is_file()
        return False

    def finish(self, examples: pa.Table) -> None:
        """Gather the records into the manifest, and write the final example table. May be repeated.

        A shard without a record is one that an earlier call has gathered already.

        Args:
            examples: The inputs with what was collected about each example.
        """
        records = [self._record(shard) for shard in self.shards]
        write_examples(self.path / EXAMPLES, examples)
        digest = sha256(self.path / EXAMPLES)
        self.manifest = replace(self.manifest, complete=True, shards=records, examples_sha256=digest)
        write_record(self.path / MANIFEST, self.manifest, sealed=True)
        self.clean_up()
        self.__dict__.pop("table", None)

    def clean_up(self) -> None:
        """Remove what a killed writer left, and the records of a finished run."""
        for directory in (self.path, self.path / SHARDS):
            remove_partials(directory)
        if self.manifest.complete:
            for shard in self.shards:
                (self.path / shard.record).unlink(missing_ok=True)

    # --- checking ----------------------------------------------------------------------------------------------

    def whole_shard(self, shard: Shard) -> Path:
        """The file of a shard; the first time that it is asked for, it is checked to be what was written.

        Args:
            shard: Which one.

        Returns:
            Path of the file.

        Raises:
            UserError: It is missing or has changed.
        """
        if shard.number not in self._checked:
            problem = self.problem(shard)
            if problem:
                raise UserError(f"{self.path / shard.file} {problem}. `npeff verify {self.path}` repairs it.")
            self._checked.add(shard.number)
        return self.path / shard.file

    def problem(self, shard: Shard) -> str | None:
        """What is wrong with a shard that has been written; None if nothing is."""
        if not (self.path / shard.file).is_file():
            return "is missing"
        same = sha256(self.path / shard.file) == self._record(shard).sha256
        return None if same else "has changed (its SHA-256 differs)"

    def _record(self, shard: Shard) -> ShardRecord:
        """What was noted when a shard was written: beside it, or in the manifest where the run is finished."""
        path = self.path / shard.record
        if not path.is_file() and self.manifest.complete:
            return self.manifest.shards[shard.number]
        return read_record(ShardRecord, path)

    def examples_are_whole(self) -> bool:
        """Whether the example table is what was written."""
        path = self.path / EXAMPLES
        return path.is_file() and sha256(path) == self.manifest.examples_sha256


def write_examples(path: Path, examples: pa.Table) -> None:
    """Write an example table, whole or not at all."""
    with whole_file(path) as temporary:
        pq.write_table(examples, temporary)
