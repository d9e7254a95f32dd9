"""Checkpoints that a killed process or a full disk cannot leave half-written."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, sort_checkpoints

from .model import sketch_state


# What is not a checkpoint yet, or no longer: resuming does not look there, nor does a push, which leaves out `_*`.
UNFINISHED = "_unfinished_checkpoints"


class WholeCheckpoints(Trainer):
    """A [`transformers.Trainer`] of a sketched model, whose folders `checkpoint-N` are whole at every moment.

    A checkpoint is written into a folder that resuming does not look at, flushed to the disk, and renamed when every process
    has written its part; a checkpoint that is to go is renamed before it is deleted. A process may be killed at any moment.
    A save that fails leaves the trainer as it was, and the checkpoints too.

    What it overrides:
      * `_save_checkpoint` writes beside, adds `sketch_config.json`, renames, pushes, and deletes what is beyond
        `save_total_limit`: never the new checkpoint, nor the best.
      * `_get_output_dir` and `_push_from_checkpoint`: during a save, the folder to write into, and nothing.
      * `_run_epoch`: where the last step is in the checkpoint, there is nothing to train. Transformers would take one more.
      * `_finalize_training` deletes what a killed process has not, and what transformers would with `save_total_limit=1`.
    """

    _is_saving = False

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
            raise OSError(
                f"{checkpoint} could not be saved: {error}. Free disk space (save_total_limit keeps fewer checkpoints), then "
                f"resume: {whole}. The weights and the optimizer in memory are as they were before the save"
            ) from error


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
