"""Starts a `vllm serve` with the backend `sketch`."""

import contextlib
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
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a single worker lives in the server's process: it starts in half the time
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
TENSOR_PARALLEL = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
# For a process that does other things as well: vLLM must not bind its threads to a core.
IN_PROCESS = ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class Server:
    """A running server of the model in `folder`."""

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
    """A server that is up; `flags` and `environment` are added to the usual ones.

    Raises:
        RuntimeError: It did not start; the message has the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-num-seqs", "32"),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
        *("--weight-transfer-config", '{"backend": "sketch"}'),
        *flags,
    ]
    environment = os.environ | ENVIRONMENT | environment
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_TIMEOUT
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the vLLM server did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        yield Server(folder, url)
    finally:
        _stop(process)


def _is_healthy(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except OSError:
        return False
    return True


def _stop(process: subprocess.Popen) -> None:
    """End the server and the processes that it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            return
