"""What has to be measured on a GPU, by one command: memory, the time of a step, the update's kernel, the KL probe.

    python benchmarks/gpu.py                                             # Qwen3-1.7B's shape, random weights, into gpu.md
    python benchmarks/gpu.py --shape qwen2.5-7b --ranks 256 --methods sketch lora

It runs the other benchmarks and `trl-sketch memory --measure cuda`, each in a process of its own. A part that fails (no memory,
too slow) is written down as failed, and the others go on; the page is written after each part, so that what was measured is
not lost.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from shapes import SHAPES, make_config


HERE = Path(__file__).resolve().parent
GIB = 2**30
METHODS = ("sketch", "lora", "dense", "rgc")


@dataclass(frozen=True)
class Part:
    """A section of the page.

    Attributes:
        command: Arguments of Python.
        shown: Makes the section's text of what the command prints.
    """

    title: str
    command: list[str]
    shown: Callable[[str], str]


def parts(options: argparse.Namespace, model: Path) -> list[Part]:
    """The sections for these options; `model` is a folder with the shape's config.json."""
    shape = SHAPES[options.shape]
    ranks, repeats = [str(rank) for rank in options.ranks], ["--repeats", str(options.repeats)]
    highest, tokens = str(max(options.ranks)), str(options.tokens)
    step = [str(HERE / "step.py"), "--shape", options.shape, "--rows", "1", "--tokens", tokens, "--accumulation", "2"]
    step += ["--markdown", *repeats, "--ranks", *ranks]
    timed = [method for method in options.methods if method != "rgc"]  # a sketch in a step's time
    memory = ["-m", "trl_sketch.cli", "memory", "--model", str(model), "--tokens", tokens]
    memory += ["--measure", "cuda", "--json"]
    memory += [word for rank in ranks for word in ("--rank", rank)]
    memory += [word for method in options.methods for word in ("--method", method)]
    linear = [str(HERE / "linear.py"), *repeats, "--tokens", tokens, "--rank", highest]
    linear += ["--inputs", str(shape["hidden_size"]), "--outputs", str(shape["intermediate_size"])]
    probe = [str(HERE / "probe.py"), *repeats, "--shape", options.shape, "--rank", highest, "--tokens", tokens]
    found = [
        Part("Memory of a step", memory, memory_table),
        *([Part("Time of a step", [*step, "--methods", *timed], str.strip)] if timed else []),
        Part("One layer, and the update of its weight", linear, code),
        Part("The KL probe", [*probe, "--responses", "4"], code),
    ]
    if "sketch" in timed:
        evened = [*step, "--methods", "dense", "sketch", "--spectral_power", "0.5"]
        found.append(Part("Time of a step with `spectral_power: 0.5`", evened, str.strip))
    return found


def code(printed: str) -> str:
    return "\n".join(f"    {line.rstrip()}" for line in printed.strip().splitlines())


def memory_table(printed: str) -> str:
    """Of what `trl-sketch memory --json` prints: the peak that was predicted, the one that was measured, and LoRA's."""
    rows = json.loads(printed)
    lora = {row["rank"]: row["measured_bytes"] for row in rows if row["method"] == "lora"}
    lines = [
        "| method | rank | predicted, GiB | measured, GiB | measured / predicted | of LoRA's, measured |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        predicted, measured = row["total_bytes"], row["measured_bytes"]
        has_rank = row["method"] != "dense"
        of_lora = f"{measured / lora[row['rank']]:.1%}" if has_rank and row["rank"] in lora else ""
        lines.append(
            f"| {row['method']} | {row['rank'] if has_rank else ''} | {predicted / GIB:.3f} | {measured / GIB:.3f} | "
            f"{measured / predicted:.3f} | {of_lora} |"
        )
    return "\n".join(lines)


def measure(part: Part, seconds: float) -> str:
    """The section's text, or why there is none."""
    python = sys.orig_argv[: -len(sys.argv)]  # as this script was started
    start = time.perf_counter()
    try:
        done = subprocess.run([*python, *part.command], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"**Failed**: it took more than {seconds:.0f} s."
    if done.returncode:
        return f"**Failed** with status {done.returncode}:\n\n{code(done.stderr[-2000:])}"
    return f"{part.shown(done.stdout)}\n\n{time.perf_counter() - start:.0f} s in all."


def main() -> int:
    """Returns the exit status: 0, or 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b", help="of the model (default: qwen3-1.7b)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256], help="(default: 64 256)")
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence (default: 1024)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="(default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="of what is timed (default: 5)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a part may take (default: 300)")
    parser.add_argument("--output", type=Path, default=Path("gpu.md"), help="the page (default: gpu.md)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    width = SHAPES[options.shape]["hidden_size"]
    if not all(1 <= rank <= width for rank in options.ranks):
        parser.error(f"--ranks must be from 1 to {width}, the width of {options.shape}")
    if min(options.tokens, options.repeats) < 1 or not 0 < options.timeout < float("inf"):
        parser.error("--tokens, --repeats and --timeout must be positive")
    if options.output.is_dir() or not options.output.absolute().parent.is_dir():
        parser.error(f"--output {options.output} must be a file in a folder that exists")
    properties = torch.cuda.get_device_properties(0)
    command = " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    page = (
        f"# On a GPU: {properties.name}\n\n{options.shape} with random weights, computing in bf16, 1 x {options.tokens} tokens, {properties.total_memory / GIB:.0f} GiB, "
        f"torch {torch.__version__}. What the columns mean: docs/speed.md, and `--help` of the parts.\n\n    {command}\n"
    )
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        make_config(options.shape).save_pretrained(folder)
        for part in parts(options, Path(folder)):
            print(f"{part.title} ...", flush=True)
            text = measure(part, options.timeout)
            failed = text.startswith("**Failed**")
            status |= failed
            print(text if failed else "done", flush=True)
            page += f"\n## {part.title}\n\n{text}\n"
            options.output.write_text(page)
    print(f"Written to {options.output}")
    return status


if __name__ == "__main__":
    sys.exit(main())
