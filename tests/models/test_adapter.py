"""Adapters against weights that are merged by hand, and plain autograd."""

from __future__ import annotations

import json
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from npeff.cli import main
from npeff.collect.config import CollectConfig, DirectionsConfig, SketchConfig
from npeff.collect.session import prepare
from npeff.models.config import ModelConfig
from npeff.models.load import load_model
from npeff.models.select import select_parameters
from npeff.perturb.weights import check_saving, save_adapter
from npeff.tasks.task import Task
from npeff.utils.errors import UserError
from tests import tiny

TASK = Task("t", "Review: {text}\nSentiment:", "tokens", tiny.LABELS)
SCALE = 12 / 3


def make_adapter(base, folder, targets=("q_proj", "down_proj"), **options):
    """A LoRA adapter with large random matrices, and the base model's directory as PEFT records it."""
    network = load_model(ModelConfig(str(base), device="cpu")).network
    settings = peft.LoraConfig(r=3, lora_alpha=12, target_modules=list(targets), task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(network, settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(model_directory, tmp_path_factory):
    return make_adapter(model_directory, tmp_path_factory.mktemp("adapter"))


def matrices(folder):
    """Module → (A, B) as they lie in the file."""
    tensors = load_file(folder / "adapter_model.safetensors")
    names = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in tensors}
    both = ("base_model.model.{}.lora_A.weight", "base_model.model.{}.lora_B.weight")
    return {name: tuple(tensors[form.format(name)] for form in both) for name in names}


def prepared_with(model, adapter, include=()):
    config = ModelConfig(str(model), adapter=str(adapter), include=include, device="cpu")
    how = {"directions": DirectionsConfig("exact"), "sketch": SketchConfig(dim=256)}
    return prepare(CollectConfig("", model=config, **how), TASK)


def prompts_of(prepared):
    return [prepared.model.tokenizer(TASK.render(text)).input_ids for text in tiny.TEXTS[:3]]


@pytest.mark.parametrize(("family", "targets"), [("llama", ("q_proj", "down_proj")), ("gpt2", ("c_attn", "c_proj"))])
def test_merged_weights_are_those_by_hand(family, targets, tmp_path):
    base = tiny.save(tmp_path / "base", family)
    folder = make_adapter(base, tmp_path / "adapter", targets, fan_in_fan_out=family == "gpt2")
    expected = dict(load_model(ModelConfig(str(base), device="cpu")).network.named_parameters())
    found = dict(load_model(ModelConfig(str(base), adapter=str(folder), device="cpu")).network.named_parameters())
    changed = matrices(folder)
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        A, B = changed.get(name.removesuffix(".weight"), (None, None))
        delta = torch.zeros(1, 1) if A is None else SCALE * B @ A
        assert torch.allclose(found[name], parameter + (delta.T if family == "gpt2" else delta), atol=1e-5)
    assert len(changed) >= 4


def plain_gradients(prepared, network, weights, leaves, prompt):
    """The one row of an example's Fisher, by autograd: with two answers S = p₀ p₁ (1, -1)ᵀ (1, -1).

    `weights` are functions of `leaves` (name → tensor); the result is name → gradient.
    """
    logits = torch.func.functional_call(network, weights, (torch.tensor([prompt]),)).logits[0, -1]
    z = logits[[ids[0] for ids in prepared.answers.tokens]]
    p = z.detach().double().softmax(0)
    V = ((p[0] * p[1]).sqrt() * torch.tensor([1.0, -1.0])).float()
    return dict(zip(leaves, torch.autograd.grad(z, list(leaves.values()), V), strict=True))


def assert_same_row(prepared, prompt, matrices):
    expected = prepared.collector.sketch.matvec(matrices)
    collected = prepared.collector.collect([prompt], [0])
    found = collected["rows"][0, 0] * collected["pef_norm"][0].sqrt()
    assert min(float((found - sign * expected).norm() / expected.norm()) for sign in (1, -1)) < 1e-4


def test_rows_of_merged_weights_are_those_of_autograd(model_directory, adapter):
    """The reference never sees PEFT: base weights plus scale · B A, one example at a time."""
    prepared = prepared_with(model_directory, adapter)
    base = load_model(ModelConfig(str(model_directory), device="cpu")).network
    with torch.no_grad():
        for name, (A, B) in matrices(adapter).items():
            base.get_submodule(name).weight.add_(SCALE * B @ A)
    modules = prepared.selection.modules
    for prompt in prompts_of(prepared):
        kinds = ("weight", "bias")
        chosen = {f"{m.name}.{kind}": getattr(base.get_submodule(m.name), kind) for m in modules for kind in kinds}
        leaves = {name: tensor.detach().clone().requires_grad_(True) for name, tensor in chosen.items()}
        found = plain_gradients(prepared, base, leaves, leaves, prompt)
        packed = {m.name: m.matrix(*(found[f"{m.name}.{kind}"] for kind in kinds)) for m in modules}
        assert_same_row(prepared, prompt, packed)


def test_rows_of_the_adapters_own_matrices(model_directory, adapter):
    """Derivatives by A and B of a network whose weights are W + scale · B A, written out."""
    prepared = prepared_with(model_directory, adapter, include=("*lora_*",))
    own = matrices(adapter)
    assert prepared.selection.size == sum(A.numel() + B.numel() for A, B in own.values())
    assert prepared.selection.excluded > 0
    base = load_model(ModelConfig(str(model_directory), device="cpu")).network
    for prompt in prompts_of(prepared):
        pairs = {f"{n}.lora_{kind}.default": own[n]["AB".index(kind)] for n in own for kind in "AB"}
        leaves = {name: tensor.clone().requires_grad_(True) for name, tensor in pairs.items()}
        weights = {
            f"{n}.weight": base.get_submodule(n).weight
            + SCALE * leaves[f"{n}.lora_B.default"] @ leaves[f"{n}.lora_A.default"]
            for n in own
        }
        assert_same_row(prepared, prompt, plain_gradients(prepared, base, weights, leaves, prompt))


def test_a_pattern_that_also_names_weights_of_the_model_is_about_merged_ones(model_directory, adapter):
    names = [module.name for module in prepared_with(model_directory, adapter, include=("*.mlp.*",)).selection.modules]
    assert names
    assert not any("lora" in name for name in names)


def test_an_adapter_in_place_of_the_model(model_directory, adapter, capsys):
    direct = load_model(ModelConfig(str(adapter), device="cpu"))
    assert f"is an adapter of {model_directory}" in capsys.readouterr().out
    both = load_model(ModelConfig(str(model_directory), adapter=str(adapter), device="cpu"))
    plain = load_model(ModelConfig(str(model_directory), device="cpu"))
    assert direct.fingerprint() == both.fingerprint() != plain.fingerprint()
    assert (direct.config.model, direct.config.adapter) == (str(model_directory), str(adapter))


def test_code_of_the_model_that_an_adapter_names_is_not_trusted(adapter):
    assert not load_model(ModelConfig(str(adapter), trust_remote_code=True, device="cpu")).config.trust_remote_code


def test_a_change_that_perturb_has_written(model_directory, tmp_path):
    base = load_model(ModelConfig(str(model_directory), device="cpu"))
    modules = select_parameters(base.network, ("*.q_proj.weight",)).modules
    vector = {module.name: torch.randn(module.shape) for module in modules}
    save_adapter(tmp_path / "change", modules, vector, 0.5, 0.999999, str(model_directory))
    found = load_model(ModelConfig(str(tmp_path / "change"), device="cpu")).network
    for module in modules:
        expected = module.module.weight + 0.5 * vector[module.name]
        assert torch.allclose(found.get_submodule(module.name).weight, expected, atol=1e-2)


@pytest.mark.parametrize(("kind", "include"), [("adapter", ()), ("model", ("*lora_*",))])
def test_changes_that_fit_no_model_are_not_written(model_directory, adapter, kind, include):
    prepared = prepared_with(model_directory, adapter, include)
    check_saving("delta", prepared)
    with pytest.raises(UserError, match="--save delta"):
        check_saving(kind, prepared)


def changed_model(folder, **sizes):
    network = tiny.network("llama")
    settings = type(network.config).from_dict(network.config.to_dict() | sizes)
    type(network)(settings).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "sizes", [{"intermediate_size": 64}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3}, {"family": "gpt2"}]
)
def test_an_adapter_of_another_model(adapter, tmp_path, sizes, capsys):
    """Of other widths, with more or fewer layers, of another family."""
    family = sizes.pop("family", None)
    other = tiny.save(tmp_path, family) if family else changed_model(tmp_path, **sizes)
    assert main(["params", str(other), "--adapter", str(adapter)]) == 2
    said = capsys.readouterr().err
    assert "cannot be used with" in said
    assert "--model" in said
    assert "Traceback" not in said
    assert ":." not in said  # a message that ends where it begins to say something
    if "intermediate_size" in sizes:
        assert "size mismatch" in said


def test_a_model_of_another_name_is_mentioned(model_directory, adapter, tmp_path, capsys):
    moved = shutil.copytree(model_directory, tmp_path / "moved")
    load_model(ModelConfig(str(moved), adapter=str(adapter), device="cpu"))
    assert f"was made for {model_directory}, and fits {moved}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "cannot be used with"),
        (lambda folder: (folder / "adapter_config.json").write_text("nothing"), "cannot be used with"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12"), "cannot be used with"),
    ],
)
def test_damaged_adapters(model_directory, adapter, tmp_path, change, words):
    folder = shutil.copytree(adapter, tmp_path / "copy")
    change(folder)
    with pytest.raises(UserError, match=words) as error:
        load_model(ModelConfig(str(model_directory), adapter=str(folder), device="cpu"))
    assert "\n" not in str(error.value)


def test_adapters_that_change_no_weights(model_directory, tmp_path):
    network = load_model(ModelConfig(str(model_directory), device="cpu")).network
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(network, settings).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"adds tokens .*, and changes no weights"):
        load_model(ModelConfig(str(model_directory), adapter=str(tmp_path), device="cpu"))


def test_an_adapter_that_does_not_name_its_model(adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "copy")
    values = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": None}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"does not say of which model.*--adapter"):
        load_model(ModelConfig(str(folder), device="cpu"))


def test_a_run_with_an_adapter(model_directory, adapter, review_file, tmp_path, capsys):
    """The adapter may move; another one is refused."""
    command = ["collect", str(tmp_path / "run"), "--task", "sst2", "--data", str(review_file), "--dim", "256"]
    command += ["--model", str(model_directory), "--limit", "16"]
    moved = shutil.copytree(adapter, tmp_path / "moved")
    assert main([*command, "--adapter", str(adapter)]) == 0
    assert main([*command, "--adapter", str(moved)]) == 0
    tensors = {name: 2 * tensor for name, tensor in load_file(moved / "adapter_model.safetensors").items()}
    save_file(tensors, moved / "adapter_model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert main([*command, "--adapter", str(moved)]) == 2
    assert "model_sha256" in capsys.readouterr().err
