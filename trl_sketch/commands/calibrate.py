"""`trl-sketch calibrate`: see [`trl_sketch.calibrate`]."""

from ..calibrate import add_arguments, run


__all__ = ["add_arguments", "run"]
