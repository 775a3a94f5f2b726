"""Models in several places: GPUs, memory and disk, by a device map of accelerate."""

import contextlib
import functools
import json
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from npeff.models.experts import holds_experts
from npeff.models.quantised import is_quantised, plain_weight, quantised_layers
from npeff.utils import UserError, distributed


def placement(device_map: str | None, device: str) -> dict[str, Any]:
    """What `from_pretrained` must be told about where parts of a model lie.

    Args:
        device_map: auto, a JSON mapping, or None for one device.
        device: That device.

    Returns:
        Options; weights on disk that are not in the checkpoint's own files go to a folder for this process alone.

    Raises:
        UserError: It is neither.
    """
    folder = tempfile.mkdtemp(dir=_scratch().name)
    if device_map in (None, "auto"):
        return {"device_map": device_map or {"": device}, "offload_folder": folder}
    try:
        parts = json.loads(device_map or "")
    except ValueError as error:
        raise UserError(f"--device-map is neither auto nor JSON: {error}.") from error
    if not isinstance(parts, dict) or not all(isinstance(place, str | int) for place in parts.values()):
        raise UserError('--device-map should be auto, or name a device for every part, as \'{"": "cpu"}\'.')
    return {"device_map": parts, "offload_folder": folder}


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder that is gone when the process ends."""
    return tempfile.TemporaryDirectory(prefix="npeff-")


def check_placement(network: nn.Module, device_map: str | None) -> None:
    """Find out whether a device map was one for this model.

    Args:
        network: The model, placed.
        device_map: What was asked for.

    Raises:
        ValueError: A part of the map is none of the model, or a weight cannot be fetched from where it lies.
    """
    modules = dict(network.named_modules())
    for part in () if device_map in (None, "auto") else json.loads(device_map or ""):
        if part not in modules:
            raise ValueError(f"the model has no part {part!r}")
    for name, module in modules.items():
        hook = _offloading(module)
        known = set(hook.weights_map.dataset) if hook else set()
        for own, parameter in module._parameters.items() if hook else ():
            if parameter is not None and f"{name}.{own}" not in known:
                raise ValueError(f"{name}.{own} is tied to another weight, and must be in the same place")


def split_layers(network: Any, processes: int, device: torch.device) -> None:
    """Split the layers of a model over the processes of a group, by the plan that transformers has for it.

    Args:
        network: Whole; changed in place.
        processes: How many share a model.
        device: What each computes with.

    Raises:
        UserError: There is no plan, or the numbers of processes or heads do not fit.
    """
    distributed.start()
    settings = network.config.get_text_config()
    heads: int = getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
    if distributed.world_size() % processes:
        hint = f"Start a multiple of {processes}: torchrun --nproc-per-node {processes} -m npeff.cli collect ..."
        raise UserError(f"--tensor-parallel {processes}, but there are {distributed.world_size()} processes. {hint}")
    experts = any(holds_experts(module) for module in network.modules())
    if not network.tp_plan or experts or quantised_layers(network) or getattr(network, "hf_device_map", None):
        hint = "Try --device-map auto."
        raise UserError(f"--tensor-parallel is for plain models that transformers has a plan for. {hint}")
    if heads % processes:
        raise UserError(f"--tensor-parallel {processes} does not divide the model's {heads} heads of keys and values.")
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    sizes = (distributed.world_size() // processes, processes)
    apply_tensor_parallelism(network, init_device_mesh(device.type, sizes, mesh_dim_names=("examples", "tp"))["tp"])


def mesh_of(module: nn.Module) -> Any:
    """The processes that share a layer, if it is split over several."""
    return getattr(getattr(module, "weight", None), "device_mesh", None)


def put_together(module: Any, side: int, part: torch.Tensor) -> torch.Tensor:
    """The whole inputs or output gradients of a layer, where processes have parts of them.

    Args:
        module: The layer.
        side: 1 for its inputs, 0 for its outputs: the dimension of the weight that these belong to.
        part: What this process has, [..., d].

    Returns:
        The same, of all processes; `part` itself where it is whole.
    """
    mesh = mesh_of(module)
    if mesh is None or not module.weight.placements[0].is_shard(side):
        return part
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((*part.shape[:-1], module.in_features if side else module.out_features))
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(part, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride).full_tensor()
    return torch.Tensor(whole)


def main_device(network: Any, otherwise: torch.device) -> torch.device:
    """Where a placed model takes its inputs, and the sketch is: its first GPU, or else the CPU."""
    places = list(getattr(network, "hf_device_map", {"": otherwise}).values())
    return torch.device(next((place for place in places if place not in ("cpu", "disk")), "cpu"))


def stored_parameters(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters as numbers: those elsewhere are fetched, quantised ones are what they stand for.

    Args:
        network: A model.

    Yields:
        Name and tensor of each, by name.
    """
    owners = {
        f"{prefix}.{name}".lstrip("."): (module, name)
        for prefix, module in network.named_modules()
        for name in module._parameters
    }
    for name, parameter in sorted(network.named_parameters()):
        module, own = owners[name]
        hook = _offloading(module)
        if hook is not None and parameter.is_meta:
            yield name, hook.weights_map[own].to(parameter.dtype)
        else:
            packed = own == "weight" and is_quantised(module)
            yield name, plain_weight(module).to(network.dtype) if packed else parameter  # type: ignore[arg-type]


def _offloading(module: nn.Module) -> Any:
    """The hook that fetches a module's weights for each call, if there is one."""
    hook = getattr(module, "_hf_hook", None)
    return next((each for each in getattr(hook, "hooks", [hook]) if getattr(each, "weights_map", None)), None)


@contextlib.contextmanager
def fetching_again(network: nn.Module) -> Iterator[None]:
    """Around a forward pass: a backward pass fetches weights that lie elsewhere once more, one at a time.

    Without it, autograd would hold all of them from the forward pass on, and the model would have to fit after all.

    Args:
        network: A model that may have weights in memory or on disk.

    Yields:
        Nothing.
    """
    present: dict[int, tuple[Any, str]] = {}
    watched = [(module, hook) for module in network.modules() if (hook := _offloading(module)) is not None]

    def before(module: nn.Module, fetch: Any, hook: Any, called: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = fetch(called, *args, **kwargs)
        for name, parameter in module.named_parameters(recurse=False):
            present[parameter.untyped_storage().data_ptr()] = (hook.weights_map, name)
        return found

    def after(leave: Any, called: nn.Module, output: Any) -> Any:
        present.clear()  # memory that is given back may become that of other tensors
        return leave(called, output)

    def pack(tensor: torch.Tensor) -> Any:
        place = present.get(tensor.untyped_storage().data_ptr())
        view = (tensor.size(), tensor.stride(), tensor.storage_offset())
        return tensor if place is None else (place, view, tensor.device, tensor.dtype)

    def unpack(kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        (weights, name), view, device, dtype = kept
        return weights[name].to(device, dtype).contiguous().as_strided(*view)

    for module, hook in watched:
        hook.pre_forward = functools.partial(before, module, hook.pre_forward, hook)
        hook.post_forward = functools.partial(after, hook.post_forward)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack) if watched else contextlib.nullcontext():
            yield
    finally:
        for _, hook in watched:
            del hook.pre_forward, hook.post_forward
