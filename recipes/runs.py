"""Many runs of the recipes, one after the other, each a process of its own with its log; what is finished is not run again.

A run has a folder, with

    settings.yaml    all that it was started with: `python recipes/grpo_sketch.py --config settings.yaml` does it again
    log.txt          what it printed
    run.json         its record, which is written at its end: a folder without it was not finished, and is started anew
"""

import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trl_sketch.records import RECORD_FILE


RECIPES = Path(__file__).parent
SETTINGS_FILE, LOG_FILE, LOCK_FILE = "settings.yaml", "log.txt", ".lock"
TAIL = 15  # lines of a failed run's log that are shown
_STEP = re.compile(r"^step (\d+)/(\d+)", re.MULTILINE)  # as the recipes print them where there is no terminal
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True, eq=False)
class Run:
    """A run of a recipe.

    Attributes:
        name: In messages, as `LoRA, seed 3`.
        script: `grpo_sketch.py` or another one of this folder.
        settings: All of its settings but `output_dir`.
        folder: Its output folder.
    """

    name: str
    script: str
    settings: dict[str, Any]
    folder: Path

    @property
    def started_with(self) -> dict[str, Any]:
        return {**self.settings, "output_dir": str(self.folder)}

    @property
    def is_finished(self) -> bool:
        return (self.folder / RECORD_FILE).is_file()

    def check_folder(self) -> None:
        """See that what the folder has is of this run.

        Raises:
            ValueError: It has something else, or a finished run with other settings.
        """
        if not self.folder.exists() or not any(self.folder.iterdir()):
            return
        file = self.folder / SETTINGS_FILE
        if not file.is_file():
            raise ValueError(
                f"{self.folder} has files, and no {SETTINGS_FILE} that a run was started with: pass another --output"
            )
        before, now = yaml.safe_load(file.read_text()) or {}, _plain(self.started_with)
        if self.is_finished and before != now:
            names = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
            said = "; ".join(f"{n} was {before.get(n)!r} and is {now.get(n)!r}" for n in names)
            raise ValueError(
                f"{self.folder} has a finished run with other settings ({said}): delete that folder to run it again, or pass "
                "another --output"
            )

    def start(self) -> subprocess.Popen:
        """Start it, in an empty folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        file = self.folder / SETTINGS_FILE
        file.write_text(yaml.safe_dump(_plain(self.started_with), sort_keys=False))
        with open(self.folder / LOG_FILE, "wb") as log:
            return subprocess.Popen(
                [sys.executable, str(RECIPES / self.script), "--config", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"COLUMNS": "120"},
                process_group=0,  # Ctrl-C is for us, and we end it
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    def progress(self) -> float:
        """Share of its steps that its log says it has made."""
        steps = _STEP.findall((self.folder / LOG_FILE).read_text(errors="replace"))
        return int(steps[-1][0]) / int(steps[-1][1]) if steps else 0.0

    def log_tail(self) -> str:
        return "\n".join((self.folder / LOG_FILE).read_text(errors="replace").splitlines()[-TAIL:])


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As they come back from a file."""
    return json.loads(json.dumps(settings))


def _die_with_parent() -> None:
    """In the child: it is killed when its parent is, so that nobody writes into a folder that is started anew."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def run_all(runs: Sequence[Run], output: Path, console: Console, jobs: int = 1) -> list[Run]:
    """Run those that are not finished, `jobs` at a time and in their order; returns those that failed.

    Ctrl-C and SIGTERM end the running ones and raise `KeyboardInterrupt`.

    Raises:
        ValueError: A folder has something else than its run (nothing has been started then), or another process is running
            these.
    """
    with _alone(output), _terminated_as_interrupted():
        for run in runs:
            run.check_folder()
        waiting = [run for run in runs if not run.is_finished]
        if len(waiting) < len(runs):
            console.print(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already")
        return _run_waiting(waiting, console, jobs) if waiting else []


def _run_waiting(waiting: list[Run], console: Console, jobs: int) -> list[Run]:
    total, begin = len(waiting), time.monotonic()
    running: dict[Run, tuple[subprocess.Popen, float]] = {}
    failed: list[Run] = []
    done = 0
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        auto_refresh=False,  # no second thread: we fork
    )
    task = bar.add_task("", total=total, left="")
    try:
        with bar:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.pop(0)
                    running[run] = run.start(), time.monotonic()
                for run, (process, started) in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[run]
                    done += 1
                    seconds = time.monotonic() - started
                    if process.returncode == 0 and run.is_finished:
                        left = "" if console.is_terminal else _left(done, total, begin)
                        console.print(f"{done}/{total}  {escape(run.name)}: {seconds:.0f} s  {left}")
                    else:
                        failed.append(run)
                        _report_failure(run, process.returncode, console)
                share = done + sum(run.progress() for run in running)
                description = " + ".join(escape(run.name) for run in running)
                bar.update(task, completed=done, description=description, left=_left(share, total, begin))
                bar.refresh()
                if running:
                    time.sleep(0.2)
    finally:
        for process, _ in running.values():
            _end(process)
    return failed


def _report_failure(run: Run, status: int, console: Console) -> None:
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    if status == 0:
        how = f"wrote no {RECORD_FILE}"
    console.print(f"[bold red]failed[/]  {escape(run.name)} {how}. The end of {run.folder / LOG_FILE}:")
    console.print(escape(run.log_tail()), highlight=False)


def _left(done: float, total: int, begin: float) -> str:
    """An estimate, from the time that was needed so far."""
    if done <= 0 or done >= total:
        return ""
    seconds = round((time.monotonic() - begin) * (total - done) / done)
    minutes = f"{seconds // 60} min" if seconds >= 60 else f"{seconds} s"
    return f"about {minutes} left"


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Within the block, no other process runs what is in `output`."""
    output.mkdir(parents=True, exist_ok=True)
    with open(output / LOCK_FILE, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is running what is in {output}: wait for it, or pass another --output"
            ) from None
        yield


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
