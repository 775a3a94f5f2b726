"""Text that has nothing to do with the task."""

from __future__ import annotations

import torch
import yaml

from npeff.collect.config import CollectConfig
from npeff.collect.session import prepare
from npeff.models.config import ModelConfig
from npeff.perturb.elsewhere import EMBEDDED, Elsewhere, background_rows
from npeff.tasks.config import DataConfig
from npeff.tasks.task import load_task
from tests import tiny


def test_a_chat_model_is_asked_other_tasks_as_a_chat_too(tmp_path):
    tiny.save(tmp_path)
    tiny.tokenizer_with(tiny.CHATML).save_pretrained(tmp_path)
    model = ModelConfig(str(tmp_path), device="cpu")
    prepared = prepare(CollectConfig("", data=DataConfig(chat=True), model=model))
    groups = Elsewhere(prepared, ["a film of great charm and wit"])._groups
    texts = yaml.safe_load(EMBEDDED.read_text(encoding="utf-8"))["prompts"]["triviaqa"]
    for (ids, _), text in zip(groups["triviaqa"], texts, strict=True):
        question = {"role": "user", "content": load_task("triviaqa").render(text)}
        whole = prepared.model.tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False)
        assert ids == whole


def test_rows_of_running_text_are_kept_and_made_again_if_damaged(run, prepared):
    before = set((run.path / "running-text").glob("*"))  # other tests have the same run
    rows = background_rows(run, prepared, 7)
    (kept,) = set((run.path / "running-text").iterdir()) - before
    torch.testing.assert_close(background_rows(run, prepared, 7), rows, rtol=0, atol=0)
    written = kept.stat().st_mtime_ns
    assert not torch.allclose(background_rows(run, prepared, 8), rows)  # other positions
    assert kept.stat().st_mtime_ns == written
    kept.write_bytes(b"no tensors")
    torch.testing.assert_close(background_rows(run, prepared, 7), rows)
    assert kept.stat().st_size > rows.numel() * 4
