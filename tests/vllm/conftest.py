"""vLLM for the tests: one server for all workers of pytest-xdist, and models without an engine in this process."""

import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn


SUPPORT = str(Path(__file__).parent / "support")
sys.path.insert(0, SUPPORT)

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH")])),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
# For a process that does other things as well: vLLM must not bind its threads to a core.
IN_PROCESS = ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
START_TIMEOUT = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: scripts/setup_vllm.sh installs it"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(kind)`: folder of a small model; see `toy_trainer.KINDS`."""
    from toy_trainer import save_checkpoint

    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            save_checkpoint(kind, made[kind])
        return made[kind]

    return make


# ---------------------------------------------------------- servers


class Server:
    """A running `vllm serve`."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url

    def post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read() or b"null")

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Log-probabilities `(T - 1,)` of all tokens but the first."""
        body = {"model": str(self.folder), "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
        answer = self.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        return torch.tensor([given[str(t)]["logprob"] for t, given in zip(tokens[1:], answer[1:], strict=True)])


@contextlib.contextmanager
def running_server(folder: Path, log: Path, *flags: str, **environment: str) -> Iterator[Server]:
    """A server with the backend `sketch`, up and healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--skip-tokenizer-init"),
        *("--max-model-len", "64", "--max-num-seqs", "8"),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
        *("--weight-transfer-config", '{"backend": "sketch"}'),
        *flags,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT | environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process, log)
        yield Server(folder, url)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _wait_until_healthy(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the vLLM server did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)


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
