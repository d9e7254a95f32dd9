"""The subcommands of `trl-sketch`, one module each; see trl_sketch/cli.py."""
