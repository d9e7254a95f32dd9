"""`trl-sketch calibrate`: see [`trl_sketch.calibrate`]."""

import argparse

from .. import calibrate
from ..calibrate import add_arguments


__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    calibrate.run(args)
    return 0
