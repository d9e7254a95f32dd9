"""Makes vLLM's CPU build keep its linear weights as they are loaded, as it does on a GPU.

The CPU build packs linear weights for its own kernels and throws the originals away, so no weight could be synchronized. With
this folder on PYTHONPATH every vLLM process finds the entry point beside this file and computes with `F.linear`.
"""

import os

from torch import nn


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; called in every vLLM process, some of them more than once."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if os.environ.get("VLLM_SLEEPS_ON_CPU"):
        import vllm_sleeps

        vllm_sleeps.install()
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm
    if packing.__module__ == __name__:
        return

    def dispatch_cpu_unquantized_gemm(layer: nn.Module, remove_weight: bool) -> None:
        if layer.weight.is_meta or layer.weight.ndim != 2:
            packing(layer, remove_weight)
        else:
            layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm
