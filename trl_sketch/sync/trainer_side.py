"""The trainer's side: TRL's `VLLMGeneration`, whose weights follow those of a `SketchOptimizer`."""

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor
from trl.generation.vllm_generation import VLLMGeneration, empty_cache

from .. import distributed
from ..config import SketchConfig
from ..model import sketch_state
from ..optimizer import SketchOptimizer
from ..weights import SketchUpdate
from .checksum import checksum, combine
from .client import SyncError
from .colocate import ColocatedWeights, vllm_model
from .receiver import apply_step
from .servers import RolloutError, Servers, some_names, some_reason
from .update import Step


logger = logging.getLogger(__name__)

_ATTEMPTS = 3


class SketchVLLMGeneration(VLLMGeneration):
    """[`trl.generation.vllm_generation.VLLMGeneration`], kept in step by updates where that is possible.

    What it overrides:
      * `_init_vllm`: in server mode, clients that need no NCCL, for each of the addresses in `server_base_url`, which
        commas separate.
      * `sync_weights`: sends the updates since the last sync, or whole weights; in colocate mode shares storage.
      * `generate`: syncs if that is due; in server mode, generates again if a server was restarted meanwhile.

    Attributes:
        version: Optimizer steps in the rollout's weights; `None` if all weights are to be sent.
        metrics: Of the syncs since they were last taken.
    """

    servers: Servers  # on the main process, in server mode

    def attach(self, config: SketchConfig, save: Callable[[], str | None]) -> None:
        """Say what is trained and how it is synced.

        Args:
            config: Its `vllm_sync` and `full_sync_every` are used.
            save: Called on all ranks when a server stays away; saves a checkpoint, if there is anything to save, and returns
                its folder.
        """
        self.config, self._save = config, save
        self.version: int | None = None
        self.metrics: dict[str, list[float]] = {}
        self._steps: list[Step] = []
        self._syncs = 0
        self._whole_only = config.vllm_sync == "full"
        self._followed: SketchOptimizer | None = None
        self._colocated: ColocatedWeights | None = None

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Collect the updates that `optimizer` makes from now on."""
        if isinstance(optimizer, SketchOptimizer) and optimizer is not self._followed:
            optimizer.listeners.append(self._collect)
            self._followed = optimizer

    def forget(self) -> None:
        """The trainer's weights were loaded from somewhere: the next sync is a full one."""
        self.version = None
        self._steps.clear()

    def _collect(self, version: int, updates: list[SketchUpdate]) -> None:
        is_applied_from_here = self.mode == "colocate" or self.accelerator.is_main_process
        if self.version is not None and not self._whole_only and is_applied_from_here:
            self._steps.append(Step(version - 1, version, updates))

    # ------------------------------------------------------------------ TRL's methods

    def _init_vllm(self) -> None:
        if self.mode != "server":
            super()._init_vllm()
            return
        address = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        self._on_main(lambda: self._connect([url.strip() for url in address.split(",")]))

    def _connect(self, urls: list[str]) -> None:
        self.servers = Servers(urls, self.server_timeout)
        self.vllm_client = self.servers.generator

    def sync_weights(self) -> None:
        """Bring the rollout's weights to the trainer's. Every rank must call this.

        Raises:
            RolloutError: A server stays away longer than `vllm_server_timeout` (after a checkpoint has been saved), cannot
                take these weights, or has been taken over by another run.
        """
        start = perf_counter()
        target = sketch_state(self.model).step
        sent = 0
        if self.mode == "server":
            sent = self._sync_servers(target)
        else:
            self._sync_colocated(target)
        self.version = target
        self._steps.clear()
        self._syncs += 1
        for name, value in (("bytes", sent), ("seconds", perf_counter() - start)):
            self.metrics.setdefault(f"sketch/sync_{name}", []).append(value)
        self.metrics["sketch/weight_version"] = [target]

    def generate(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As TRL's; the completions are by the trainer's weights, of every server."""
        if self.version != sketch_state(self.model).step:  # TRL goes by `global_step`, which a second training resets
            self.sync_weights()
        if self.mode != "server":
            return super().generate(*args, **kwargs)
        for _ in range(_ATTEMPTS):
            result = super().generate(*args, **kwargs)
            is_answered, is_in_step = self._on_main(lambda: self.servers.look_back(self.version))
            if not is_in_step:
                self.sync_weights()
            elif is_answered:
                return result
            logger.warning("The completions are generated again.")
        raise RolloutError(
            f"the vLLM servers failed {_ATTEMPTS} times in a row to generate; see the warnings before this"
        )

    # ------------------------------------------------------------------ servers

    def _sync_servers(self, target: int) -> int:
        """Returns how many bytes were sent."""
        before = self._bytes_sent()
        steps = self._steps_to(target)
        is_some_behind = self._on_main(lambda: self.servers.send_updates(steps))
        if not is_some_behind and self._is_check_due():
            checksums = self._checksums()
            is_some_behind = self._on_main(lambda: self.servers.compare(checksums))
        if is_some_behind:
            self._send_weights(target)
        return self._bytes_sent() - before

    def _send_weights(self, target: int) -> None:
        weights, sketched = self._weights(), self._sketched()
        updates_only = self.config.vllm_sync == "sketch"
        unsketchable = self._on_main(
            lambda: self.servers.send_weights(target, weights, sketched, updates_only=updates_only)
        )
        if unsketchable:
            self._send_whole_from_now_on(unsketchable)

    def _send_whole_from_now_on(self, unsketchable: dict[str, str]) -> None:
        if not self._whole_only:
            logger.warning(
                "vLLM gets whole weights at every sync, because updates would not be exact. %s.",
                some_reason(unsketchable),
            )
        self._whole_only = True

    def _bytes_sent(self) -> int:
        return self.servers.bytes_sent if self.accelerator.is_main_process else 0

    def _on_main(self, function: Callable[[], Any]) -> Any:
        """What `function` returns on the main process, on all ranks.

        Raises:
            RolloutError: The function raised an error on the main process; on all ranks. If a server is away, a checkpoint
                has been saved.
        """
        outcome: list[Any] = [None, None, False]  # result, error, whether a server is away
        cause: Exception | None = None
        if self.accelerator.is_main_process:
            try:
                outcome[0] = function()
            except Exception as error:  # the other ranks wait for the outcome, whatever it is
                is_known = isinstance(error, (SyncError, RolloutError))
                outcome[1] = str(error) if is_known else f"{type(error).__name__}: {error}"
                outcome[2] = isinstance(error, SyncError) and error.outcome == "away"
                cause = error
        broadcast_object_list(outcome, from_process=0)
        result, problem, is_away = outcome
        if problem is None:
            return result
        checkpoint = self._save() if is_away and hasattr(self, "_save") else None
        if checkpoint is not None:
            problem = f"{problem}. A checkpoint was saved in {checkpoint}: start the server and resume from there"
        raise RolloutError(problem) from cause

    def _steps_to(self, target: int) -> list[Step] | None:
        """The steps from [`version`] to `target`; `None` if only whole weights lead there."""
        if self.version is None or self._whole_only:
            return None
        if not self.accelerator.is_main_process and self.mode == "server":
            return []  # they are collected where they are sent from
        reached = self.version
        for step in self._steps:
            if step.base_version != reached:
                return None
            reached = step.version
        return self._steps if reached == target else None

    def _is_check_due(self) -> bool:
        every = self.config.full_sync_every
        return bool(every) and self._syncs > 0 and self._syncs % every == 0

    # ------------------------------------------------------------------ the trainer's weights

    def _sketched(self) -> list[str]:
        return [f"{name}.weight" for name in sketch_state(self.model).layers]

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """By checkpoint name, as they are held here."""
        return {self._fix_param_name_to_vllm(name): p for name, p in self.model.named_parameters()}

    def _weights(self) -> dict[str, torch.Tensor]:
        """By checkpoint name, whole. Of a sharded model they are gathered on the main process, on the CPU."""
        if not distributed.is_sharded(self.model):
            return {name: parameter.data for name, parameter in self._parameters().items()}
        is_main = self.accelerator.is_main_process
        gathered = ((name, distributed.whole(p.detach())) for name, p in self._parameters().items())
        return {name: tensor.cpu() for name, tensor in gathered if is_main}

    def _checksums(self) -> dict[str, int | None]:
        """By checkpoint name, of whole parameters; nothing is gathered but the shards' checksums.

        In server mode they are right on the main process only.
        """
        parameters = self._parameters()
        parts: list[Any] = []
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor) or self.mode == "colocate" or self.accelerator.is_main_process:
                local, start = distributed.local_part(parameter.detach())
                value = checksum(local, start, tuple(parameter.shape))
                parts.append((name, start, tuple(local.shape), value))
        return _combined(parts if not distributed.is_sharded(self.model) else gather_object(parts), parameters)

    # ------------------------------------------------------------------ in the trainer's process

    def _sync_colocated(self, target: int) -> None:
        if self.enable_sleep_mode:
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
            self.version = None  # sleeping at level 2 has thrown them away
        colocated = self._places()
        if colocated.refused:
            super().sync_weights()
            return
        if colocated.shared:
            colocated.share()  # again, if somebody has given a parameter other memory
        steps = self._steps_to(target)
        if steps is None:
            self._write_whole(colocated)
        else:
            for step in steps:
                apply_step(step, colocated.plan)
            if self._is_check_due():
                self._check_colocated(colocated)
        self.llm.reset_prefix_cache()

    def _write_whole(self, colocated: ColocatedWeights) -> None:
        if distributed.is_sharded(self.model):
            for name, parameter in colocated.parameters.items():
                colocated.write(name, distributed.whole(parameter.detach()))
        else:
            colocated.copy(None if self.version is None else self._sketched())

    def _check_colocated(self, colocated: ColocatedWeights) -> None:
        """Compare vLLM's weights with the trainer's, and write all where they differ. Every rank must call this."""
        parts: list[Any] = [
            (name, box.start, box.shape, checksum(box.target, box.start, tuple(parameter.shape)))
            for name, parameter in colocated.parameters.items()
            for box in colocated.plan.boxes[name]
            if box.target.dtype == parameter.dtype
        ]
        if self.accelerator.num_processes > 1:
            parts = gather_object(parts)
        theirs, ours = _combined(parts, colocated.parameters), self._checksums()
        differing = [name for name in {part[0]: None for part in parts} if theirs[name] != ours[name]]
        if differing:
            logger.warning("vLLM's weights are not the trainer's in %s: full sync.", some_names(differing))
            self.version = None
            self._write_whole(colocated)

    def _places(self) -> ColocatedWeights:
        """The trainer's parameters in vLLM's weights; found anew if the model has other parameters (as FSDP2 makes)."""
        parameters = self._parameters()
        known = self._colocated.parameters if self._colocated is not None else {}
        if self._colocated is None or any(known.get(name) is not p for name, p in parameters.items()):
            self.version = None
            self._colocated = self._colocate(parameters)
        return self._colocated

    def _colocate(self, parameters: dict[str, torch.nn.Parameter]) -> ColocatedWeights:
        """Find vLLM's places for the weights, and share them if that is wanted and possible."""
        wanted = self.config.vllm_sync
        is_whole = self.tensor_parallel_size == 1
        colocated = ColocatedWeights(vllm_model(self.llm), parameters, whole=is_whole)
        if not is_whole:
            self._refuse_uncovered(colocated)
        self._whole_only = wanted == "full"
        if colocated.refused:
            if not torch.accelerator.is_available():
                raise RolloutError(
                    f"vLLM cannot be kept in step on this machine: {some_reason(colocated.refused)}. Its CPU build computes with "
                    "packed copies of the weights: set use_vllm=False here"
                )
            if wanted in ("share", "sketch"):
                raise RolloutError(
                    f"vllm_sync={wanted!r} is not possible: vLLM's weights cannot be written in place. "
                    f"{some_reason(colocated.refused)}. Set vllm_sync='auto'"
                )
            logger.warning(
                "vLLM loads all weights anew at every sync, because they cannot be written in place. %s.",
                some_reason(colocated.refused),
            )
            self._whole_only = True
            return colocated
        if wanted == "share" and (kept := colocated.why_not_shared()):
            raise RolloutError(f"vllm_sync='share' is not possible. {some_reason(kept)}. Set vllm_sync='auto'")
        if wanted in ("auto", "share") and not self.enable_sleep_mode and not distributed.is_sharded(self.model):
            colocated.share()
            self._whole_only = True  # what is not shared is copied, which within a process is as fast as an update
        unsketchable = colocated.unsketchable(self._sketched())
        if unsketchable and wanted == "sketch":
            raise RolloutError(
                f"vllm_sync='sketch' is not possible. {some_reason(unsketchable)}. Set vllm_sync='auto'"
            )
        if unsketchable:
            self._send_whole_from_now_on(unsketchable)
        return colocated

    def _refuse_uncovered(self, colocated: ColocatedWeights) -> None:
        """With tensor parallelism: parameters of which the workers together do not hold every element."""
        parts: list[Any] = [
            (name, box.start, box.shape, 0) for name, boxes in colocated.plan.boxes.items() for box in boxes
        ]
        refused = dict(gather_object([dict(colocated.refused)])[0])
        for name, value in _combined(gather_object(parts), colocated.parameters).items():
            if value is None:
                refused.setdefault(name, "the workers' loaders leave out a part of it")
        colocated.refused.update(refused)


def _combined(parts: list[Any], parameters: dict[str, torch.nn.Parameter]) -> dict[str, int | None]:
    """Checksums of whole parameters from `(name, start, shape, checksum)` of boxes."""
    boxes: dict[str, list[Any]] = {name: [] for name in parameters}
    for name, *box in parts:
        boxes[name].append(tuple(box))
    return {name: combine(found, tuple(parameters[name].shape)) for name, found in boxes.items()}
