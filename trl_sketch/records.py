"""The record of one training run: `run.json` in its output folder, which the recipes write and `trl-sketch compare` reads.

```python
record = RunRecord(label="sketch", seed=0, settings={...}, ..., versions=package_versions(), device="cpu")
record.write("runs/sketch-0")              # whole or not at all: a killed process leaves no half of it
RunRecord.load("runs/sketch-0").log[0]     # {"step": 1, "seconds": 0.4, "reward": 0.28, ...}
```
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


RECORD_FILE = "run.json"
FORMAT_VERSION = 1
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "vllm", "trl_sketch")
WHENS = ("before", "after")  # training
KINDS = ("greedy", "sampled")
# Trainer arguments, as names in `settings`, that belong to a method: how large its steps are, and what its weights are kept in.
METHOD_SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "max_grad_norm"),
    *("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "model_init_kwargs.dtype"),
)
# Where a run is, and which of several; not what it is.
RUN_SETTINGS = (
    *("seed", "data_seed", "projection_seed", "output_dir", "logging_dir", "run_name", "plot_file"),
    "resume_from_checkpoint",
)


@dataclass
class RunRecord:
    """One run.

    Attributes:
        label: The method, as a page names it: `sketch`, `LoRA`, `dense AdamW`.
        seed: Of model, data and training.
        settings: Of the script and of the trainer, by name. Methods are compared only if they differ in no other of them than
            `METHOD_SETTINGS` and `RUN_SETTINGS`.
        method: The method's own settings: the fields of `SketchConfig`, or rank and scale of an adapter.
        versions: Of Python and the packages, see [`package_versions`].
        device: `cpu`, or `cuda: NVIDIA H200`.
        steps: Optimizer steps that were made.
        planned_steps: Optimizer steps that the run was to make; it is finished when they are made.
        log: For every step that was logged, in order: `step`, `seconds` since training began, `reward`, and whatever else was
            logged: `sketch/predicted_kl`, `sketch/realized_kl`, `sketch/kl_budget`, `sketch/alpha`; `time/rollout`,
            `time/update` and `time/sync`, the seconds of one step (the mean of those since the last entry); `memory/allocated`
            in bytes; `accuracy/greedy` and `accuracy/sampled` where the held-out problems were tried in between. Non-finite numbers are written as null and read as None.
        accuracy: Empty, or `before` and `after` training: `greedy` has the score of each held-out problem, in the order of
            `problems`; `sampled` a list of scores for each.
        problems: A [`problem_id`] for every held-out problem.
        memory: Bytes of the tensors by part: `weights`, `adapter`, `gradient` (dense or the adapter's), `sketch`, `optimizer`
            (moments), and others under their own names.
        peak_bytes: The most that the process (on a GPU, the allocator) held while training; 0 if it was not measured.
        mean_bytes: What it held on average.
        seconds: That training took.
    """

    label: str
    seed: int
    settings: dict[str, Any]
    method: dict[str, Any]
    versions: dict[str, str]
    device: str
    steps: int
    planned_steps: int
    log: list[dict[str, float | None]]
    seconds: float
    accuracy: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    mean_bytes: int = 0

    @property
    def finished(self) -> bool:
        return self.steps >= self.planned_steps

    def write(self, folder: str | Path) -> Path:
        """Write `run.json` into `folder`, which is made if it is not there. Returns the file.

        Raises:
            ValueError: A field is not what it should be.
        """
        log = [{name: _finite_or_none(value) for name, value in entry.items()} for entry in self.log]
        record = dataclasses.replace(self, log=log)
        record.check(f"the record of {self.label}, seed {self.seed}")
        file = Path(folder) / RECORD_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            text = json.dumps({"format_version": FORMAT_VERSION, **dataclasses.asdict(record)}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the record for {file} cannot be written as JSON ({error}): see settings and method"
            ) from None
        with replacing(file) as temporary:
            temporary.write_text(text + "\n")
        return file

    @classmethod
    def load(cls, folder: str | Path) -> "RunRecord":
        """Read the `run.json` of a folder.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It cannot be read, has another format, or a field is not what it should be.
        """
        file = Path(folder) / RECORD_FILE
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} has no {RECORD_FILE}: it is not the output folder of a recipe's finished run"
            )
        try:
            content = json.loads(file.read_text(), parse_constant=_refuse_constant)
        except ValueError as error:
            raise ValueError(f"{file} cannot be read as JSON ({error}): run it again, or leave it out") from None
        version = content.pop("format_version", None) if isinstance(content, dict) else None
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{file} has format_version {version!r}, and this version of trl_sketch reads {FORMAT_VERSION}: run it again"
            )
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(content.keys() - fields.keys())
        missing = sorted(n for n, f in fields.items() if _is_required(f) and n not in content)
        if unknown or missing:
            said = [f"unknown {', '.join(unknown)}"] * bool(unknown) + [f"missing {', '.join(missing)}"] * bool(
                missing
            )
            raise ValueError(f"{file} has the wrong fields: {'; '.join(said)}")
        record = cls(**content)
        record.check(str(file))
        return record

    def check(self, name: str) -> None:
        """See that the fields are what they should be; `name` is what the message calls the record.

        Raises:
            ValueError: One is not.
        """
        for what, types, fields in (
            ("a string", str, ("label", "device")),
            ("a whole number", int, ("seed", "steps", "planned_steps", "peak_bytes", "mean_bytes")),
            ("a number", (int, float), ("seconds",)),
            ("a mapping", dict, ("settings", "method", "versions", "accuracy", "memory")),
            ("a list", list, ("log", "problems")),
        ):
            for own in fields:
                value = getattr(self, own)
                if not isinstance(value, types) or isinstance(value, bool):
                    raise ValueError(f"{name}: {own}={value!r} must be {what}")
        for part, size in self.memory.items():
            if not isinstance(size, int) or size < 0:
                raise ValueError(f"{name}: memory.{part}={size!r} must be a number of bytes")
        self._check_log(name)
        self._check_accuracy(name)

    def _check_log(self, name: str) -> None:
        last_step, last_seconds = 0.0, 0.0
        for index, entry in enumerate(self.log):
            place = f"{name}: log[{index}]"
            step, seconds = (_number(entry, key, place) for key in ("step", "seconds"))
            if step <= last_step or seconds < last_seconds:
                raise ValueError(
                    f"{place} has step {step:g} at {seconds:g} s, after step {last_step:g} at {last_seconds:g} s: steps and "
                    "seconds must go up, in a resumed run too"
                )
            last_step, last_seconds = step, seconds

    def _check_accuracy(self, name: str) -> None:
        if not self.accuracy:
            return
        if self.accuracy.keys() != set(WHENS):
            raise ValueError(
                f"{name}: accuracy has {[*self.accuracy]}, it must have {' and '.join(WHENS)}, or be empty"
            )
        for when, scores in self.accuracy.items():
            for kind in KINDS:
                values = scores.get(kind)
                place = f"{name}: accuracy.{when}.{kind}"
                if not isinstance(values, list) or len(values) != len(self.problems):
                    raise ValueError(f"{place} must have an entry for each of the {len(self.problems)} problems")
                numbers = values if kind == "greedy" else [score for own in values for score in own]
                if not all(isinstance(score, (int, float)) and math.isfinite(score) for score in numbers):
                    raise ValueError(
                        f"{place} must consist of finite numbers: a completion without a score counts as 0"
                    )
                if kind == "sampled" and len({len(own) for own in values}) > 1:
                    raise ValueError(f"{place} must have the same number of samples for every problem")


def problem_id(prompt: str | Sequence[dict[str, Any]]) -> str:
    """Twelve hexadecimal digits that stand for a prompt, text or chat, wherever it is asked."""
    return hashlib.sha256(json.dumps(prompt, ensure_ascii=False, sort_keys=True).encode()).hexdigest()[:12]


def package_versions() -> dict[str, str]:
    """Version of Python and of each of `PACKAGES` that is installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A temporary file beside `file` that takes its place at the end, at once, unless there was an error."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp's files are for their owner alone
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _is_required(own: dataclasses.Field) -> bool:
    return own.default is dataclasses.MISSING and own.default_factory is dataclasses.MISSING


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(entry: Any, key: str, place: str) -> float:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, (int, float)):
        raise ValueError(f"{place}.{key}={value!r} must be a number")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")
