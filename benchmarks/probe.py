"""Time and memory of the KL probe.

    python benchmarks/probe.py                                # 2 probed responses of a batch of 16
    python benchmarks/probe.py --shape qwen3-0.6b --layers 4  # a vocabulary of 152k

Time is given as a ratio to forward and backward of the whole batch, measured in turns in one process. Memory is the
largest number of bytes that a probe has alive at once beside the model, its sketches and its inputs, counted by storage;
beside it stands what is allowed: what one layer keeps for backward of the probed tokens, and one chunk of logits.
"""

import argparse
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, make_model
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer.utils import add_fused_lm_head

from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model, kl


LOGITS_CHUNK = 256  # positions in a chunk of logits, a usual choice of fused losses


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes in storages that are created inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(t) for t in flat(args) + flat(tuple((kwargs or {}).values()))}
        result = func(*args, **kwargs or {})
        for tensor in flat(result if isinstance(result, tuple | list) else (result,)):
            storage, key = tensor.untyped_storage(), id_of(tensor)
            if key not in self.known and key not in given:
                self.known.add(key)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.freed, key, storage.nbytes())
        return result

    def freed(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.live -= nbytes


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def flat(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += flat(value)
    return found


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def kept_by_one_layer(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    """Bytes that backward of one layer keeps beside its parameters, as the difference that a layer makes."""
    totals = []
    layers = model.model.layers
    for count in (1, 2):
        model.model.layers = layers[:count]
        model.config.num_hidden_layers = count
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[id_of(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        parameters = {id_of(p) for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model.model(input_ids=inputs["input_ids"], use_cache=False)  # noqa: F841 - keeps the graph alive
        totals.append(sum(nbytes for key, nbytes in kept.items() if key not in parameters))
    model.model.layers, model.config.num_hidden_layers = layers, len(layers)
    return totals[1] - totals[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--responses", type=int, default=16, help="responses in the batch; two are probed")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a response")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    model = make_model(options.shape, getattr(torch, options.dtype), options.device, options.layers)
    config = model.config
    add_fused_lm_head(model)
    get_sketch_model(model, SketchConfig(rank=options.rank))
    optimizer = SketchOptimizer(model, lr=1.0)
    ids = torch.randint(0, config.vocab_size, (options.responses, options.tokens), device=options.device)
    inputs = {"input_ids": ids, "labels": ids}
    probed = {name: value[:2] for name, value in inputs.items()}

    def train() -> None:
        optimizer.zero_grad()
        for row in ids.split(1):
            model(input_ids=row, labels=row, fused_lm_head=True).log_probs.mean().backward()
        if ids.is_cuda:
            torch.cuda.synchronize()

    times: dict[str, list[float]] = {"train": [], "jvp": [], "finite_difference": []}
    for _ in range(options.repeats):
        times["train"].append(seconds(train))
        optimizer.propose()
        for method in ("jvp", "finite_difference"):
            times[method].append(seconds(lambda m=method: kl.predicted_kl(model, probed, method=m)))
    medians = {name: statistics.median(values) for name, values in times.items()}

    layer = kept_by_one_layer(model, probed)
    chunk = LOGITS_CHUNK * config.vocab_size * 4
    table = Table(
        "probe", "s", "of forward + backward", "peak MiB", "allowed MiB",
        title=f"{options.shape}, {config.num_hidden_layers} layers: 2 of {options.responses} responses of {options.tokens} tokens, "
        f"rank {options.rank}, {options.dtype}, {options.device}",
        caption=f"forward + backward: {medians['train']:.2f} s; one layer keeps {layer / 2**20:.0f} MiB, a chunk of "
        f"{LOGITS_CHUNK} logits takes {chunk / 2**20:.0f} MiB",
    )  # fmt: skip
    for method in ("jvp", "finite_difference"):
        with LiveBytes() as tracked:
            kl.predicted_kl(model, probed, method=method)
        table.add_row(
            method,
            f"{medians[method]:.2f}",
            f"{medians[method] / medians['train']:.0%}",
            f"{tracked.peak / 2**20:.0f}",
            f"{(layer + chunk) / 2**20:.0f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
