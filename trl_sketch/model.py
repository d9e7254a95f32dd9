"""`get_sketch_model`: choose the linear layers, check them, make them accumulate sketches, freeze everything else."""

import copy
import difflib
import logging
import types
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .config import SketchConfig
from .layers import ProjectionGroup, SketchLinear, SketchState


logger = logging.getLogger(__name__)

# Layers of one parent module that are given the same input.
_SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"), ("w1", "w3"))
_WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_STATE_ATTRIBUTE = "_sketch_state"


def get_sketch_model(
    model: nn.Module, config: SketchConfig | None = None, *, compute_dtype: torch.dtype | None = None
) -> nn.Module:
    """Make the selected linear layers of `model` accumulate gradient sketches, in place; freeze all parameters.

    Module and parameter names, `state_dict` keys and the forward's results stay as they are.

    Args:
        model: Any module; a transformers model as a rule.
        config: What to select and how; default `SketchConfig()`.
        compute_dtype: The type the model computes in, if that is not its weights' own type: `torch.bfloat16` under
            bf16 autocast.

    Returns:
        `model`, with a method `print_trainable_parameters()`.

    Raises:
        ValueError: Nothing is selected, or something that cannot be sketched; the message names it and says what to do.
    """
    config = SketchConfig() if config is None else copy.deepcopy(config)
    if hasattr(model, _STATE_ATTRIBUTE):
        raise ValueError("this model already accumulates sketches: get_sketch_model() is called once per model")
    selected = dict(select_layers(model, config))
    _check_ties(model, selected)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    _set_precision(list(selected.values()), config, compute_dtype)

    groups: dict[tuple[str, int], ProjectionGroup] = {}
    layers = {name: _inject(name, linear, config, groups) for name, linear in selected.items()}
    state = SketchState(config, layers, list(groups.values()))
    setattr(model, _STATE_ATTRIBUTE, state)
    model.print_trainable_parameters = _PrintTrainableParameters(model)  # type: ignore[assignment]
    return model


def sketch_state(model: nn.Module) -> SketchState:
    """The sketches of a model (of the model inside, if it has been wrapped).

    Raises:
        ValueError: The model did not go through [`get_sketch_model`].
    """
    for module in model.modules():
        state = module.__dict__.get(_STATE_ATTRIBUTE)
        if state is not None:
            return state
    raise ValueError("this model has no sketches: call get_sketch_model(model, config) first")


def summary(model: nn.Module) -> dict[str, int]:
    """Counts of a sketched model: `trainable` and `all` parameters, `matrices`, and `sketch_bytes` of the buffer."""
    state = sketch_state(model)
    layers = state.layers.values()
    return {
        "trainable": sum(layer.weight.numel() for layer in layers),
        "all": sum(parameter.numel() for parameter in model.parameters()),
        "matrices": len(layers),
        "sketch_bytes": state.dtype.itemsize * sum(layer.out_features * layer.group.rank for layer in layers),
    }


class _PrintTrainableParameters:
    """Prints how many parameters of a model are trained, as PEFT does, and what the sketches take.

    (An object and not a bound method, which a model could not be unpickled with.)
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self) -> None:
        counts = summary(self.model)
        print(
            f"trainable params: {counts['trainable']:,} || all params: {counts['all']:,} || "
            f"trainable%: {100 * counts['trainable'] / counts['all']:.4f} || "
            f"{counts['matrices']} sketches: {counts['sketch_bytes'] / 2**20:.1f} MiB"
        )


def select_layers(model: nn.Module, config: SketchConfig) -> Iterator[tuple[str, nn.Linear]]:
    """Name and module of the layers to train, checked."""
    pretrained = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    heads = [module.get_output_embeddings() for module in pretrained]
    adapters: list[str] = []
    found: list[str] = []
    for path, module in model.named_modules():
        name = _without_wrappers(path)
        if any(name.startswith(f"{adapter}.") for adapter in adapters):
            continue  # inside an adapter that has been excluded
        if isinstance(module, BaseTunerLayer):
            adapters.append(name)
        if config.target_modules is None and not _is_default(name, module, bool(pretrained)):
            continue
        if not name or not _matches(config, name):
            continue
        if any(module is head for head in heads):
            raise ValueError(
                f"{name} is the LM head, which cannot be sketched (trainers read its weight directly, past the layer): "
                "take it out of target_modules"
            )
        problem = _why_not(module)
        if problem is not None:
            if not _holds_matrices(module):
                continue  # a container or an activation that a pattern happens to match
            raise ValueError(f"{name} {problem}")
        found.append(name)
        yield name, module
    if not found:
        raise ValueError(_nothing_found(model, config, heads))
    if isinstance(config.target_modules, list):
        idle = [t for t in config.target_modules if not any(n == t or n.endswith(f".{t}") for n in found)]
        if idle:
            logger.warning("target_modules: nothing is called %s.", " or ".join(idle))


def _is_default(name: str, module: nn.Module, is_pretrained: bool) -> bool:
    """Whether a layer is of attention or MLP: in a transformers model, those in its numbered layers, so no head is."""
    in_a_layer = any(part.isdecimal() for part in name.split("."))
    return _holds_matrices(module) and (in_a_layer or not is_pretrained)


def _holds_matrices(module: nn.Module) -> bool:
    """Whether this module itself holds a weight that attention or MLP multiply with."""
    if isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    if isinstance(module, nn.Linear | Conv1D | BaseTunerLayer):
        return True
    return any(parameter.ndim >= 2 for parameter in module.parameters(recurse=False)) or hasattr(module, "qweight")


def _why_not(module: nn.Module) -> str | None:
    """What keeps a module from being sketched, as the end of a sentence; `None` if nothing does."""
    kind = type(module).__name__
    if type(module) is nn.Linear:
        if isinstance(module.weight, DTensor):
            return (
                "has a weight that is sharded already, by FSDP2 or tensor parallelism: call get_sketch_model() before "
                "fully_shard(); tensor parallelism is not supported"
            )
        if type(module.weight.data) is not torch.Tensor:
            return (
                f"has a weight of type {type(module.weight.data).__name__}, and an update must change it in place: load "
                "the model unquantized in bfloat16, or leave it out with exclude_modules"
            )
        if "forward" in vars(module):
            return (
                "has had its forward replaced (by a hook of accelerate, for offloading or for a device map), so its "
                "inputs would not be seen: load the model on one device without such hooks"
            )
        dtype = module.weight.dtype
        if dtype in (torch.bfloat16, torch.float32, torch.float64):
            return None
        return f"has weights of type {dtype}: load the model in bfloat16 or float32 (dtype='bfloat16')"
    if isinstance(module, BaseTunerLayer):
        return (
            f"({kind}) belongs to a PEFT adapter: merge it first (model.merge_and_unload()), or train the base model"
        )
    if isinstance(module, Conv1D):
        return (
            f"({kind}) stores its weight transposed, as GPT-2 does, which is not supported: leave it out with "
            "exclude_modules, or use a model with nn.Linear layers"
        )
    if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
        return (
            f"({kind}) holds fused 3-D expert weights, which are not supported: name the layers to train in "
            "target_modules, e.g. the attention's q_proj, k_proj, v_proj and o_proj, or leave it out with exclude_modules"
        )
    if hasattr(module, "qweight") or hasattr(module, "quant_state") or isinstance(module, nn.Linear):
        return (
            f"({kind}) is not a plain nn.Linear (quantized or customized), and an update must change its weight in "
            "place: load the model unquantized in bfloat16, or leave it out with exclude_modules"
        )
    return f"({kind}) is not an nn.Linear: leave it out with exclude_modules, or narrow target_modules"


def _matches(config: SketchConfig, name: str) -> bool:
    """PEFT's matching of names, regular expressions, exclusions and layer indices."""
    probe = types.SimpleNamespace(
        target_modules=config.target_modules if config.target_modules is not None else ".*",
        exclude_modules=config.exclude_modules,
        layers_to_transform=config.layers_to_transform,
        layers_pattern=config.layers_pattern,
    )
    if config.target_modules is None and config.layers_to_transform is not None:
        # PEFT takes layer indices only with a list of names: the layer's own last name is one.
        probe.target_modules = [name.rpartition(".")[2]]
    return bool(check_target_module_exists(probe, name))


def _nothing_found(model: nn.Module, config: SketchConfig, heads: list[nn.Module | None]) -> str:
    linear = [n for n, m in model.named_modules() if _holds_matrices(m) and not any(m is head for head in heads)]
    names = sorted({_without_wrappers(n).rpartition(".")[2] for n in linear})
    if config.target_modules is None:
        return (
            f"no linear layer of {type(model).__name__} was selected (exclude_modules={config.exclude_modules!r}, "
            f"layers_to_transform={config.layers_to_transform!r}); its linear layers are called {', '.join(names)}"
        )
    wanted = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules
    near = sorted(
        {match for w in wanted for match in difflib.get_close_matches(w.rpartition(".")[2], names, cutoff=0.4)}
    )
    hint = f"did you mean {', '.join(near)}?" if near else f"its linear layers are called {', '.join(names)}"
    return f"target_modules={config.target_modules!r} matches no layer of {type(model).__name__}: {hint}"


def _check_ties(model: nn.Module, selected: dict[str, nn.Linear]) -> None:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, linear in selected.items():
        others = [owner for owner in owners[id(linear.weight)] if _without_wrappers(owner) != f"{name}.weight"]
        if others:
            raise ValueError(
                f"{name}.weight is tied to {', '.join(others)}, so one update would change both: leave it out with "
                f"exclude_modules=['{name.rpartition('.')[2]}']"
            )


def _set_precision(layers: list[nn.Linear], config: SketchConfig, compute_dtype: torch.dtype | None) -> None:
    """Convert the layers to the type that their weights are to be kept in, and say so."""
    wanted = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(config.weight_precision)
    if wanted is None and compute_dtype == torch.bfloat16:
        wanted = torch.bfloat16
    others = [layer for layer in layers if wanted is not None and layer.weight.dtype != wanted]
    for layer in others:
        for parameter in layer.parameters(recurse=False):
            parameter.data = parameter.data.to(wanted)
    if others and wanted == torch.bfloat16:
        logger.warning(
            "The %d selected weights were converted to bfloat16; their updates are rounded stochastically. Loading the model "
            "in bfloat16 (dtype='bfloat16') saves two bytes for every other weight as well.",
            len(others),
        )
    if compute_dtype == torch.bfloat16 and all(layer.weight.dtype == torch.float32 for layer in layers):
        logger.warning(
            "weight_precision='fp32' under bf16 autocast: the policy computes with weights rounded to bfloat16, and small "
            "updates do not reach it until they add up to a rounding step. weight_precision='bf16' has no such dead zone."
        )


def _inject(
    name: str, linear: nn.Linear, config: SketchConfig, groups: dict[tuple[str, int], ProjectionGroup]
) -> SketchLinear:
    """Turn `linear` into a [`SketchLinear`], in place, and join it to its projection."""
    pattern: Any = config.rank_pattern or {}
    rank = pattern.get(get_pattern_key(pattern.keys(), name), config.rank)
    if rank > linear.in_features:
        logger.info("%s has %d inputs: its sketch has rank %d.", name, linear.in_features, linear.in_features)
        rank = linear.in_features
    parent, _, own = name.rpartition(".")
    siblings = next((s for s in _SHARED_INPUT if own in s), ()) if config.share_projection else ()
    shared = ".".join(part for part in (parent, siblings[0]) if part) if siblings else name
    group = groups.get((shared, rank))
    if group is None or group.in_features != linear.in_features:
        key = torch.zeros((), dtype=torch.int32, device="cpu")
        group = ProjectionGroup(shared if group is None else name, config.projection, rank, linear.in_features, key)
        groups[(group.name, rank)] = group
    group.members += 1
    linear.__class__ = SketchLinear
    assert isinstance(linear, SketchLinear)
    linear.name, linear.group = name, group
    return linear


def _without_wrappers(name: str) -> str:
    """A module's name without the parts that torch.compile, FSDP and checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)
