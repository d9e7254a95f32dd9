"""Forks vLLM servers from a process that has imported vLLM: one starts in a third of the time.

Reads a line of JSON a server from its input, `[arguments, environment, log]`, and answers with the id of the process. The
servers end with it.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import sys

import vllm.entrypoints.cli.main
import vllm.entrypoints.openai.api_server  # noqa: F401
import vllm.v1.engine.core  # noqa: F401
import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_model_runner  # noqa: F401
import vllm.v1.worker.cpu_worker  # noqa: F401


def serve(arguments: list[str], environment: dict[str, str], log: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.setsid()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if vllm.platforms.current_platform.is_cpu():  # where vLLM would import itself once more for its engine's process
        for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
            module.get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv = ["vllm", "serve", *arguments]
    vllm.entrypoints.cli.main.main()


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended servers leave nothing behind
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(*json.loads(line))
            os._exit(0)
        print(process, flush=True)
