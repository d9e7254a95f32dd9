"""`trl-sketch compare`: runs of several methods on one page, with a figure."""

import argparse
import shlex
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "runs", nargs="+", type=Path, metavar="DIR", help="output folder of a run, or a folder with such folders in it"
    )
    add(
        "--output",
        type=Path,
        default=Path("comparison.md"),
        help="the page (default: %(default)s); the figure lies beside it, as .png",
    )
    add(
        "--reference",
        metavar="LABEL",
        help="the method that the others are compared with (default: that of the first run)",
    )
    add(
        "--allow",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="settings that may differ in more than the method, such as num_generations, device or versions.torch",
    )
    add("--sweep", type=Path, metavar="FILE.json", help="how the step sizes were chosen, to be shown on the page")


def run(args: argparse.Namespace) -> int:
    """Write the page and its figure; returns the exit status."""
    from ..comparison import compare, find_runs
    from ..comparison_figure import draw
    from ..comparison_page import load_sweep, page

    if args.output.suffix != ".md":
        raise ValueError(f"--output {args.output} must end in .md")
    comparison = compare(find_runs(args.runs), args.reference, args.allow)
    sweep = load_sweep(args.sweep, comparison.methods) if args.sweep else None
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure = args.output.with_suffix(".png")
    draw(comparison, figure)
    args.output.write_text(page(comparison, figure.name, _command(args), sweep))
    print(f"{args.output} and {figure.name}: {len(comparison.runs)} runs of {', '.join(comparison.methods)}")
    for sentence in comparison.allowed:
        print(f"allowed to differ: {sentence}")
    return 0


def _command(args: argparse.Namespace) -> str:
    words = ["trl-sketch", "compare", *map(str, args.runs)]
    words += ["--reference", args.reference] if args.reference else []
    words += ["--allow", *args.allow] if args.allow else []
    words += ["--sweep", str(args.sweep)] if args.sweep else []
    return shlex.join([*words, "--output", str(args.output)])
