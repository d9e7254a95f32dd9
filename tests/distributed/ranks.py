"""Run a function on several ranks that talk through gloo, in processes that are forked from one that has imported all."""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import trl.trainer.grpo_trainer  # noqa: F401  what takes long to import, for those that need it
from torch.utils._python_dispatch import TorchDispatchMode

import trl_sketch.trainer  # noqa: F401


_FOLDER = str(Path(__file__).parent)


def run(world: int, function: Callable[..., Any], *args: Any, launched: bool = False) -> list[Any]:
    """What `function(*args)` returns on each of `world` ranks; the first exception of a rank is raised here.

    Args:
        world: Number of ranks.
        function: Of a module's top level.
        args: Can be pickled.
        launched: As by `accelerate launch`: only the environment is set, and nothing is initialized.
    """
    _start_server()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, args=(world, folder, free_port(), launched, function, args), nprocs=world, start_method="forkserver"
        )
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world)]


def _start_server() -> None:
    """Start the process that the ranks are forked from, unless it runs. It has Python's path from the environment only."""
    mp.set_forkserver_preload(["ranks"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *filter(None, [before])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _rank(
    rank: int, world: int, folder: str, port: int, launched: bool, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if not launched:
        dist.init_process_group("gloo")
    torch.save(function(*args), Path(folder, f"{rank}.pt"))
    if dist.is_initialized():
        dist.destroy_process_group()


class Traffic(TorchDispatchMode):
    """Records the collectives that go through process groups: `(name, bytes)`."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [t for t in torch.utils._pytree.tree_leaves(args[:1]) if isinstance(t, torch.Tensor)]
            self.collectives.append((func._opname, sum(t.numel() * t.element_size() for t in tensors)))
        return func(*args, **(kwargs or {}))


@contextmanager
def traffic() -> Iterator[list[tuple[str, int]]]:
    with Traffic() as mode:
        yield mode.collectives
