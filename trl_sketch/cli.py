"""The command `trl-sketch`.

A subcommand is a module in `trl_sketch/commands` with `add_arguments(parser)` and `run(args)`, which returns the exit status,
and a line in `COMMANDS`. It is imported when it is called: `trl-sketch --help` loads neither torch nor TRL.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence


COMMANDS = {
    "calibrate": "find the update_ratio that moves a model as far as AdamW's first step at a learning rate",
    "compare": "put runs of several methods on one page, with a figure: reward, accuracy, memory, time and KL",
    "eval": "measure pass@1 and pass@k of a model on a data set, or put two such measurements side by side",
    "memory": "predict what a training step takes in GPU memory, part by part, for sketch, LoRA and dense AdamW",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status: 0, or 2 for a mistake of the caller."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="trl-sketch", description="Tools around training from gradient sketches.")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, help_ in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_, description=help_[0].upper() + help_[1:] + ".")
        if name == chosen:
            module = importlib.import_module(f".commands.{name}", __package__)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except (OSError, ValueError) as error:
        print(f"trl-sketch {args.command}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
