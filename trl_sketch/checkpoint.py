"""Checkpoints that a killed process or a full disk cannot leave half-written."""

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, sort_checkpoints

from .model import sketch_state


try:
    import fcntl
except ImportError:  # on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

# What is not a checkpoint yet, or no longer: resuming does not look there, nor does a push, which leaves out `_*`.
UNFINISHED = "_unfinished_checkpoints"
LOCK = "_training"  # held by the process that trains into the folder, whose number is in it

_PLAIN = "one process or DDP"
_OPTIMIZER_STATES = {"optimizer.pt", "optimizer.bin", "optimizer_0"}

logger = logging.getLogger(__name__)


class WholeCheckpoints(Trainer):
    """A [`transformers.Trainer`] of a sketched model, whose folders `checkpoint-N` are whole at every moment.

    A checkpoint is written into a folder that resuming does not look at, flushed to the disk, and renamed when every process
    has written its part; a checkpoint that is to go is renamed before it is deleted. A process may be killed at any moment.
    A save that fails leaves the trainer as it was, and the checkpoints too.

    What it overrides:
      * `train` looks at the checkpoint that it is to resume from, and lets no second run write to `output_dir`.
      * `_save_checkpoint` writes beside, adds `sketch_config.json`, renames, pushes, and deletes what is beyond
        `save_total_limit`: never the new checkpoint, nor the best.
      * `_get_output_dir` and `_push_from_checkpoint`: during a save, the folder to write into, and nothing.
      * `_load_from_checkpoint` and `_load_optimizer_and_scheduler` name the checkpoint where it cannot be read.
      * `_run_epoch`: where the last step is in the checkpoint, there is nothing to train. Transformers would take one more.
      * `_finalize_training` deletes what a killed process has not, and what transformers would with `save_total_limit=1`.
    """

    _is_saving = False

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers'.

        Raises:
            RuntimeError: Another run writes to `output_dir`.
            ValueError: There is no checkpoint to resume from, or it is not whole, damaged, or of another engine.
        """
        with _alone(self):
            if resume_from_checkpoint not in (None, False):
                resume_from_checkpoint = self._checkpoint(resume_from_checkpoint)
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _checkpoint(self, wanted: str | bool) -> str:
        """The folder to resume from, checked as far as can be without loading it."""
        output = str(self.args.output_dir)
        last = get_last_checkpoint(output) if os.path.isdir(output) else None
        if wanted is True and last is None:
            raise ValueError(
                f"resume_from_checkpoint=True, and there is no checkpoint in {output}: leave it out to start anew"
            )
        folder = Path(str(last if wanted is True else wanted))
        others = [path for path in sort_checkpoints(output) if Path(path) != folder] if os.path.isdir(output) else []
        instead = f"; resume from {others[-1]}" if others else ""
        if not (folder / TRAINER_STATE_NAME).is_file():
            raise ValueError(f"{folder} is not a checkpoint, since it has no {TRAINER_STATE_NAME}{instead}")
        written, here = _engine_of(folder), self._engine()
        if written != here:
            raise ValueError(
                f"{folder} was written by {written} and this run uses {here}: resume with the engine that wrote it, or start "
                f"a new run from its weights ({folder} as the model)"
            )
        names = {path.name for path in folder.iterdir()}
        if not names & _OPTIMIZER_STATES:
            logger.warning(
                "%s has no optimizer state, as with save_only_model: the optimizer, its schedule and its seed start anew, so "
                "that this is not the run that was stopped.",
                folder,
            )
        elif "scheduler.pt" not in names:
            raise ValueError(f"{folder} is damaged: it has no scheduler.pt{instead}")
        return str(folder)

    def _engine(self) -> str:
        if not self.is_fsdp_enabled:
            return _PLAIN
        kind: Any = self.accelerator.state.fsdp_plugin.state_dict_type
        return f"FSDP2 with {kind.name}"

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with _named(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _named(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, UNFINISHED) if self._is_saving else folder

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._is_saving:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save `checkpoint-N`.

        Raises:
            OSError: It could not be written. In several processes only those that met the error raise it: the launcher
                ends the others.
        """
        folder = Path(self._get_output_dir(trial))
        checkpoint = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self._undone_if_it_fails(checkpoint):
            if self.args.should_save and (folder / UNFINISHED).exists():
                shutil.rmtree(folder / UNFINISHED)  # of a process that was killed
            self.accelerator.wait_for_everyone()
            self._is_saving = True
            super()._save_checkpoint(model, trial)
            self._is_saving = False
            written = folder / UNFINISHED / checkpoint.name
            best = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if self.state.best_global_step and (best == checkpoint or best.is_dir()):
                self.state.best_model_checkpoint = str(best)
            if self.args.should_save:
                self.state.save_to_json(str(written / TRAINER_STATE_NAME))
                sketch_state(model).config.save_pretrained(written)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                _publish(written, checkpoint)
            self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        self._clear(folder, checkpoint)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:
            self.control.should_training_stop = True

    def _finalize_training(self, trial: Any, *args: Any) -> Any:
        folder = Path(self._get_output_dir(trial))
        last = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        best = self.state.best_model_checkpoint
        if self.args.save_total_limit == 1 and best is not None:
            last = Path(best)
        if last.is_dir():
            self._clear(folder, last)
        return super()._finalize_training(trial, *args)

    def _clear(self, folder: Path, last: Path) -> None:
        """Delete what is unfinished, and the oldest checkpoints beyond the limit but for `last` and the best."""
        if not self.args.should_save:
            return
        limit = self.args.save_total_limit
        if limit is not None and limit > 0:
            kept = {path.resolve() for path in (last, Path(self.state.best_model_checkpoint or last))}
            checkpoints = [Path(path) for path in sort_checkpoints(str(folder), use_mtime=True)]
            surplus = max(len(checkpoints) - max(limit, len(kept)), 0)
            for old in [path for path in checkpoints if path.resolve() not in kept][:surplus]:
                _discard(old)
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)

    @contextlib.contextmanager
    def _undone_if_it_fails(self, checkpoint: Path) -> Iterator[None]:
        """A save that fails leaves nothing behind, on the disk or in the trainer; the error says what can be done."""
        best = self.state.best_model_checkpoint
        try:
            yield
        except BaseException as error:
            self._is_saving = False
            self.state.best_model_checkpoint = best
            if self.args.should_save:  # another process might meet an error while this one renames
                shutil.rmtree(checkpoint.parent / UNFINISHED, ignore_errors=True)
            if not _is_of_writing(error):
                raise
            last = get_last_checkpoint(checkpoint.parent) if checkpoint.parent.is_dir() else None
            whole = f"the last whole checkpoint is {last}" if last is not None else "there is no whole checkpoint yet"
            remedy = "See that the folder can be written to"
            if not isinstance(error, OSError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                remedy = "Free disk space (save_total_limit keeps fewer checkpoints)"
            raise OSError(
                f"{checkpoint} could not be saved: {error}. {remedy}, then resume: {whole}. The weights and the optimizer in "
                "memory are as they were before the save"
            ) from error


@contextlib.contextmanager
def _alone(trainer: Trainer) -> Iterator[None]:
    """For the time of the block nobody else trains into the output folder; the lock goes with the process that has it."""
    folder = Path(str(trainer.args.output_dir))
    saves = trainer.args.should_save and trainer.args.save_strategy != "no"
    if not saves or not folder.is_dir() or fcntl is None:
        yield
        return
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RuntimeError(
                f"process {file.read()} trains into {folder}: wait for it, stop it (the processes of a launcher that was killed "
                "go on by themselves), or choose another output_dir"
            ) from None
        except OSError:  # a file system without locks
            pass
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextlib.contextmanager
def _named(checkpoint: str | None) -> Iterator[None]:
    """An error of reading a file says which checkpoint it is in."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError | torch.distributed.DistError):
            raise
        raise ValueError(f"{checkpoint} cannot be read: {type(error).__name__}: {error}") from error


def _engine_of(checkpoint: Path) -> str:
    """Which engine wrote a checkpoint, as far as that matters for reading it."""
    if (checkpoint / f"{FSDP_MODEL_NAME}.bin").exists():
        return "FSDP2 with FULL_STATE_DICT"
    if (checkpoint / f"{FSDP_MODEL_NAME}_0").exists():
        return "FSDP2 with SHARDED_STATE_DICT"
    return _PLAIN


def _is_of_writing(error: BaseException) -> bool:
    """Whether a file could not be written: libraries in Rust say so in exceptions of any type, torch in a RuntimeError."""
    return isinstance(error, OSError) or any(
        sign in str(error) for sign in ("os error", "iostream", "inline_container")
    )


def _publish(written: Path, checkpoint: Path) -> None:
    """Give a folder its name as a checkpoint, once all that is in it is on the disk."""
    for path in [*written.rglob("*"), written]:
        _flush(path)
    older = checkpoint.with_name(checkpoint.name.replace("-", "-0"))  # resuming reads it as the same number
    if checkpoint.exists():
        _discard(older)
        os.rename(checkpoint, older)
    os.rename(written, checkpoint)
    _flush(checkpoint.parent)
    _discard(older)


def _flush(path: Path) -> None:
    """Wait until a file or folder is on the disk; not every file system can say that of a folder."""
    with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _discard(checkpoint: Path) -> None:
    """Delete a checkpoint, if it is there, so that it has its name only while it is whole."""
    discarded = checkpoint.parent / UNFINISHED / f"discarded-{checkpoint.name}"
    with contextlib.suppress(OSError):  # as transformers, which leaves what it may not delete
        discarded.parent.mkdir(exist_ok=True)
        os.rename(checkpoint, discarded)
        shutil.rmtree(discarded)
