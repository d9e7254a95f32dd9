"""Starts a `vllm serve` with the backend `sketch`, ends it, and starts it again."""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch


SUPPORT = str(Path(__file__).parent)
START_TIMEOUT = 300
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH")])),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine in this process has its worker here as well
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
TENSOR_PARALLEL = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
# For a process that does other things as well: vLLM must not bind its threads to a core.
IN_PROCESS = ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class Server:
    """A server of the model in `folder`, that listens at `url` while it runs."""

    def __init__(
        self,
        folder: Path,
        url: str,
        log: Path = Path(os.devnull),
        flags: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder, self.url = folder, url
        self._log, self._flags, self._environment = log, flags, environment or {}
        self._process: int | None = None

    def start(self) -> None:
        """Begin to start; [`wait`] waits until it is up."""
        host, port = self.url.removeprefix("http://").split(":")
        arguments = [
            *(str(self.folder), "--host", host, "--port", port, "--enforce-eager", "--max-num-seqs", "32"),
            *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
            *("--weight-transfer-config", '{"backend": "sketch"}'),
            *self._flags,
        ]
        self._process = _fork([arguments, self._environment, str(self._log)])

    def wait(self) -> None:
        """Wait until it is up.

        Raises:
            RuntimeError: It did not start; the message has the end of its log.
        """
        deadline = time.monotonic() + START_TIMEOUT
        while not _is_healthy(self.url):
            if time.monotonic() > deadline or not self._is_alive():
                raise RuntimeError(f"the vLLM server did not start:\n{self._log.read_text()[-4000:]}")
            time.sleep(0.1)

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End the server and the processes that it started, and wait until it has ended."""
        assert self._process is not None
        deadline = time.monotonic() + 10
        while self._is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process, signal.SIGKILL if time.monotonic() > deadline else how)
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)

    def _is_alive(self) -> bool:
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self._process, 0)
            return True
        return False

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
    """A server that is up; `flags` and `environment` are added to the usual ones.

    Raises:
        RuntimeError: It did not start; the message has the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(folder, f"http://127.0.0.1:{port}", log, flags, environment)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.end(signal.SIGTERM)


@functools.cache
def _nursery() -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(SUPPORT, "vllm_nursery.py"))]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | ENVIRONMENT, text=True
    )


def _fork(request: list) -> int:
    """The id of a new server's process."""
    nursery = _nursery()
    assert nursery.stdin is not None and nursery.stdout is not None
    nursery.stdin.write(json.dumps(request) + "\n")
    nursery.stdin.flush()
    return int(nursery.stdout.readline())


def _is_healthy(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except OSError:
        return False
    return True
