"""RGC's calibration: the size of a first AdamW step on the untrained model, as a step size for sketches.

```bash
trl-sketch calibrate --model Qwen/Qwen3-1.7B-Base --dataset data/gsm8k --reward recipes/rewards.py:math_reward \
    --learning_rate 1e-6 --rank 64 --projection orthonormal
```

One GRPO batch is rolled out and its dense gradient formed, once, in one process; that takes the weights and as much again.
No weight moves. (A sketch without `update_ratio` has by itself the size of an AdamW step whose every weight moves by the
learning rate, `lr·√(number of weights)`. What is measured here is smaller by the weights whose gradient is near AdamW's
epsilon, and is a fraction of the weights, as `update_ratio` is.)
"""

import argparse
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .config import SketchConfig
from .model import select_layers
from .problems import load_problems
from .projection import PROJECTIONS, make_projection
from .rewards import REWARDS, load_reward


@dataclass(frozen=True)
class Calibration:
    """The size of a first AdamW step over the weights that a sketch would train.

    Attributes:
        learning_rate: AdamW's.
        update_ratio: ‖ΔW‖ / ‖W‖, for `norm="matrix"` or `"global"`: the step as a whole is then as long as AdamW's.
        plain_learning_rate: The learning rate at which `norm="none"`, a step of `learning_rate · S A`, is as long.
        rms: Root mean square of a weight's step; AdamW's learning rate at most.
        weights: Number of weights.
        matrices: Number of matrices.
    """

    learning_rate: float
    update_ratio: float
    plain_learning_rate: float
    rms: float
    weights: int
    matrices: int


@torch.no_grad()
def calibrate(
    model: nn.Module, learning_rate: float, config: SketchConfig | None = None, epsilon: float = 1e-8
) -> Calibration:
    """Measure from the dense gradients in `model` (after `backward()`). No weight moves.

    AdamW's first step, without weight decay, is `lr · g / (|g| + epsilon)`: its moments are corrected to g and g².

    Args:
        model: Not sketched; the selected weights have their `grad`.
        learning_rate: AdamW's.
        config: What is selected, and for `plain_learning_rate` its rank and projection; default `SketchConfig()`.
        epsilon: AdamW's.

    Raises:
        ValueError: A selected weight has no gradient, or all gradients are zero or not all finite.
    """
    config = SketchConfig() if config is None else config
    moved = size = applied = 0.0
    weights = 0
    selected = list(select_layers(model, config))
    for name, layer in selected:
        if layer.weight.grad is None:
            raise ValueError(f"{name}.weight has no gradient: call backward() first, without freezing it")
        gradient = layer.weight.grad.float()
        moved += (gradient / (gradient.abs() + epsilon)).square_().sum(dtype=torch.float64).item()
        size += layer.weight.float().square().sum(dtype=torch.float64).item()
        basis = make_projection(
            config.projection,
            min(config.rank, layer.in_features),
            layer.in_features,
            seed=config.projection_seed or 0,
            name=name,
            device=gradient.device,
        )
        applied += ((gradient @ basis.T) @ basis).square_().sum(dtype=torch.float64).item()
        weights += gradient.numel()
    if not 0 < moved < float("inf") or not 0 < applied < float("inf"):
        raise ValueError(
            "the gradient is zero, or not finite. In GRPO it is zero where all responses to a prompt have the same reward: "
            "take more prompts, or more responses each"
        )
    step = learning_rate * moved**0.5
    return Calibration(
        learning_rate=learning_rate,
        update_ratio=step / size**0.5,
        plain_learning_rate=step / applied**0.5,
        rms=step / weights**0.5,
        weights=weights,
        matrices=len(selected),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trl-sketch calibrate`."""
    parser.add_argument("--model", required=True, help="Untrained model: on the Hub, or a folder.")
    parser.add_argument(
        "--dataset",
        required=True,
        help="Problems with a column `prompt` and what the reward needs: on the Hub, or a local file or folder.",
    )
    parser.add_argument(
        "--reward",
        required=True,
        help=f"Reward function: {', '.join(REWARDS)}, FILE.py:FUNCTION or package.module:FUNCTION.",
    )
    parser.add_argument("--learning_rate", type=float, default=1e-6, help="AdamW's (default: %(default)s, as RGC).")
    parser.add_argument("--epsilon", type=float, default=1e-8, help="AdamW's (default: %(default)s).")
    parser.add_argument("--rank", type=int, default=256, help="Of the sketch, for plain_learning_rate.")
    parser.add_argument("--projection", choices=PROJECTIONS, default="hadamard", help="For plain_learning_rate.")
    parser.add_argument("--num_prompts", type=int, default=8, help="Prompts of the batch.")
    parser.add_argument("--num_generations", type=int, default=8, help="Responses to each.")
    parser.add_argument("--microbatch", type=int, default=4, help="Responses in one forward and backward pass.")
    parser.add_argument("--max_completion_length", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--bf16", action="store_true", help="Compute under bf16 autocast; the weights stay fp32.")
    parser.add_argument("--use_cpu", action="store_true", default=not torch.accelerator.is_available())
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    """Roll out one GRPO batch, measure, and print the step sizes as YAML.

    Raises:
        SystemExit: Something that was asked for is not there, or there is no gradient to measure.
    """
    try:
        result = _measure(args)
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"# A first AdamW step at learning rate {args.learning_rate:g} moves a weight by {result.rms:.3g} (RMS),")
    print(f"# over {result.weights:,} weights of {result.matrices} matrices.")
    print(f"update_ratio: {result.update_ratio:.4g}  # norm: matrix or global")
    print(f"plain_learning_rate: {result.plain_learning_rate:.4g}  # norm: none; rank {args.rank}, {args.projection}")


def _measure(options: argparse.Namespace) -> Calibration:
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    responses = options.num_prompts * options.num_generations
    if responses % options.microbatch:
        raise ValueError(f"--microbatch {options.microbatch} must divide the batch of {responses} responses")
    config = SketchConfig(rank=options.rank, projection=options.projection, projection_seed=options.seed)
    results: list[Calibration] = []

    class Measure(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            results.append(calibrate(kwargs["model"], options.learning_rate, config, options.epsilon))

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=options.model,
            reward_funcs=load_reward(options.reward),
            args=GRPOConfig(
                output_dir=folder,
                max_steps=1,
                per_device_train_batch_size=options.microbatch,
                gradient_accumulation_steps=responses // options.microbatch,
                num_generations=options.num_generations,
                max_completion_length=options.max_completion_length,
                temperature=options.temperature,
                learning_rate=0.0,
                max_grad_norm=0.0,  # AdamW's step does not depend on the gradient's size
                optim="sgd",  # it keeps no state, and at this rate changes nothing
                model_init_kwargs={"dtype": "float32"},
                bf16=options.bf16,
                use_cpu=options.use_cpu,
                seed=options.seed,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=load_problems(options.dataset, split="train"),
            callbacks=[Measure()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return results[0]


def main(arguments: list[str] | None = None) -> None:
    """`python -m trl_sketch.calibrate`, the same as `trl-sketch calibrate`."""
    parser = argparse.ArgumentParser(
        prog="trl-sketch calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    run(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
