"""`SketchConfig`: what is sketched, how, and how a sketch becomes an update."""

import contextlib
import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .projection import PROJECTIONS


_REGULAR_EXPRESSION = set(r"\^$*+?{}[]|()")  # characters that tell one from a name
CONFIG_NAME = "sketch_config.json"
UPDATE_RULES = ("row_adam", "sgd", "adam")
PROBES = ("auto", "jvp", "finite_difference")
VLLM_SYNCS = ("auto", "share", "sketch", "full")
SCHEDULES = ("cosine", "constant")
NORMS = ("global", "matrix", "none")
WEIGHT_PRECISIONS = ("auto", "bf16", "fp32")


@dataclass
class SketchConfig:
    """Configuration of gradient-sketch training, given to a trainer in the place of a `LoraConfig`.

    The defaults are those of the LoGRA paper where it names them (rank 256, RowAdam with β₂ = 0.95, a projection
    refreshed at every step), with the `hadamard` projection. [`SketchConfig.logra`] and [`SketchConfig.rgc`] return the
    papers' own settings.

    Raises:
        ValueError: A field has a value that is not allowed; the message names the field, the value and what is allowed.
    """

    rank: int = field(
        default=256,
        metadata={"help": "Columns r of each gradient sketch. A matrix with fewer inputs uses its number of inputs."},
    )
    rank_pattern: dict[str, int] | str | None = field(
        default=None,
        metadata={
            "help": "Ranks that differ from `rank`, by layer name or regular expression, as in PEFT, e.g. "
            "'{\"down_proj\": 128}'."
        },
    )
    target_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of the linear layers to train, or one regular expression, as in PEFT. Default: every linear "
            "layer of attention and MLP, never the LM head."
        },
    )
    exclude_modules: list[str] | None = field(
        default=None, metadata={"help": "Names, or one regular expression, of layers that stay frozen."}
    )
    layers_to_transform: list[int] | None = field(
        default=None, metadata={"help": "Indices of the transformer layers to train. Default: all."}
    )
    layers_pattern: str | None = field(
        default=None,
        metadata={"help": "Name of the module list that `layers_to_transform` counts in, if it has an unusual name."},
    )
    projection: str = field(
        default="hadamard",
        metadata={
            "help": "Random projection A: hadamard (exact signs, near-orthonormal rows), rademacher (LoGRA), gaussian, "
            "orthonormal (RGC).",
            "choices": list(PROJECTIONS),
        },
    )
    refresh: str = field(
        default="every_step",
        metadata={"help": "When A is redrawn: every_step, never, or a number of optimizer steps."},
    )
    share_projection: bool = field(
        default=True,
        metadata={"help": "Layers that read the same input (q/k/v, gate/up) share one A, so that X Aᵀ is kept once."},
    )
    projection_seed: int | None = field(
        default=None,
        metadata={
            "help": "Base seed of projections and of stochastic rounding. Default: the trainer's `seed`, else 0."
        },
    )
    update_rule: str = field(
        default="row_adam",
        metadata={
            "help": "How a sketch becomes an update: row_adam (LoGRA appendix B), sgd (RGC), adam (both moments on the "
            "sketch; needs refresh='never').",
            "choices": list(UPDATE_RULES),
        },
    )
    norm: str = field(
        default="global",
        metadata={
            "help": "What fixes the size of an update: global (one factor for all matrices), matrix (each moves by the "
            "same fraction of its own norm), none (plain SGD, or with row_adam and adam a step like AdamW's: about "
            "learning_rate per weight, and shorter where a gradient is small for its history).",
            "choices": list(NORMS),
        },
    )
    update_ratio: float | None = field(
        default=None,
        metadata={
            "help": "Size of an update relative to the weights, |dW| / |W|, at the peak of the learning-rate schedule. "
            "Default: the update has the root mean square `learning_rate` per weight, as AdamW's first step has."
        },
    )
    beta1: float = field(default=0.9, metadata={"help": "Decay of the first moment (update_rule='adam')."})
    beta2: float = field(
        default=0.95, metadata={"help": "Decay of the second moment (update_rule='row_adam' or 'adam')."}
    )
    relative_epsilon: float = field(
        default=1e-8,
        metadata={"help": "Stabilizer of row_adam and adam, relative to the mean root second moment of a matrix."},
    )
    spectral_power: float = field(
        default=1.0,
        metadata={
            "help": "Power that the singular values of each update are raised to, its norm kept: 1 leaves them as the "
            "update rule has them, 0 makes all directions equally strong (as Muon), 0.5 lies between."
        },
    )
    weight_precision: str = field(
        default="auto",
        metadata={
            "help": "Storage of the trained weights: bf16 (stochastically rounded, 2 bytes), fp32, or auto (bf16 where "
            "the model computes in bf16).",
            "choices": list(WEIGHT_PRECISIONS),
        },
    )
    kl_budget: float | None = field(
        default=2e-4,
        metadata={
            "help": "Predicted KL divergence from the policy before an update to the policy after it, in nats per token, "
            "that each update is scaled to. None: no control. The default is for large models at an update ratio near "
            "6e-5; a tiny model that takes large steps needs more."
        },
    )
    kl_budget_final: float | None = field(
        default=None, metadata={"help": "Budget at the end of the schedule. Default: a tenth of `kl_budget`."}
    )
    kl_schedule: str = field(
        default="cosine",
        metadata={
            "help": "Course of the budget: cosine (from kl_budget to kl_budget_final) or constant (kl_budget).",
            "choices": list(SCHEDULES),
        },
    )
    kl_schedule_steps: int | None = field(
        default=None,
        metadata={
            "help": "Optimizer steps of the schedule, after which the budget stays. Default: the whole training."
        },
    )
    kl_probe: str = field(
        default="auto",
        metadata={
            "help": "How the KL is predicted: jvp (forward-mode differentiation), finite_difference (two fp32 passes), or "
            "auto (jvp where the model supports it).",
            "choices": list(PROBES),
        },
    )
    kl_probe_responses: int = field(
        default=2,
        metadata={"help": "Responses of each rank that an update is probed on, the first ones of its batch."},
    )
    kl_probe_max_tokens: int = field(
        default=4096, metadata={"help": "Tokens of each response that are probed at most."}
    )
    alpha_max: float = field(default=3.0, metadata={"help": "Largest factor by which an update may be enlarged."})
    log_realized_kl: int = field(
        default=0,
        metadata={
            "help": "Every so many optimizer steps, measure the KL divergence that the update really caused and log it "
            "as sketch/realized_kl (two more forward passes in fp32). 0: never."
        },
    )
    mismatch_subtraction: bool = field(
        default=True,
        metadata={
            "help": "Subtract the mismatch between rollout and trainer log-probabilities from the budget (vLLM)."
        },
    )
    mismatch_ema: float = field(
        default=0.3, metadata={"help": "Weight of a new measurement in the mismatch's average."}
    )
    mismatch_floor: float = field(
        default=0.5, metadata={"help": "Share of the budget that the subtraction always leaves."}
    )
    vllm_sync: str = field(
        default="auto",
        metadata={
            "help": "How vLLM gets the trainer's weights: `share` (one storage, in colocate mode), `sketch` (updates of the "
            "last steps), `full` (whole weights), or `auto`: the first of these that is possible and exact.",
            "choices": list(VLLM_SYNCS),
        },
    )
    full_sync_every: int = field(
        default=100,
        metadata={
            "help": "Syncs between two comparisons of vLLM's weights with the trainer's; where they differ, all are sent. "
            "0: never."
        },
    )
    skip_nonfinite_steps: bool = field(
        default=False,
        metadata={
            "help": "Skip a step whose sketches or predicted KL are not finite, on all ranks, instead of stopping; "
            "`sketch/skipped_steps` counts them."
        },
    )

    def __post_init__(self) -> None:
        if isinstance(self.rank_pattern, str):
            with contextlib.suppress(json.JSONDecodeError):
                self.rank_pattern = json.loads(self.rank_pattern)
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            is_names = isinstance(value, list) and all(isinstance(item, str) for item in value)
            self._check(name, value is None or isinstance(value, str) or is_names, "names, or one regular expression")
            if is_names and len(value) == 1 and not set(value[0]).isdisjoint(_REGULAR_EXPRESSION):
                setattr(self, name, value[0])  # from the command line, where it cannot be anything but a list
        if self.target_modules in ("all-linear", ["all-linear"]):
            self.target_modules = None
        self._check_choice("projection", PROJECTIONS)
        self._check_choice("update_rule", UPDATE_RULES)
        self._check_choice("norm", NORMS)
        self._check_choice("weight_precision", WEIGHT_PRECISIONS)
        indices = self.layers_to_transform
        indices_are_good = indices is None or (
            isinstance(indices, list | int)
            and all(_is_int(i) for i in (indices if isinstance(indices, list) else [indices]))
        )
        self._check("layers_to_transform", indices_are_good, "None or indices of layers")
        self._check("share_projection", isinstance(self.share_projection, bool), "True or False")
        self._check("mismatch_subtraction", isinstance(self.mismatch_subtraction, bool), "True or False")
        self._check("skip_nonfinite_steps", isinstance(self.skip_nonfinite_steps, bool), "True or False")
        self._check(
            "projection_seed", self.projection_seed is None or _is_int(self.projection_seed), "None or an integer"
        )
        self._check("rank", _is_positive_int(self.rank), "a positive integer")
        pattern = self.rank_pattern
        pattern_is_good = pattern is None or (
            isinstance(pattern, dict)
            and all(isinstance(name, str) and _is_positive_int(rank) for name, rank in pattern.items())
        )
        self._check("rank_pattern", pattern_is_good, "a mapping from layer names to positive integers")
        self._check(
            "refresh",
            self.refresh in ("every_step", "never") or (str(self.refresh).isdecimal() and int(self.refresh) > 0),
            "'every_step', 'never' or a positive number of steps",
        )
        self.refresh = str(self.refresh)
        if isinstance(self.target_modules, str) and self.layers_to_transform is not None:
            raise ValueError(
                f"layers_to_transform={self.layers_to_transform!r} works with a list of names, and target_modules="
                f"{self.target_modules!r} is a regular expression: give a list, or name the layers in the expression"
            )
        self._check(
            "update_ratio",
            self.update_ratio is None or (_is_positive(self.update_ratio) and self.update_ratio < 1),
            "None or in (0, 1)",
        )
        self._check("beta1", _is_fraction(self.beta1), "in [0, 1)")
        self._check("beta2", _is_fraction(self.beta2), "in [0, 1)")
        self._check("relative_epsilon", _is_fraction(self.relative_epsilon), "in [0, 1)")
        self._check("spectral_power", _is_number(self.spectral_power) and 0 <= self.spectral_power <= 1, "in [0, 1]")
        self._check_choice("vllm_sync", VLLM_SYNCS)
        self._check(
            "full_sync_every",
            _is_int(self.full_sync_every) and self.full_sync_every >= 0,
            "a number of syncs, or 0 for never",
        )
        self._check_choice("kl_schedule", SCHEDULES)
        self._check_choice("kl_probe", PROBES)
        self._check("kl_budget", self.kl_budget is None or _is_positive(self.kl_budget), "None or positive and finite")
        if self.kl_budget is not None:
            if self.kl_budget_final is None:
                self.kl_budget_final = self.kl_budget / 10
            self._check("kl_budget_final", _is_positive(self.kl_budget_final), "None or positive")
            if self.kl_schedule == "cosine" and self.kl_budget_final > self.kl_budget:
                raise ValueError(
                    f"kl_budget_final={self.kl_budget_final} is above kl_budget={self.kl_budget}: a budget may only fall. "
                    "Lower it, leave it out (a tenth of kl_budget), or set kl_schedule='constant'"
                )
        self._check(
            "kl_schedule_steps",
            self.kl_schedule_steps is None or _is_positive_int(self.kl_schedule_steps),
            "None or a positive number of steps",
        )
        self._check("kl_probe_responses", _is_positive_int(self.kl_probe_responses), "a positive integer")
        self._check("kl_probe_max_tokens", _is_positive_int(self.kl_probe_max_tokens), "a positive integer")
        self._check("alpha_max", _is_positive(self.alpha_max), "positive and finite")
        self._check(
            "log_realized_kl",
            _is_int(self.log_realized_kl) and self.log_realized_kl >= 0,
            "a number of steps, or 0 for never",
        )
        self._check("mismatch_ema", _is_positive(self.mismatch_ema) and self.mismatch_ema <= 1, "in (0, 1]")
        self._check("mismatch_floor", _is_positive(self.mismatch_floor) and self.mismatch_floor <= 1, "in (0, 1]")
        if self.update_rule == "adam" and self.refresh != "never":
            raise ValueError(
                f"update_rule='adam' keeps moments of the sketch, which mean nothing under another projection: set "
                f"refresh='never' (got {self.refresh!r}) or use update_rule='row_adam'"
            )
        if self.norm == "none" and self.update_ratio is not None:
            raise ValueError(
                f"update_ratio={self.update_ratio} has no meaning with norm='none', where the step is learning_rate * "
                "U A: use norm='global' or 'matrix', or leave update_ratio unset"
            )

    def _check(self, name: str, is_good: bool, allowed: str) -> None:
        if not is_good:
            raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        self._check(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")

    @property
    def refresh_steps(self) -> int | None:
        """Optimizer steps that one projection lives, `None` for the whole run."""
        if self.refresh == "never":
            return None
        return 1 if self.refresh == "every_step" else int(self.refresh)

    @classmethod
    def logra(cls, **kwargs: Any) -> "SketchConfig":
        """The LoGRA paper's main setting (appendix D, table 4); keyword arguments override it."""
        settings: dict[str, Any] = {
            "rank": 256,
            "projection": "rademacher",
            "share_projection": False,
            "kl_schedule_steps": 300,
        }
        return cls(**settings | kwargs)

    @classmethod
    def rgc(cls, rank: int, **kwargs: Any) -> "SketchConfig":
        """RGC's normalized SGD: each matrix moves by the same fraction of its norm; keyword arguments override it."""
        settings: dict[str, Any] = {
            "rank": rank,
            "projection": "orthonormal",
            "share_projection": False,
            "update_rule": "sgd",
            "norm": "matrix",
            "weight_precision": "fp32",
            "kl_budget": None,
        }
        return cls(**settings | kwargs)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write `sketch_config.json` into a folder, which is created if needed; a file that says the same is left alone."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / CONFIG_NAME
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)

    @classmethod
    def from_pretrained(cls, pretrained_path: str | Path) -> "SketchConfig":
        """Read `sketch_config.json` from a folder.

        Raises:
            FileNotFoundError: The folder has no such file.
            ValueError: The file has a field that this version does not know.
        """
        path = Path(pretrained_path) / CONFIG_NAME
        values = json.loads(path.read_text())
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"{path} has unknown fields: {', '.join(unknown)}; it needs a newer trl_sketch")
        return cls(**values)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive_int(value: Any) -> bool:
    return _is_int(value) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and 0 < value < math.inf


def _is_fraction(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1
