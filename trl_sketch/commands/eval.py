"""`trl-sketch eval`: pass@1 and pass@k of a model on a data set, and two evaluations side by side."""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

from ..evaluation import BACKENDS, DTYPES, EvalSettings, differing_settings, evaluate, summary_file
from ..evaluation_results import Difference, Estimate, Results, compare_outputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default = {field.name: field.default for field in fields(EvalSettings)}
    add("model", nargs="?", metavar="MODEL", help="a folder (of a model, or of an adapter), or a name on the Hub")
    add(
        "dataset",
        nargs="?",
        metavar="DATASET",
        help="a folder or a json, jsonl, parquet or csv file, or a name on the Hub, with `prompt` (text or chat) and `answer`",
    )
    add(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A.jsonl", "B.jsonl"),
        help="put two outputs side by side; needs no model",
    )
    add("--output", type=Path, default=Path("eval.jsonl"), help="a line for each problem (default: %(default)s)")
    add(
        "--reward",
        default=default["reward"],
        help="exact_match (default), math, last_number, reasoning_gym, reasoning_gym_number, FILE.py:FUNCTION or "
        "package.module:FUNCTION; a completion of score 1 is right",
    )
    add("--samples", type=int, default=default["samples"], help="answers to each problem (default: %(default)s)")
    add("--temperature", type=float, default=default["temperature"], help="0: greedy (default: %(default)s)")
    add("--top_p", type=float, default=default["top_p"], help="(default: %(default)s)")
    add("--max_new_tokens", type=int, default=default["max_new_tokens"], help="of an answer (default: %(default)s)")
    add("--seed", type=int, default=default["seed"], help="(default: %(default)s)")
    add("--split", help="of the data set (default: test, validation or train, the first that there is)")
    add("--dataset_config", help="configuration of the data set")
    add("--limit", type=int, help="take the first so many problems")
    add("--chat", action="store_true", help="give prompts that are text to the model as a chat")
    add("--system_prompt", metavar="TEXT", help="begin every chat with it; makes chats of prompts that are text")
    add("--backend", choices=BACKENDS, default=default["backend"], help="auto: vLLM where it and a GPU are there")
    add("--dtype", choices=DTYPES, default=default["dtype"], help="of the weights (default: the checkpoint's)")
    add("--batch_size", type=int, default=default["batch_size"], help="problems at a time (default: %(default)s)")
    add("--tensor_parallel_size", type=int, default=1, help="GPUs that vLLM spreads the model over (default: 1)")


def run(args: argparse.Namespace) -> int:
    """Evaluate or compare, and print; returns the exit status."""
    if args.compare:
        if args.model:
            raise ValueError(f"--compare takes two outputs and no model: leave out {args.model}")
        _print_difference(compare_outputs(*args.compare), *args.compare)
        return 0
    if not args.dataset:
        raise ValueError("a MODEL and a DATASET are needed, or --compare A.jsonl B.jsonl")
    settings = EvalSettings(**{field.name: getattr(args, field.name) for field in fields(EvalSettings)})

    from ..evaluation_engines import choose_backend, make_engine

    settings = replace(settings, backend=choose_backend(settings))
    with _bar() as progress:
        results = evaluate(settings, args.output, make_engine, progress)
    _print_results(results, settings, args.output)
    return 0


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """Quiet libraries and a progress bar, as a function of the problems that are done and of all."""
    import datasets
    import transformers
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    columns = (
        TextColumn("problems"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns) as bar:

        def show(done: int, total: int) -> None:
            task = bar.task_ids[0] if bar.task_ids else bar.add_task("problems")
            bar.update(task, completed=done, total=total)

        yield show


def _print_results(results: Results, settings: EvalSettings, output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{settings.model} on {settings.dataset}", title_justify="left")
    table.add_column(f"{results.problems} problems, {results.samples} samples each")
    table.add_column("percent", justify="right", style="bold")
    table.add_column("95 % interval over problems", justify="right")
    for name, own in _named(results).items():
        table.add_row(name, f"{100 * own.value:.1f}", _interval(own))
    table.add_row("cut off at max_new_tokens", f"{100 * results.truncated:.1f}", "")
    console.print(table)
    if results.unscored:
        console.print(
            f"{results.unscored} answers have no score: {settings.reward} made nothing of them. They count as 0."
        )
    console.print(f"{output}, {summary_file(output).name}", highlight=False, soft_wrap=True)


def _print_difference(difference: Difference, first: Path, second: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    a, b = difference.first, difference.second
    table = Table(title=f"A {first}\nB {second}", title_justify="left")
    table.add_column(f"{a.problems} problems, in percent")
    for column in ("A", "B", "B − A"):
        table.add_column(column, justify="right", style="bold" if column == "B − A" else None)
    table.add_column("95 % interval", justify="right")
    for name, own in _named(difference).items():
        both = [value.score if name == "mean score" else _named(value)[name] for value in (a, b)]
        cells = [f"{100 * value.value:.1f}" for value in both]
        table.add_row(name, *cells, f"{100 * own.value:+.1f}", _interval(own, "+"))
    console.print(table)
    same = a.problems - difference.better - difference.worse
    console.print(
        f"B is right more often on {difference.better} problems, less often on {difference.worse}, and as often on {same}."
    )
    for sentence in differing_settings(first, second):
        console.print(f"They differ in {sentence}", highlight=False, soft_wrap=True)


def _named(own: Results | Difference) -> dict[str, Estimate]:
    """Estimates by name; the mean score only where it is not pass@1, because some scores are neither 0 nor 1."""
    named = {f"pass@{k}": estimate for k, estimate in own.pass_at.items()}
    is_same = math.isclose(own.score.value, own.pass_at[1].value, abs_tol=1e-9)
    return named if is_same else named | {"mean score": own.score}


def _interval(own: Estimate, sign: str = "") -> str:
    return f"{100 * own.low:{sign}.1f} to {100 * own.high:{sign}.1f}"
