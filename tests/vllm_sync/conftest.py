"""vLLM for the tests: one server for all workers of pytest-xdist, and models without an engine in this process."""

import contextlib
import fcntl
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn


sys.path.insert(0, str(Path(__file__).parent / "support"))
from toy_trainer import save_checkpoint  # noqa: E402
from vllm_server import IN_PROCESS, Server, running_server  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: scripts/setup_vllm.sh installs it"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(kind)`: folder of a small model; see `toy_trainer.KINDS`."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            save_checkpoint(kind, made[kind])
        return made[kind]

    return make


# ---------------------------------------------------------- servers


@contextlib.contextmanager
def _locked(path: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, how)
        yield


@pytest.fixture(scope="session")
def _shared_server(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Iterator[Server]:
    """The session's server. The first xdist worker that asks starts it, and stops it when no worker uses it any more."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    address = folder / "vllm-server.json"
    with contextlib.ExitStack() as stack:
        with _locked(folder / "vllm-server.start"):
            if not address.exists():
                server = stack.enter_context(running_server(checkpoint("qwen3-tied"), folder / "vllm-server.log"))
                address.write_text(json.dumps([str(server.folder), server.url]))
                stack.callback(_retire, folder, address)
            model, url = json.loads(address.read_text())
            stack.enter_context(_locked(folder / "vllm-server.users", fcntl.LOCK_SH))
        yield Server(Path(model), url)


def _retire(folder: Path, address: Path) -> None:
    """Take no new users, and wait until those there are have finished."""
    with _locked(folder / "vllm-server.start"), _locked(folder / "vllm-server.users"):
        address.unlink()


@pytest.fixture
def server(_shared_server: Server) -> Iterator[Server]:
    """The session's server, for one test at a time."""
    with _locked(Path(_shared_server.folder).parent / "vllm-server.use"):
        yield _shared_server


# ---------------------------------------------------------- models in this process


@pytest.fixture(scope="module")
def vllm_environment() -> Iterator[None]:
    """The settings with which vLLM runs in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in IN_PROCESS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def vllm_here(vllm_environment: None) -> Iterator[None]:
    """vLLM in this process, as one worker of one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    with socket.socket() as free, set_current_vllm_config(VllmConfig()):
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1] + 1}"
        parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.cleanup_dist_env_and_memory()


@pytest.fixture
def tensor_parallel_rank(vllm_here: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """`tensor_parallel_rank(rank, size)`: what is built or loaded from now on is that worker's shard.

    A shard is laid out by these two numbers alone; only running it would need the other workers.
    """
    from vllm.distributed import parallel_state

    def set_to(rank: int, size: int) -> None:
        monkeypatch.setattr(parallel_state._TP, "world_size", size)
        monkeypatch.setattr(parallel_state._TP, "rank_in_group", rank)

    return set_to


@pytest.fixture
def build_vllm_model(vllm_here: None) -> Callable[[Path], nn.Module]:
    """`build_vllm_model(folder)`: the model as vLLM loads it, without an engine."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    def build(folder: Path) -> nn.Module:
        config = EngineArgs(
            model=str(folder), enforce_eager=True, skip_tokenizer_init=True, max_model_len=64
        ).create_engine_config()
        with set_current_vllm_config(config):
            return get_model(vllm_config=config)

    return build
