"""The rollout's end: applies messages to a model's own weights, and knows which version of which run they are.

It raises nothing, since with tensor parallelism an exception in one of vLLM's workers leaves the others' replies queued: every
message has an outcome, which [`Receiver.status`] returns.

| outcome    | meaning                                                                                   | weights          |
|------------|-------------------------------------------------------------------------------------------|------------------|
| `applied`  | done                                                                                      | at its version   |
| `replayed` | had been done before                                                                      | as before        |
| `damaged`  | the bytes are not a sound message                                                         | as before        |
| `unknown`  | the sender has not initialized this worker (again, after a restart)                       | as before        |
| `foreign`  | the weights are another run's                                                             | as before        |
| `gap`      | it starts from another version, or is another chunk, than the one expected                | as before        |
| `invalid`  | a name, shape, rank or type does not fit the model                                        | as before        |
| `broken`   | an earlier write failed, or a full sync has not been finished                             | no version       |
| `failed`   | writing it failed                                                                         | no version       |

After `unknown` the sender initializes and sends a full sync; after `foreign`, `gap`, `broken` and `failed`, a full sync.
"""

import base64
import binascii
import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..projection import Signs
from .checksum import checksum
from .plan import Box, Parameter, Plan, record_plan
from .update import FORMAT_VERSION, Step, UpdateMessage, WeightMessage, decode


logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


@dataclass
class Sender:
    """What a run said that it will send, and where it goes.

    Attributes:
        parameters: By checkpoint name.
        sketched: Checkpoint names of the parameters that get updates.
        plan: Their places in the model.
        unsketchable: Those of `sketched` that take a full sync only, with the reason.
    """

    parameters: dict[str, Parameter]
    sketched: set[str]
    plan: Plan
    unsketchable: dict[str, str]

    @property
    def cast(self) -> list[str]:
        """Names of parameters that are held in another type than they are sent in, so that their bits differ."""
        return [
            n for n, p in self.parameters.items() if any(box.target.dtype != p.dtype for box in self.plan.boxes[n])
        ]


class Refused(Exception):
    """A message is not applied; `outcome` is one of the table's. Nothing has been written."""

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome


class Receiver:
    """Applies messages to one worker's part of a model.

    Args:
        model: As vLLM built it.
        whole: Whether this worker holds the whole model (no tensor, pipeline or expert parallelism).
    """

    def __init__(self, model: nn.Module, whole: bool = True) -> None:
        self.model = model
        self.whole = whole
        self.senders: dict[bytes, Sender] = {}
        self.run_id: bytes | None = None
        self.version: int | None = None
        self.broken: str | None = None
        self.last: dict[str, Any] = {}
        self._next_chunk = 0
        self._full: tuple[bytes, int, int] | None = None  # run, version and chunks of the full sync that is under way
        self._missing: set[str] = set()

    # ------------------------------------------------------------------ what the transport calls

    def initialize(self, info: dict[str, Any]) -> None:
        """Record where the parameters of a run go. Takes no weight from the run that has the model now.

        Args:
            info: `run_id` (hexadecimal), `parameters` (name, shape and type of each), `sketched` (names), and an `id` for
                the outcome.
        """
        with self._outcome(info.get("id")):
            try:
                run_id = bytes.fromhex(info["run_id"])
                parameters = [
                    Parameter(name, tuple(shape), DTYPES[dtype]) for name, shape, dtype in info["parameters"]
                ]
                sketched = set(info["sketched"])
            except (KeyError, TypeError, ValueError) as error:
                raise Refused("invalid", f"what the run sends cannot be read: {error!r}") from None
            unknown = sketched - {p.name for p in parameters}
            if unknown:
                raise Refused("invalid", f"sketched, but not among the parameters: {_some(unknown)}")
            plan = record_plan(self.model, parameters)
            if self.whole:
                for name, count in plan.uncovered(parameters).items():
                    plan.refused[name] = f"the loader leaves out {count} of its elements"
            by_name = {p.name: p for p in parameters}
            unsketchable = {n: r for n in sorted(sketched) if (r := why_no_updates(by_name[n], plan)) is not None}
            kept = {run: sender for run, sender in self.senders.items() if run == self.run_id}
            self.senders = kept | {run_id: Sender(by_name, sketched, plan, unsketchable)}

    def receive(self, message_id: str | None, body: str | bytes) -> None:
        """Apply a message; [`status`] has the outcome.

        Args:
            message_id: Comes back with the outcome.
            body: The message's bytes, or their base64.
        """
        with self._outcome(message_id):
            try:
                message = decode(base64.b64decode(body, validate=True) if isinstance(body, str) else body)
            except (ValueError, binascii.Error) as error:
                raise Refused("damaged", str(error)) from None
            sender = self.senders.get(message.run_id)
            if sender is None:
                raise Refused(
                    "unknown", "this worker does not know the run that sends: it has to be initialized first"
                )
            if isinstance(message, WeightMessage):
                self._receive_weights(message, sender)
            else:
                self._receive_updates(message, sender)

    def status(self) -> dict[str, Any]:
        """Version, run, faults and the last outcome, as JSON takes it."""
        return {
            "format_version": FORMAT_VERSION,
            "run_id": None if self.run_id is None else self.run_id.hex(),
            "version": self.version,
            "broken": self.broken,
            "last": self.last,
            "senders": {
                run.hex(): {"refused": sender.plan.refused, "unsketchable": sender.unsketchable, "cast": sender.cast}
                for run, sender in self.senders.items()
            },
        }

    def layout(self, run_id: str) -> dict[str, list[list[Any]]]:
        """Start and shape of every box that this worker holds of the run's parameters, by checkpoint name."""
        return {n: [[list(box.start), list(box.shape)] for box in boxes] for n, boxes in self._boxes(run_id).items()}

    def checksums(self, run_id: str, names: Iterable[str] | None = None) -> dict[str, list[list[Any]]]:
        """Start, shape and checksum of every box of the run's parameters, default all, by checkpoint name."""
        held = self._boxes(run_id)
        result: dict[str, list[list[Any]]] = {}
        for name in held if names is None else [name for name in names if name in held]:
            shape = self.senders[bytes.fromhex(run_id)].parameters[name].shape
            result[name] = [
                [list(box.start), list(box.shape), checksum(box.target, box.start, shape)] for box in held[name]
            ]
        return result

    def _boxes(self, run_id: str) -> dict[str, list[Box]]:
        return next((s.plan.boxes for run, s in self.senders.items() if run.hex() == run_id), {})

    # ------------------------------------------------------------------ updates

    def _receive_updates(self, message: UpdateMessage, sender: Sender) -> None:
        if message.run_id != self.run_id:
            raise Refused("foreign", "the weights are another run's: a full sync has to come first")
        if self.broken is not None or self.version is None:
            raise Refused("broken", f"{self.broken}; a full sync has to come first")
        steps = [step for step in message.steps if step.version > self.version]
        if not steps:
            raise Refused("replayed", f"version {message.version} had been reached before")
        if steps[0].base_version != self.version:
            raise Refused(
                "gap", f"an update from version {steps[0].base_version} cannot follow version {self.version}"
            )
        for step in steps:
            _check_step(step, sender)
        with self._writing():
            for step in steps:
                apply_step(step, sender.plan)
        self.version = message.version

    # ------------------------------------------------------------------ whole weights

    def _receive_weights(self, message: WeightMessage, sender: Sender) -> None:
        key = (message.run_id, message.version, message.count)
        if message.index > 0 and (key != self._full or message.index > self._next_chunk):
            raise Refused("gap", f"chunk {message.index} of {message.count} does not follow what has been received")
        if message.index > 0 and message.index < self._next_chunk:
            raise Refused("replayed", f"chunk {message.index} had been received before")
        _check_tensors(message, sender)
        if message.index == 0:
            # Tensors that a version already has may be sent again one by one; a new version is sent whole.
            same = self.broken is None and (message.run_id, message.version) == (self.run_id, self.version)
            missing = set() if same else set(sender.parameters)
        else:
            missing = self._missing
        missing = missing - set(message.tensors)
        if message.index + 1 == message.count and missing:
            raise Refused("invalid", f"the full sync would leave out {_some(missing)}")
        with self._writing():
            self.run_id = message.run_id
            for name, tensor in message.tensors.items():
                for box in sender.plan.boxes[name]:
                    box.target.copy_(box.of(tensor))
        self._full, self._next_chunk, self._missing = key, message.index + 1, missing
        if message.index + 1 == message.count:
            self.version = message.version
            self.senders = {message.run_id: sender}
        else:
            self.version, self.broken = None, "a full sync has not been finished"

    # ------------------------------------------------------------------ outcomes

    @contextlib.contextmanager
    def _outcome(self, message_id: Any) -> Iterator[None]:
        """Turns what happens inside into the last outcome."""
        outcome, text = "applied", None
        try:
            yield
        except Refused as error:
            outcome, text = error.outcome, str(error)
        except Exception as error:  # of a kind that was not thought of; nothing has been written, see `_writing`
            outcome, text = "invalid", f"{type(error).__name__}: {error}"
        if outcome not in ("applied", "replayed"):
            logger.error("Weight sync: %s (%s).", text, outcome)
        self.last = {"id": message_id, "outcome": outcome, "error": text}

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """While it lasts the weights have no version; after a failure they have none either."""
        self.version, self.broken = None, "writing was interrupted"
        try:
            yield
        except Exception as error:
            self.broken = f"writing failed ({type(error).__name__}: {error})"
            raise Refused("failed", f"{self.broken}; a full sync has to come first") from error
        self.broken = None


@torch.no_grad()
def apply_step(step: Step, plan: Plan) -> None:
    """Apply a step's updates to the boxes of `plan`."""
    made: tuple[Any, Signs | torch.Tensor] | None = None
    for update in step.updates:
        for box in plan.boxes[f"{update.name}.weight"]:
            (row, col), (height, width) = box.start, box.shape
            moved = update.to(box.target.device)
            # Neighbours (q, k, v) share a projection: it is drawn once for all of them.
            shape = (update.q.shape[1], update.in_features)
            wanted = (update.projection, int(update.projection_key), shape, moved.q.device)
            if made is None or made[0] != wanted:
                made = (wanted, moved.draw())
            moved.apply_(box.target, (row, row + height), (col, col + width), drawn=made[1])


def why_no_updates(parameter: Parameter, plan: Plan) -> str | None:
    """Why a parameter takes no sketch updates, only full syncs; `None` if it takes them."""
    if parameter.name in plan.refused:
        return plan.refused[parameter.name]
    if len(parameter.shape) != 2 or not parameter.name.endswith(".weight"):
        return f"updates are of matrices called .weight, its shape is {parameter.shape}"
    if parameter.dtype not in (torch.bfloat16, torch.float32):
        return f"updates are of bfloat16 and float32 weights, it is {parameter.dtype}"
    for box in plan.boxes[parameter.name]:
        if box.target.dtype != parameter.dtype:
            return f"it is {parameter.dtype} in the trainer and {box.target.dtype} here"
    return None


def _check_step(step: Step, sender: Sender) -> None:
    """Raises `Refused`, if an update does not fit, or one is missing."""
    for update in step.updates:
        name = f"{update.name}.weight"
        if name not in sender.sketched:
            raise Refused("invalid", f"{name} is not among the parameters that were said to get updates")
        if name in sender.unsketchable:
            raise Refused("invalid", f"{name} takes no updates: {sender.unsketchable[name]}")
        shape = (update.q.shape[0], update.in_features)
        if shape != sender.parameters[name].shape:
            raise Refused("invalid", f"{name} has shape {sender.parameters[name].shape}, its update {shape}")
    absent = sender.sketched - {f"{update.name}.weight" for update in step.updates}
    if step.updates and absent:  # a step that was skipped has none at all
        raise Refused("invalid", f"the step to version {step.version} has no update of {_some(absent)}")


def _check_tensors(message: WeightMessage, sender: Sender) -> None:
    """Raises `Refused`, if a tensor does not fit."""
    for name, tensor in message.tensors.items():
        parameter = sender.parameters.get(name)
        if parameter is None:
            raise Refused("invalid", f"{name} is not among the parameters that were said to be sent")
        if name in sender.plan.refused:
            raise Refused("invalid", f"{name} cannot be written in place: {sender.plan.refused[name]}")
        if tuple(tensor.shape) != parameter.shape or tensor.dtype != parameter.dtype:
            raise Refused(
                "invalid",
                f"{name} was said to be {parameter.dtype} {parameter.shape}, got {tensor.dtype} {tuple(tensor.shape)}",
            )


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
