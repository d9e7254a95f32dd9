"""What the three recipes share: arguments, data, the progress bar and the run. `report` has what is left at its end."""

import logging
import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from clock import Clock
from datasets import Dataset, DatasetDict, load_dataset
from embedded import (
    DIGITS,
    Accuracy,
    Split,
    WarmStart,
    evaluate,
    make_problems,
    warm_start_model,
)
from meters import Meter, rollout_gap
from peft import PeftModel
from rewards import REWARDS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from settings import read_settings
from smollm2 import smollm2_folder
from torch import nn
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer, TrlParser

from trl_sketch import SketchGRPOConfig


EMBEDDED = Path(__file__).parent / "embedded"  # the YAML files of the embedded default
EMBEDDED_SPLITS: dict[str, Split] = {"test": "held_out", "validation": "validation"}
PACKAGED_MODELS = {"smollm2-135m": smollm2_folder}  # names of models that a package carries
GAP_PROMPTS = 32  # held-out problems that rollout_gap_every looks at
FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}

console = Console()


# ----------------------------------------------------------------------------------------------------------- arguments


@dataclass
class ScriptArguments:
    """What a recipe needs beside the trainer's arguments and the method's."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Model on the Hub, folder, or smollm2-135m, which a package carries. Default: the embedded one, a tiny "
            "model that sorts digits."
        },
    )
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Dataset on the Hub, folder, or one json, jsonl, parquet or csv file, with the columns `prompt` (text "
            "or chat) and `answer`. Needed with model_name_or_path."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(
        default="test",
        metadata={
            "help": "Split to evaluate on; validation is for choosing settings. A dataset without it has problems held out "
            "of training. The embedded task has both."
        },
    )
    max_prompt_length: int | None = field(
        default=None,
        metadata={
            "help": "Leave out problems whose prompt has more tokens: vLLM refuses what might exceed its context."
        },
    )
    rewards: list[str] = field(
        default_factory=lambda: ["exact_match"],
        metadata={
            "help": "Reward functions: exact_match (the completion is the answer), math (math-verify finds the answer "
            "equal), last_number (of the completion), reasoning_gym (the task's verifier, on what is between answer tags) or "
            "reasoning_gym_number (the same on the last number). The first is also the measure of accuracy."
        },
    )
    num_eval_problems: int = field(
        default=512, metadata={"help": "Held-out problems to evaluate on before and after training; 0: none."}
    )
    accuracy_every: int | None = field(
        default=None,
        metadata={
            "help": "Optimizer steps between measurements of accuracy in the course of training; logged with the next step that "
            "is, and not part of its time. Default: none but before and after."
        },
    )
    rollout_gap_every: int | None = field(
        default=None,
        metadata={
            "help": "Optimizer steps between measurements of the gap between the trainer's log-probabilities and those of a "
            "bf16 copy of its weights, which a rollout engine would have; logged like accuracy_every. Default: none."
        },
    )
    plot_file: str = field(default="reward.png", metadata={"help": "File of the reward curve, inside output_dir."})
    save_trained_model: bool = field(default=True, metadata={"help": "Save the trained model into output_dir."})


def parse_arguments(default_config: str, *method: type) -> tuple[Any, ...]:
    """`ScriptArguments`, `SketchGRPOConfig` and the method's own config, from the command line and a YAML file (`--config`).

    Without `--config` and without a model of the user's, the YAML file is `embedded/<default_config>`. What a YAML file may
    say is in `settings.py`.
    """
    arguments = [word for argument in sys.argv[1:] for word in _as_words(argument)]
    if "--config" not in arguments and "--model_name_or_path" not in arguments:
        arguments = ["--config", str(EMBEDDED / default_config), *arguments]
    parser = TrlParser([ScriptArguments, SketchGRPOConfig, *method])
    parser.set_defaults(use_cpu=not torch.accelerator.is_available(), logging_steps=1)
    if "--config" in arguments:
        place = arguments.index("--config")
        _take_settings(parser, arguments[place + 1], arguments)
        del arguments[place : place + 2]
    script, training, *rest = parser.parse_args_and_config(arguments)
    if script.model_name_or_path and not script.dataset_name:
        parser.error("--model_name_or_path needs --dataset_name: the embedded problems suit the embedded model only")
    if script.dataset_name and not script.model_name_or_path:
        parser.error("--dataset_name needs --model_name_or_path: the embedded model knows digits only")
    if not script.model_name_or_path and script.dataset_test_split not in EMBEDDED_SPLITS:
        parser.error(
            f"--dataset_test_split {script.dataset_test_split}: the embedded task has {' and '.join(EMBEDDED_SPLITS)}"
        )
    unknown = [name for name in script.rewards if name not in REWARDS]
    if unknown:
        parser.error(f"--rewards {' '.join(unknown)}: it must be among {', '.join(REWARDS)}")
    for name in ("num_eval_problems", "accuracy_every", "rollout_gap_every"):
        if (getattr(script, name) or 0) < 0:
            parser.error(f"--{name} {getattr(script, name)}: it must not be negative; 0 is none")
    if script.max_prompt_length is not None and script.max_prompt_length < 1:
        parser.error(f"--max_prompt_length {script.max_prompt_length}: it must be a number of tokens")
    be_quiet()
    return script, training, *rest


def _take_settings(parser: TrlParser, file: str, arguments: list[str]) -> None:
    """Make the settings of a YAML file the parser's defaults."""
    try:
        settings, required = read_settings(file)
    except (OSError, ValueError) as error:
        parser.error(f"--config {file}: {error}")
    missing = sorted(name for name in required if f"--{name}" not in arguments)
    if missing:
        parser.error(f"{file} needs {', '.join(f'--{name}' for name in missing)}: the file says where from")
    os.environ.update({name: str(value) for name, value in settings.pop("env", {}).items()})
    unknown = parser.set_defaults_with_config(**settings)
    if unknown:
        parser.error(f"{file} has settings that {Path(sys.argv[0]).name} does not know: {' '.join(unknown)}")


def _as_words(argument: str) -> list[str]:
    """`--kl-budget=1` as `--kl_budget`, `1`: the two forms in which TrlParser knows every option."""
    if not argument.startswith("--"):
        return [argument]
    name, equals, value = argument.partition("=")
    name = "--" + name[2:].replace("-", "_")
    return [name, value] if equals else [name]


def be_quiet() -> None:
    """Errors only, and no bars but ours."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="trl|transformers|torch|peft|accelerate")


# ------------------------------------------------------------------------------------------------------ model and data


@dataclass
class Job:
    """What is trained, on what, and how it is judged."""

    script: ScriptArguments
    model: str  # folder or Hub name, for the trainer to load
    train: Dataset  # columns prompt and answer
    held_out: list[dict[str, Any]]  # problems that are not in `train`
    rewards: list[Callable[..., list[float | None]]]
    title: str


def prepare(script: ScriptArguments, training: GRPOConfig) -> Job:
    """The embedded job, or the user's model and dataset."""
    rewards = [REWARDS[name] for name in script.rewards]
    if script.model_name_or_path:
        packaged = PACKAGED_MODELS.get(script.model_name_or_path)
        model = str(packaged()) if packaged else script.model_name_or_path
        train, held_out = load_problems(script)
        if script.max_prompt_length is not None:
            tokenizer = AutoTokenizer.from_pretrained(model)
            train = train.filter(lambda row: prompt_length(tokenizer, row["prompt"]) <= script.max_prompt_length)
        title = f"{script.model_name_or_path} on {script.dataset_name}"
        return Job(script, model, train, held_out, rewards, title)

    torch.set_num_threads(1)  # a second thread makes so small a model slower, on a busy machine many times
    with training.main_process_first(desc="warm start"):
        model = warm_start_model(WarmStart(seed=training.seed), progress=training.process_index == 0)
    train = Dataset.from_list(make_problems("train", 8192, seed=training.seed))
    held_out = make_problems(EMBEDDED_SPLITS[script.dataset_test_split], script.num_eval_problems)
    return Job(script, model, train, held_out, rewards, f"Sorting {DIGITS} digits, embedded model")


def load_problems(script: ScriptArguments) -> tuple[Dataset, list[dict[str, Any]]]:
    """The user's training problems and at most `num_eval_problems` held-out ones.

    Raises:
        FileNotFoundError: The dataset is neither here nor to be had from the Hub.
        ValueError: A split or a column is missing.
    """
    name = str(script.dataset_name)
    builder = FILE_BUILDERS.get(Path(name).suffix)
    if builder and not Path(name).is_file():
        raise FileNotFoundError(f"dataset_name={name}: there is no such file")
    if builder:
        data = load_dataset(builder, data_files={script.dataset_train_split: name})
    else:
        try:
            data = load_dataset(name, script.dataset_config)
        except (ConnectionError, FileNotFoundError) as error:
            raise FileNotFoundError(
                f"dataset_name={name} is no folder here, and the Hub did not give it ({error}). Where recipes/data has a "
                "script for it, run that first; else pass a local file or folder"
            ) from error
    assert isinstance(data, DatasetDict)
    if script.dataset_train_split not in data:
        raise ValueError(
            f"{name} has no split {script.dataset_train_split!r}: set dataset_train_split to one of {[*data]}"
        )
    train = data[script.dataset_train_split]
    missing = {"prompt", "answer"} - set(train.column_names)
    if missing:
        raise ValueError(
            f"{name} lacks the columns {sorted(missing)}; it has {train.column_names}: rename or map them"
        )
    count = script.num_eval_problems
    if count == 0:
        return train, []
    if script.dataset_test_split in data:
        test = data[script.dataset_test_split]
    else:
        train, test = hold_out(train, count)
        if script.dataset_test_split == "validation" and "test" not in data:
            train, test = hold_out(train, count)  # others than those that a run without this split is judged on
    return train, test.select(range(min(count, len(test)))).to_list()


def hold_out(problems: Dataset, count: int) -> tuple[Dataset, Dataset]:
    """All but `count` problems (but no more than a tenth of them), and those; always the same ones."""
    parts = problems.train_test_split(test_size=min(count, math.ceil(len(problems) / 10)), seed=0)
    return parts["train"], parts["test"]


def prompt_length(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]]) -> int:
    """Tokens of a prompt, text or chat, as the trainer gives it to the model."""
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return len(tokenizer(prompt)["input_ids"])


# ------------------------------------------------------------------------------------------------------------ progress


class RewardBar(TrainerCallback):
    """A progress bar with the reward of the last steps; a line for every tenth of the run where there is no terminal."""

    def __init__(self) -> None:
        self.bar = Progress(
            TextColumn("GRPO"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("reward {task.fields[reward]}"),
            console=console,
        )

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero:
            self.task = self.bar.add_task("GRPO", total=state.max_steps, reward="–")
            self.bar.start()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if not state.is_world_process_zero or "reward" not in (logs or {}):
            return
        rewards = [log["reward"] for log in state.log_history[-10:] if "reward" in log]
        said = f"{sum(rewards) / len(rewards):.2f} (mean of the last {len(rewards)})"
        self.bar.update(self.task, reward=said)
        if not console.is_terminal and state.global_step % max(1, state.max_steps // 10) == 0:
            console.print(f"step {state.global_step}/{state.max_steps}  reward {said}")

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.bar.stop()


# ------------------------------------------------------------------------------------------------------------- the run


@dataclass
class Result:
    """What a run reached."""

    before: Accuracy | None  # None where there are no held-out problems
    after: Accuracy | None
    clock: Clock


def run(trainer: GRPOTrainer, job: Job) -> Result:
    """Evaluate, train, evaluate again and save the model, with one progress bar."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(RewardBar())
    fold_head(trainer.model)
    clock = Clock(trainer)
    add_meters(trainer, job, clock)
    say_where(trainer)
    before = accuracy(trainer, job)
    resume = trainer.args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    after = accuracy(trainer, job)
    if job.script.save_trained_model:
        if trainer.is_fsdp_enabled:  # an ordinary model, however the checkpoints were written
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model()
    return Result(before, after, clock)


def fold_head(model: PreTrainedModel | PeftModel) -> None:
    """Give the LM head its input in one piece.

    Of the prompt, generation needs the last position only, and a head that is frozen multiplies such a slice row by row: on a
    CPU PyTorch then copies its weight for each row of the batch, 1.8 GB for 32 rows of a model with 49,152 tokens, which
    took as long as all the rest of the generation.
    """

    def contiguous(head: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (inputs[0].contiguous(), *inputs[1:])

    model.get_output_embeddings().register_forward_pre_hook(contiguous)


def add_meters(trainer: GRPOTrainer, job: Job, clock: Clock) -> None:
    """What the script is to measure in the course of training."""
    script = job.script

    def measure_accuracy() -> dict[str, float]:
        found = accuracy(trainer, job)
        assert found is not None
        return {"accuracy/greedy": found.greedy, "accuracy/sampled": found.sampled}

    if script.accuracy_every and job.held_out:
        Meter(trainer, clock, script.accuracy_every, measure_accuracy, at_end=False)
    if script.rollout_gap_every:
        said = f"rollout_gap_every={script.rollout_gap_every}"
        if not job.held_out:
            raise ValueError(f"{said} looks at held-out problems: set num_eval_problems to 1 or more")
        if trainer.accelerator.num_processes > 1:
            raise ValueError(f"{said} needs one process, and there are {trainer.accelerator.num_processes}")
        if isinstance(trainer.model, PeftModel):
            raise ValueError(f"{said} looks at the model's own weights, and this trains an adapter: leave it out")
        prompts = [problem["prompt"] for problem in job.held_out[:GAP_PROMPTS]]
        Meter(trainer, clock, script.rollout_gap_every, lambda: rollout_gap(trainer, prompts), at_end=True)


def say_where(trainer: GRPOTrainer) -> None:
    """Print in how many processes the run is, how the model is spread over them, and what it resumes from."""
    args, accelerator = trainer.args, trainer.accelerator
    if not trainer.is_world_process_zero():
        return
    if accelerator.num_processes > 1:
        engine = (
            "FSDP2: each has a share of every weight" if trainer.is_fsdp_enabled else "DDP: each has the whole model"
        )
        console.print(f"{accelerator.num_processes} processes on {args.device.type}, {engine}")
    if args.resume_from_checkpoint:
        last = get_last_checkpoint(str(args.output_dir)) if Path(str(args.output_dir)).is_dir() else None
        is_last = str(args.resume_from_checkpoint).lower() == "true"
        console.print(f"Resuming from {last if is_last else args.resume_from_checkpoint}")


def accuracy(trainer: GRPOTrainer, job: Job) -> Accuracy | None:
    """Accuracy of the trainer's model on the held-out problems."""
    if not job.held_out:
        return None
    return evaluate(
        trainer.model,
        trainer.processing_class,
        job.held_out,
        reward=job.rewards[0],
        max_new_tokens=trainer.args.max_completion_length,
        batch_size=trainer.args.per_device_eval_batch_size,
    )
