"""Bytes and seconds of a rollout sync with vLLM: whole weights, sketch updates, and one copy shared in a process.

python benchmarks/sync.py    # a Qwen3 of 100 million weights with random values; about two minutes on two cores

Without a GPU it takes vLLM's CPU build as the tests do (`scripts/setup_vllm.sh`).
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model
from trl_sketch.sync.client import ServerClient
from trl_sketch.sync.colocate import ColocatedWeights, vllm_model
from trl_sketch.sync.update import Step, UpdateMessage, new_run_id


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "vllm_sync" / "support"))  # which makes vLLM's CPU build keep its weights
from vllm_server import ENVIRONMENT, running_server  # noqa: E402


def make_checkpoint(folder: str) -> None:
    config = Qwen3Config(
        vocab_size=16384,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)


def make_trainer(folder: str, rank: int) -> tuple[nn.Module, SketchOptimizer, list[Step]]:
    """Model and optimizer, and the list into which its updates go."""
    model = get_sketch_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        SketchConfig(rank=rank, update_ratio=6e-5, kl_budget=None),
    )
    optimizer, steps = SketchOptimizer(model, lr=1.0), []
    optimizer.listeners.append(lambda version, updates: steps.append(Step(version - 1, version, updates)))
    return model, optimizer, steps


def train_step(model: nn.Module, optimizer: SketchOptimizer) -> None:
    tokens = torch.randint(0, 16384, (1, 32))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure_server(folder: str, rank: int, repeats: int) -> None:
    model, optimizer, steps = make_trainer(folder, rank)
    parameters = dict(model.named_parameters())
    size = sum(parameter.nbytes for parameter in parameters.values())
    flags = ("--skip-tokenizer-init", "--max-model-len", "256")
    with running_server(Path(folder), Path(folder) / "log", *flags) as server:
        client = ServerClient(server.url, new_run_id())
        print(f"initialize: {seconds(lambda: client.initialize(parameters, sketched(optimizer))):.2f} s")
        full, update, full_bytes, update_bytes = [], [], 0, 0
        for _ in range(repeats):
            version = optimizer.sketches.step
            before = client.bytes_sent
            full.append(seconds(lambda version=version: client.send_weights(version, parameters)))
            full_bytes = client.bytes_sent - before
            train_step(model, optimizer)
            before = client.bytes_sent
            update.append(seconds(lambda: client.send_updates(UpdateMessage(client.run_id, steps))))
            update_bytes = client.bytes_sent - before
            payload = sum(u.nbytes for u in steps[0].updates)
            steps.clear()
        different = client.differing(parameters)
    matrices = sum(layer.weight.nbytes for layer in optimizer.layers)
    print(f"| {len(parameters)} tensors, rank {rank} | bytes | share of the bf16 weights | s (median of {repeats}) |")
    print("|---|---|---|---|")
    print(f"| full sync | {full_bytes:,} | 1 | {statistics.median(full):.3f} |")
    print(f"| sketch update | {update_bytes:,} | 1/{size / update_bytes:.0f} | {statistics.median(update):.3f} |")
    print(f"payload {payload:,}, header {100 * (update_bytes / payload - 1):.2f} %; of the {matrices:,} bytes of the")
    print(f"selected matrices 1/{matrices / update_bytes:.0f}; tensors that differ at the end: {len(different)}")


def sketched(optimizer: SketchOptimizer) -> list[str]:
    return [f"{layer.name}.weight" for layer in optimizer.layers]


def measure_colocate(folder: str, rank: int, repeats: int) -> None:
    from vllm import LLM

    model, optimizer, _ = make_trainer(folder, rank)
    llm = LLM(folder, enforce_eager=True, skip_tokenizer_init=True, max_model_len=256, gpu_memory_utilization=0.3)
    parameters = dict(model.named_parameters())
    weights = ColocatedWeights(vllm_model(llm), parameters)
    copy = statistics.median(seconds(weights.copy) for _ in range(repeats))
    first = seconds(weights.share)
    shared = sum(parameters[name].nbytes for name in weights.shared)
    again = statistics.median(seconds(lambda: (weights.share(), weights.copy())) for _ in range(repeats))
    train_step(model, optimizer)
    print("| in one process | s a sync | copies of the weights | bytes |")
    print("|---|---|---|---|")
    print(f"| copied | {copy:.4f} | 2 | {2 * shared:,} |")
    print(f"| shared (set up once: {first:.4f} s) | {again:.4f} | 1 | {shared:,} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    os.environ |= ENVIRONMENT
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as checkpoint:
        make_checkpoint(checkpoint)
        measure_server(checkpoint, arguments.rank, arguments.repeats)
        measure_colocate(checkpoint, arguments.rank, arguments.repeats)
