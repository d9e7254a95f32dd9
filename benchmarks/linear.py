"""One linear layer: what a sketch adds to it, and the update of its weight, against the least that they could take.

    python benchmarks/linear.py                                  # 2048 inputs, 6144 outputs, rank 256, 1,024 tokens
    python benchmarks/linear.py --inputs 576 --outputs 1536 --rank 64
    python benchmarks/linear.py --profile trace.json             # a trace of the sketch's forward and backward

The first table has forward and backward, in turns in one process: of the frozen layer, with the weight's gradient, with LoRA
as PEFT adds it, and with each projection. The second has the parts of the sketch beside the bare matrix product of the same
shape, and beside the fast Walsh-Hadamard transform as two products with factors of the matrix, which needs 2·(a + b)
operations for each of a·b entries in the place of 2·r. The third has the update of the weight beside a plain `addmm` in fp32
and, on a GPU, beside the time in which the weight is copied.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from shapes import keep_memory
from torch import nn
from torch.profiler import ProfilerActivity, profile

from trl_sketch import SketchConfig, SketchUpdate, get_sketch_model, kernels
from trl_sketch.model import sketch_state
from trl_sketch.projection import PROJECTIONS, SIGN_PROJECTIONS, Signs, _distinct_rows


class Block(nn.Module):
    """A model of one layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up_proj(x)


def in_turns(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each function; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 2):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds[2:]) for name, seconds in times.items()}


def table(title: str, seconds: dict[str, float], least: str, console: Console) -> None:
    result = Table(title=title, title_justify="left")
    result.add_column("", min_width=40)
    for column in ("ms", f"of {least}"):
        result.add_column(column, justify="right", min_width=28)
    for name, value in seconds.items():
        result.add_row(name, f"{1e3 * value:.3f}", f"{value / seconds[least]:.2f}")
    console.print(result)


def fast_transform(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`rows @ H` for `rows (m, n)` and a Walsh-Hadamard matrix H of order n, the Kronecker product of `a` and `b`."""
    m, (p, q) = len(rows), (len(a), len(b))
    return torch.matmul(a, (rows.view(m * p, q) @ b).view(m, p, q)).view(m, p * q)


def walsh_hadamard(order: int, like: torch.Tensor) -> torch.Tensor:
    result = like.new_ones(1, 1)
    while len(result) < order:
        result = torch.cat([torch.cat([result, result], dim=1), torch.cat([result, -result], dim=1)])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=6144)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", type=Path, help="write a trace of a sketch's forward and backward to this file")
    options = parser.parse_args()
    if options.rank > options.inputs:
        parser.error(f"--rank {options.rank}: it must be at most --inputs, {options.inputs}")
    keep_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    d, k, r, tokens = options.outputs, options.inputs, options.rank, options.tokens
    device, dtype, console = torch.device(options.device), getattr(torch, options.dtype), Console(width=120)
    torch.manual_seed(0)
    x = torch.randn(tokens, k, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(tokens, d, device=device, dtype=dtype)

    def block() -> Block:
        return Block(k, d).to(device=device, dtype=dtype)

    models: dict[str, nn.Module] = {"frozen": block().requires_grad_(False), "dense": block()}
    models["LoRA"] = get_peft_model(block(), LoraConfig(r=r, lora_alpha=r, target_modules=["up_proj"]))
    for projection in PROJECTIONS:
        config = SketchConfig(rank=r, projection=projection, target_modules=["up_proj"], kl_budget=None)
        models[f"sketch, {projection}"] = get_sketch_model(block(), config)

    def step(model: nn.Module) -> None:
        x.grad = None
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = model(x)
        y.backward(grad.to(y.dtype))

    if options.profile:
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        step(models["sketch, hadamard"])
        with profile(activities=activities) as trace:
            step(models["sketch, hadamard"])
        trace.export_chrome_trace(str(options.profile))
        print(trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=40))
        return

    shape = f"{k} -> {d}, {tokens} tokens, rank {r}, {options.dtype}, {options.device}"
    seconds = in_turns({name: lambda m=model: step(m) for name, model in models.items()}, options.repeats)
    table(f"forward and backward, {shape}", seconds, "dense", console)

    state = sketch_state(models["sketch, hadamard"])
    layer = next(iter(state.layers.values()))
    key = torch.tensor(12345, dtype=torch.int32, device=device)
    n = 1 << (k - 1).bit_length()
    bits = n.bit_length() - 1
    a, b = (walsh_hadamard(1 << part, x.detach()) for part in (bits // 2, bits - bits // 2))
    chosen = _distinct_rows(key, r, bits).long()
    signs = Signs.draw("hadamard", key, r, k)
    independent = Signs.draw("rademacher", key, r, k)
    drawn = signs.block((0, r), (0, k), dtype)
    sigma = drawn.new_tensor([1.0]) * (signs.parts[2][0] * 2 + 1).to(dtype)
    projected = torch.randn(tokens, r, device=device, dtype=dtype)
    padded = x.new_zeros(tokens, n)

    def by_transform() -> torch.Tensor:
        torch.mul(x.detach(), sigma, out=padded[:, :k])
        return fast_transform(padded, a, b)[:, chosen]

    with torch.no_grad():
        error = (by_transform().float() - F.linear(x, drawn).float()).norm() / F.linear(x, drawn).float().norm()
        assert error < 0.05, error
        parts = {
            "X Aᵀ, the product alone": lambda: F.linear(x, drawn),
            "draw A (hadamard)": lambda: signs.block((0, r), (0, k), dtype),
            "draw A (rademacher)": lambda: independent.block((0, r), (0, k), dtype),
            "X Aᵀ by a fast transform": by_transform,
            "Dᵀ (X Aᵀ), the product alone": lambda: grad.t() @ projected,
            "S += Dᵀ (X Aᵀ)": lambda: layer.accumulate(grad, projected),
        }
        seconds = in_turns(parts, options.repeats)
        table(f"parts, {shape}", seconds, "X Aᵀ, the product alone", console)

        q = torch.randint(-127, 128, (d, r), device=device, dtype=torch.int8)
        exponent = torch.full((d,), -24, device=device, dtype=torch.int8)
        master = torch.randn(d, k, device=device)
        weight, other = master.bfloat16(), master.bfloat16()
        factor, basis = q.float(), torch.randn(r, k, device=device)
        wide = torch.zeros(d, n, device=device)
        a, b = a.float(), b.float()

        def scatter_and_transform() -> torch.Tensor:
            wide.zero_()
            wide[:, chosen] = factor
            return fast_transform(wide, a, b)

        exact = (q.double() @ signs.block((0, r), (0, k), torch.float64)).float()
        assert torch.equal(scatter_and_transform()[:, :k] * sigma, exact)

        updates: dict[str, Callable[[], Any]] = {"addmm in fp32": lambda: master.addmm_(factor, basis, alpha=1e-9)}
        for projection in SIGN_PROJECTIONS:
            update = SketchUpdate("w", projection, k, key, key, q, exponent)
            updates[f"update of bf16, {projection}"] = lambda u=update: u.apply_(weight)
            updates[f"update of fp32, {projection}"] = lambda u=update: u.apply_(master)
            if device.type == "cuda":

                def by_torch(u: SketchUpdate = update) -> None:
                    with kernels.disabled():
                        u.apply_(weight)

                updates[f"update of bf16, {projection}, torch operations"] = by_torch
        updates["U A alone, by a fast transform"] = scatter_and_transform
        updates["U A alone, in fp32"] = lambda: factor @ basis
        if device.type == "cpu":
            int8 = signs.block((0, r), (0, k), torch.int8)
            updates["U A alone, in int8"] = lambda: torch._int_mm(q, int8)
        updates["copy of the bf16 weight"] = lambda: other.copy_(weight)
        seconds = in_turns(updates, options.repeats)
        least = "copy of the bf16 weight" if device.type == "cuda" else "addmm in fp32"
        table(f"update, {shape}; order {len(a)} x {len(b)} = {math.prod((len(a), len(b)))}", seconds, least, console)


if __name__ == "__main__":
    main()
