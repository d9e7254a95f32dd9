"""Several processes: what of a weight is here, what the ranks must agree on, and FSDP2's part in a probe.

torch.distributed and accelerate do the work. The data parallel ranks of DDP and FSDP2 are all ranks of the default
process group.
"""

import contextlib
import dataclasses
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .projection import Range
from .sync.checksum import checksum


# Of a weight on a CPU, what is squared together: torch makes a copy in `dtype`, which stays in the cache.
_NORM_ELEMENTS = 2**18


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


# ---------------------------------------------------------------------- what is where


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The part of a tensor that this rank holds, and the index of its first element in the whole.

    Args:
        tensor: An ordinary tensor, which is whole, or a DTensor, evenly or unevenly sharded along one dimension.
    """
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offset)


def local_block(weight: torch.Tensor) -> tuple[torch.Tensor, Range, Range]:
    """[`local_part`] of a matrix: the part, and its rows and columns (half-open) in the whole matrix."""
    part, offset = local_part(weight)
    rows, cols = ((start, start + length) for start, length in zip(offset, part.shape, strict=True))
    return part, rows, cols


def norms(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Frobenius norms of whole matrices, float64 `(M,)`, the same on all ranks; accumulated in `dtype`."""
    squares = torch.stack([_square(local_block(weight)[0], dtype) for weight in weights])
    # The shards of a matrix lie along the mesh dimensions that it is sharded on.
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for index, weight in enumerate(weights):
        if isinstance(weight, DTensor):
            for dim, placement in enumerate(weight.placements):
                if not isinstance(placement, Replicate):
                    groups.setdefault(weight.device_mesh.get_group(dim), []).append(index)
    for group, indices in groups.items():
        part = squares[indices]
        dist.all_reduce(part, group=group)
        squares[indices] = part
    return squares.sqrt()


def _square(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """‖matrix‖² in float64, 0-dim."""
    rows = max(1, _NORM_ELEMENTS // max(1, matrix.shape[1])) if matrix.device.type == "cpu" else len(matrix)
    parts = [torch.linalg.vector_norm(part, dtype=dtype).double().square() for part in matrix.split(rows)]
    return torch.stack(parts).sum()


def check_sharding(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Refuse what FSDP2's `fully_shard` alone does not make.

    Args:
        model: The model.
        weights: Its trained matrices, by name.

    Raises:
        ValueError: A weight is sharded by tensor parallelism.
    """
    for name, weight in weights.items():
        if isinstance(weight, DTensor):
            sharded = [placement for placement in weight.placements if not isinstance(placement, Replicate)]
            if len(sharded) != 1 or type(sharded[0]) is not Shard or not is_sharded(model):
                raise ValueError(
                    f"{name} is sharded as {weight.placements}, which FSDP2 alone does not do: sketches are trained with DDP "
                    "or FSDP2, without tensor parallelism"
                )


def average_(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its mean over all ranks: one all-reduce, after which all have the same bits."""
    world = world_size()
    if world > 1:
        dist.all_reduce(tensor)
        tensor.div_(world)


def broadcast_(tensor: torch.Tensor) -> None:
    """Give all ranks the first one's `tensor`."""
    if world_size() > 1:
        dist.broadcast(tensor, src=0)


def largest(value: int, device: torch.device) -> int:
    """The maximum over all ranks."""
    if world_size() == 1:
        return value
    tensor = torch.tensor(value, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


# ---------------------------------------------------------------------- agreement


def check_agreement(values: dict[str, int], device: torch.device) -> None:
    """See that all ranks have the same `values`; every rank must call this.

    Raises:
        RuntimeError: On every rank, the same message: which rank differs from rank 0, and in what.
    """
    if world_size() == 1:
        return
    mine = torch.tensor([*values.values()], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(everyone, mine)
    for rank, theirs in enumerate(everyone):
        differing = [name for name, same in zip(values, (theirs == everyone[0]).tolist(), strict=True) if not same]
        if differing:
            raise RuntimeError(
                f"rank {rank} differs from rank 0 in {' and '.join(differing)}. No weight has been changed. All ranks must "
                "load the same model and be given the same settings and seed"
            )


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> int:
    """A number for names, shapes and bits of whole tensors; the same on every device."""
    return crc([(name, tuple(tensor.shape), checksum(_words(tensor.detach()))) for name, tensor in tensors.items()])


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor of any type, in 16-bit words."""
    if tensor.dtype.itemsize == 1:
        tensor = tensor.to(torch.int16)
    return tensor.contiguous().reshape(-1).view(torch.bfloat16)


def crc(value: Any) -> int:
    """A number for what JSON makes of `value`."""
    return zlib.crc32(json.dumps(value, sort_keys=True, default=str).encode())


# ---------------------------------------------------------------------- engines


def check_engine(trainer: Any) -> None:
    """Refuse the ways to run a `transformers.Trainer` that sketches are not trained in.

    Raises:
        ValueError: Which, and what to do.
    """
    accelerator = trainer.accelerator
    kind = accelerator.distributed_type
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    instead = "train with DDP or FSDP2 (recipes/accelerate/ddp.yaml and fsdp2.yaml)"
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"this process sees {trainer.args.n_gpu} GPUs and would replicate the model by nn.DataParallel, whose replicas "
            "lose their sketches: start it with `accelerate launch`, or set CUDA_VISIBLE_DEVICES to one"
        )
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ValueError(f"{kind.value} keeps weights or gradients in a way that sketches do not work with: {instead}")
    if kind == DistributedType.FSDP and plugin.fsdp_version == 1:
        raise ValueError(
            f"FSDP1 flattens weights across layers, so that a layer has no matrix to update: set fsdp_version: 2, or {instead}"
        )
    if kind == DistributedType.FSDP and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError(
            "fsdp_offload_params keeps the weights on the CPU, where they cannot be updated from sketches on the GPU: set it "
            "to false"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision: {accelerator.mixed_precision} needs loss scaling or a training recipe of its own, which work on "
            "dense gradients: set it to bf16 or no in the accelerate configuration"
        )
    parallelism = getattr(accelerator, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        if getattr(parallelism, name, 1) > 1:
            raise ValueError(f"parallelism_config has {name}={getattr(parallelism, name)}: {instead}, and without it")


@contextlib.contextmanager
def fsdp_on_cpu(args: Any = None) -> Iterator[None]:
    """Where accelerate, or `fsdp` of the training arguments, is told to use FSDP and runs on several CPUs, an `Accelerator` made in the block does so.

    (By itself it ignores the setting there, and trains with DDP.)
    """
    state = PartialState._shared_state
    wanted = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" or bool(getattr(args, "fsdp", None))
    if not wanted or state.get("distributed_type") != DistributedType.MULTI_CPU:
        yield
        return
    state["distributed_type"] = DistributedType.MULTI_GPU
    try:
        yield
    finally:
        if state.get("distributed_type") == DistributedType.MULTI_GPU:  # no accelerator was made
            state["distributed_type"] = DistributedType.MULTI_CPU


def prepare_engine(trainer: Any) -> None:
    """Two things that accelerate and transformers do on GPUs and not on several CPUs."""
    accelerator = trainer.accelerator
    if trainer.args.device.type != "cpu" or accelerator.distributed_type == DistributedType.NO:
        return
    # torch.load does not know the device "cpu:0", to which a checkpoint's optimizer state is loaded
    vars(trainer.args)["_setup_devices"] = torch.device("cpu")
    prepare_model = accelerator.prepare_model

    def prepare(model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        # of a model of frozen parameters there is nothing for DDP to reduce, and it raises
        is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
        return prepare_model(model, device_placement, evaluation_mode or is_frozen)

    accelerator.prepare_model = prepare


# ---------------------------------------------------------------------- FSDP2


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards the model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard(model: nn.Module) -> None:
    """Have the shards of an FSDP2 model as its parameters, and nothing gathered that an update would not reach."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def exact_inputs(model: nn.Module) -> Iterator[None]:
    """FSDP2 does not cast what goes into and comes out of its modules, and shards again when the block ends.

    (It would round the residual stream to bf16 at every layer. And what stays gathered after a forward without backward
    would not see the update.)
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states: dict[int, Any] = {id(state): state for state in (module._get_fsdp_state() for module in modules)}
    policies = {key: state._mp_policy for key, state in states.items()}
    try:
        for key, state in states.items():
            state._mp_policy = dataclasses.replace(policies[key], cast_forward_inputs=False, output_dtype=None)
        yield
    finally:
        for key, state in states.items():
            state._mp_policy = policies[key]
        reshard(model)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered if it is sharded: then every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
