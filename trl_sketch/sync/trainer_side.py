"""The trainer's side: TRL's `VLLMGeneration`, whose weights follow those of a `SketchOptimizer`."""

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import requests
import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration, empty_cache

from .. import distributed
from ..config import SketchConfig
from ..model import sketch_state
from ..optimizer import SketchOptimizer
from ..weights import SketchUpdate
from .checksum import checksum, combine
from .client import ServerClient, SyncError
from .colocate import ColocatedWeights, vllm_model
from .receiver import apply_step
from .update import Step, UpdateMessage, new_run_id


logger = logging.getLogger(__name__)

# After these a server takes a full sync. The other outcomes are mistakes, which it would not mend.
_FULL_SYNC_HELPS = ("unknown", "gap", "damaged", "broken", "failed", "http")
_ATTEMPTS = 3


class RolloutError(RuntimeError):
    """The rollout cannot be kept in step with the trainer. It is raised on all ranks alike."""


class SketchVLLMGeneration(VLLMGeneration):
    """[`trl.generation.vllm_generation.VLLMGeneration`], kept in step by updates where that is possible.

    What it overrides:
      * `_init_vllm`: in server mode, a client that needs no NCCL, for each of the addresses in `server_base_url`, which
        commas separate.
      * `sync_weights`: sends the updates since the last sync, or whole weights; in colocate mode shares storage.
      * `generate`: in server mode, generates again if a server was restarted meanwhile.

    Attributes:
        version: Optimizer steps in the rollout's weights; `None` if they are to have a full sync.
        metrics: Of the syncs since they were last taken.
    """

    def attach(self, config: SketchConfig, save: Callable[[], str]) -> None:
        """Say what is trained and how it is synced.

        Args:
            config: Its `vllm_sync` and `full_sync_every` are used.
            save: Called on all ranks when a server stays away; saves a checkpoint and returns its folder.

        Raises:
            ValueError: `vllm_sync="share"` where it is not possible.
        """
        self.config, self.save = config, save
        self.version: int | None = None
        self.metrics: dict[str, list[float]] = {}
        self._steps: list[Step] = []
        self._syncs = 0
        self._behind: set[int] = set()  # servers that are to have a full sync
        self._whole_only = config.vllm_sync == "full"
        self._followed: SketchOptimizer | None = None
        self._colocated: ColocatedWeights | None = None
        if config.vllm_sync == "share" and self.mode == "server":
            raise ValueError("vllm_sync='share' needs vLLM in the trainer's process: set vllm_mode='colocate'")
        if config.vllm_sync == "share" and self.enable_sleep_mode:
            raise ValueError(
                "vllm_sync='share' keeps one copy of the weights, and vllm_enable_sleep_mode throws vLLM's away (level 2): "
                "set vllm_enable_sleep_mode=False, or vllm_sync='auto'"
            )

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Collect the updates that `optimizer` makes from now on."""
        if isinstance(optimizer, SketchOptimizer) and optimizer is not self._followed:
            optimizer.listeners.append(self._collect)
            self._followed = optimizer

    def _collect(self, version: int, updates: list[SketchUpdate]) -> None:
        is_sent_from_here = self.mode == "colocate" or self.accelerator.is_main_process
        if self.version is not None and not self._whole_only and is_sent_from_here:
            self._steps.append(Step(version - 1, version, updates))

    # ------------------------------------------------------------------ TRL's methods

    def _init_vllm(self) -> None:
        if self.mode != "server":
            super()._init_vllm()
            return
        if self.accelerator.is_main_process:
            address = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            urls = [url.strip() for url in address.split(",")]
            self.vllm_client = _RolloutClient(urls, self.server_timeout)
            run_id = new_run_id()
            self.servers = [ServerClient(url, run_id, self.server_timeout) for url in urls]
            for server in self.servers:
                server.check_backend()
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Bring the rollout's weights to the trainer's. Every rank must call this.

        Raises:
            RolloutError: A server stays away longer than `vllm_server_timeout` (after a checkpoint has been saved), cannot
                take these weights, or has been taken over by another run.
        """
        start = perf_counter()
        target = sketch_state(self.model).step
        sent = self._sync_servers(target) if self.mode == "server" else self._sync_colocated(target)
        self.version = target
        self._steps.clear()
        self._syncs += 1
        for name, value in (("bytes", sent), ("seconds", perf_counter() - start)):
            self.metrics.setdefault(f"sketch/sync_{name}", []).append(value)
        self.metrics["sketch/weight_version"] = [target]

    def generate(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As TRL's. In server mode the completions are by the weights of [`version`], of every server."""
        if self.mode != "server":
            return super().generate(*args, **kwargs)
        for _ in range(_ATTEMPTS):
            result = super().generate(*args, **kwargs)
            strayed = self._on_main(self._strayed)
            if not strayed:
                return result
            logger.warning("vLLM lost the weights while it generated: full sync, and again.")
            self._behind |= set(strayed)
            self.sync_weights()
        raise RolloutError(f"vLLM lost the weights while it generated, {_ATTEMPTS} times in a row")

    # ------------------------------------------------------------------ servers

    def _sync_servers(self, target: int) -> int:
        before = sum(server.bytes_sent for server in self._servers())
        self._send_whole(target, self._on_main(self._send_updates, target))
        every = self.config.full_sync_every
        if every and self._syncs and self._syncs % every == 0:
            self._send_whole(target, self._on_main(self._differing, self._checksums()))
        self._behind = set()
        return sum(server.bytes_sent for server in self._servers()) - before

    def _send_whole(self, target: int, behind: list[int]) -> None:
        if behind:
            self._whole_only |= self._on_main(self._send_weights, target, behind, self._weights())

    def _servers(self) -> list[ServerClient]:
        return self.servers if self.accelerator.is_main_process else []

    def _on_main(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function` returns on the main process, on all ranks; or its error."""
        outcome: list[Any] = [None, None, False]
        if self.accelerator.is_main_process:
            try:
                outcome[0] = function(*args)
            except (SyncError, RolloutError, ConnectionError) as error:
                outcome[1:] = [str(error), isinstance(error, ConnectionError)]
        broadcast_object_list(outcome, from_process=0)
        result, problem, is_away = outcome
        if problem is not None:
            if is_away:
                problem = f"{problem} A checkpoint was saved in {self.save()}: start the server and resume from there."
            raise RolloutError(problem)
        return result

    def _send_updates(self, target: int) -> list[int]:
        """Send the collected steps to every server; returns those that are to have a full sync instead."""
        steps = self._steps_to(target)
        if steps is None:
            return list(range(len(self.servers)))
        behind = set(self._behind)
        for index, server in enumerate(self.servers):
            if index in behind or not steps:
                continue
            try:
                server.send_updates(UpdateMessage(server.run_id, steps))
                server.reset_prefix_cache()
            except SyncError as error:
                if error.outcome == "foreign":
                    raise RolloutError(
                        f"{error}. Another trainer has connected to this server: stop one of them, or give each its own"
                    ) from error
                if error.outcome not in _FULL_SYNC_HELPS:
                    raise
                logger.warning("%s: full sync.", error)
                behind.add(index)
        return sorted(behind)

    def _steps_to(self, target: int) -> list[Step] | None:
        """The steps from [`version`] to `target`; `None` if only whole weights lead there."""
        if self.version is None or self._whole_only:
            return None
        reached = self.version
        for step in self._steps:
            if step.base_version != reached:
                return None
            reached = step.version
        return self._steps if reached == target else None

    def _send_weights(self, target: int, behind: list[int], weights: dict[str, torch.Tensor]) -> bool:
        """A full sync of some servers; returns whether they will take nothing else."""
        sketched = self._sketched()
        whole_only = self._whole_only
        for index in behind:
            server = self.servers[index]
            for attempt in range(_ATTEMPTS):
                self.vllm_client.wait_for(index)
                try:
                    unsketchable = server.initialize(weights, sketched)
                    if self._syncs == 0 and target == 0:
                        self._check_start(server, weights)
                    server.send_weights(target, weights)
                    server.reset_prefix_cache()
                    break
                except SyncError as error:
                    if error.outcome != "http" or attempt + 1 == _ATTEMPTS:
                        raise
                    logger.warning("%s: once more.", error)
            if unsketchable and not whole_only:
                self._say_whole_only(unsketchable)
                whole_only = True
        return whole_only

    def _say_whole_only(self, unsketchable: dict[str, str]) -> None:
        name, reason = next(iter(unsketchable.items()))
        said = f"{name}: {reason}" + (f" (and {len(unsketchable) - 1} more)" if len(unsketchable) > 1 else "")
        if self.config.vllm_sync == "sketch":
            raise RolloutError(f"vllm_sync='sketch' is not possible. {said}. Set vllm_sync='auto' for whole weights")
        logger.warning("vLLM gets whole weights at every sync, because updates would not be exact. %s.", said)

    def _check_start(self, server: ServerClient, weights: dict[str, torch.Tensor]) -> None:
        """vLLM has loaded the same checkpoint: what it holds must be what the trainer holds."""
        differing = server.differing(weights)
        if differing:
            logger.warning(
                "The vLLM server at %s starts from other values than the trainer in %d of %d weights (%s ...). If it was "
                "started with another checkpoint, all is well after the first sync. If not, it re-packs them, and would "
                "generate with old weights: please report the model.",
                server.base_url,
                len(differing),
                len(weights),
                ", ".join(differing[:3]),
            )

    def _differing(self, checksums: dict[str, int | None]) -> list[int]:
        """Servers that do not have the trainer's bits."""
        behind = []
        for index, server in enumerate(self.servers):
            try:
                theirs = server.checksums(name for name in checksums if name not in server.cast)
            except SyncError as error:
                logger.warning("%s", error)
                behind.append(index)
                continue
            names = [name for name, value in theirs.items() if value != checksums[name]]
            if names:
                behind.append(index)
                logger.warning(
                    "The weights of the vLLM server at %s are not the trainer's in %s%s: full sync.",
                    server.base_url,
                    ", ".join(names[:3]),
                    f" and {len(names) - 3} more" if len(names) > 3 else "",
                )
        return behind

    def _strayed(self) -> list[int]:
        """Servers that failed to generate, or have not the weights that they were sent."""
        failed = self.vllm_client.take_failures()
        for index, server in enumerate(self.servers):
            try:
                if server.version() != self.version:
                    failed.add(index)
            except SyncError:
                failed.add(index)
        return sorted(failed)

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
        """By checkpoint name, of whole parameters; nothing is gathered but the shards' checksums."""
        parameters = self._parameters()
        parts: list[Any] = []
        for name, parameter in parameters.items():
            local, start = distributed.local_part(parameter.detach())
            if isinstance(parameter, DTensor) or self.accelerator.is_main_process:
                parts.append((name, start, tuple(local.shape), checksum(local, start, tuple(parameter.shape))))
        if distributed.is_sharded(self.model):
            parts = gather_object(parts)
        boxes: dict[str, set[Any]] = {name: set() for name in parameters}
        for name, *box in parts:
            boxes[name].add(tuple(box))
        return {name: combine(sorted(found), tuple(parameters[name].shape)) for name, found in boxes.items()}

    # ------------------------------------------------------------------ in the trainer's process

    def _sync_colocated(self, target: int) -> int:
        if self.enable_sleep_mode:
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
            self.version = None  # sleeping at level 2 has thrown them away
        if self._colocated is None:
            self._colocate()
        colocated = self._colocated
        assert colocated is not None
        steps = self._steps_to(target)
        if colocated.refused:
            super().sync_weights()
            return 0
        if steps is not None:
            for step in steps:
                apply_step(step, colocated.plan)
        elif distributed.is_sharded(self.model):
            for name, parameter in self._parameters().items():
                colocated.write(name, distributed.whole(parameter.detach()))
        else:
            colocated.copy(None if self.version is None else self._sketched())
        self.llm.reset_prefix_cache()
        return 0

    def _colocate(self) -> None:
        """Find vLLM's places for the weights, and share them if that is wanted and possible."""
        wanted = self.config.vllm_sync
        is_whole = self.tensor_parallel_size == 1
        self._colocated = colocated = ColocatedWeights(vllm_model(self.llm), self._parameters(), whole=is_whole)
        if colocated.refused:
            name, reason = next(iter(colocated.refused.items()))
            said = f"vLLM's {name} cannot be written in place: {reason}"
            if wanted in ("share", "sketch"):
                raise RolloutError(f"vllm_sync={wanted!r} is not possible. {said}. Set vllm_sync='auto'")
            logger.warning(
                "%s (and %d more). vLLM loads all weights anew at every sync.", said, len(colocated.refused) - 1
            )
            self._whole_only = True
            return
        if wanted in ("auto", "share") and not self.enable_sleep_mode:
            unshared = colocated.why_not_shared()
            if wanted == "share" and unshared:
                name, reason = next(iter(unshared.items()))
                raise RolloutError(f"vllm_sync='share' is not possible for {name}: {reason}. Set vllm_sync='auto'")
            colocated.share()
            # What is not shared is copied, which here is as fast as an update; a sharded trainer would have to gather it.
            self._whole_only |= not distributed.is_sharded(self.model)
        unsketchable = colocated.unsketchable(self._sketched())
        if unsketchable:
            self._say_whole_only(unsketchable)
            self._whole_only = True


class _RolloutClient(VLLMClient):
    """TRL's client, for one or several servers; without the NCCL group that it sends weights through.

    Args:
        urls: Their addresses.
        timeout: Seconds to wait for each to be up.
    """

    def __init__(self, urls: list[str], timeout: float) -> None:
        super().__init__(base_url=urls[0], connection_timeout=timeout)
        others = [VLLMClient(base_url=url, connection_timeout=timeout) for url in urls[1:]]
        self.clients: list[VLLMClient] = [self, *others]
        self.timeout = timeout
        self._failures: set[int] = set()

    def wait_for(self, index: int) -> None:
        """Wait until a server is up.

        Raises:
            ConnectionError: It is not after the time-out; the message has its address.
        """
        self.clients[index].check_server(self.timeout)

    def take_failures(self) -> set[int]:
        """Servers that could not be reached for generating since the last call."""
        failures, self._failures = self._failures, set()
        return failures

    def generate(self, prompts: Any, features: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As TRL's; the prompts are shared out among the servers. Without an answer from one the result is empty."""
        size = -(-len(prompts) // len(self.clients))
        parts = [slice(start, start + size) for start in range(0, len(prompts), size)]

        def ask(index: int) -> dict[str, Any] | None:
            part = parts[index]
            try:
                own = None if features is None else features[part]
                return VLLMClient.generate(self.clients[index], prompts[part], own, *args, **kwargs)
            except requests.exceptions.RequestException as error:
                logger.warning("The vLLM server at %s did not answer: %s", self.clients[index].base_url, error)
                self._failures.add(index)
                return None

        with ThreadPoolExecutor(len(parts)) as pool:
            answers = list(pool.map(ask, range(len(parts))))
        if any(answer is None for answer in answers):
            return {"prompt_ids": [], "completion_ids": [], "logprobs": None, "logprob_token_ids": None}
        whole: dict[str, Any] = {}
        for name in answers[0] or {}:
            values = [answer[name] for answer in answers if answer is not None]
            whole[name] = (
                None if any(value is None for value in values) else [item for value in values for item in value]
            )
        return whole


@contextlib.contextmanager
def installed(trainer_module: Any) -> Any:
    """Within the block, TRL's trainer makes a [`SketchVLLMGeneration`]."""
    original = trainer_module.VLLMGeneration
    trainer_module.VLLMGeneration = SketchVLLMGeneration
    try:
        yield
    finally:
        trainer_module.VLLMGeneration = original
