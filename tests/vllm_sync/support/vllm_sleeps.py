"""Sleep mode for vLLM's CPU build, which has none: vLLM's own path down to the worker, and a backend of ours below it.

Asleep, weights and key-value caches are NaN; of level 1 the weights come back, as on a GPU.
"""

from typing import Any

import torch


class Forgetful:
    """Makes of a worker's `sleep` and `wake_up` what vLLM's memory allocator makes of them on a GPU."""

    slept: list[int] = []  # the levels

    def __init__(self, model: torch.nn.Module, caches: list[torch.Tensor]) -> None:
        self.tensors = {"weights": [*model.parameters(), *model.buffers()], "kv_cache": caches}
        self.kept: list[torch.Tensor] = []

    @torch.no_grad()
    def suspend(self, level: int) -> None:
        self.slept.append(level)
        self.kept = [tensor.clone() for tensor in self.tensors["weights"]] if level == 1 else []
        for tensor in [*self.tensors["weights"], *self.tensors["kv_cache"]]:
            tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.zero_()

    @torch.no_grad()
    def resume(self, tags: list[str] | None) -> None:
        if tags is None or "weights" in tags:
            for tensor, value in zip(self.tensors["weights"], self.kept, strict=False):
                tensor.copy_(value)
            self.kept = []
        if tags is None or "kv_cache" in tags:
            for tensor in self.tensors["kv_cache"]:
                tensor.zero_()


def install() -> None:
    """Have this process's vLLM sleep."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    def sleep(self: Any, level: int = 1) -> None:
        runner = self.model_runner
        self._sleep_mode_backend = self._sleep_mode_backend or Forgetful(runner.model, runner.kv_caches)
        Worker.sleep(self, level)

    type(current_platform).is_sleep_mode_available = lambda self: True
    CPUWorker.sleep, CPUWorker.wake_up = sleep, Worker.wake_up
    torch.accelerator.synchronize = lambda *args: None
    torch.accelerator.get_memory_info = lambda *args: (1 << 30, 1 << 31)
