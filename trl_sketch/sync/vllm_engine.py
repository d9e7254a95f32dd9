"""vLLM's side: a weight-transfer engine named `sketch`, and the worker methods that return status and checksums.

Written for vLLM 0.25 to 0.31, where an engine is built as `(config, vllm_config, device, model)`; run with 0.31.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.v1.worker.worker_base import WorkerBase

from .receiver import Receiver


@dataclass
class SketchInitInfo(WeightTransferInitInfo):
    """Body of `/init_weight_transfer_engine`; see [`Receiver.initialize`]."""

    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class SketchUpdateInfo(WeightTransferUpdateInfo):
    """Body of `/update_weights`: a message in base64, and an `id` that comes back with its outcome."""

    id: str | None = None
    body: str = ""


class SketchWeightTransferEngine(WeightTransferEngine[SketchInitInfo, SketchUpdateInfo]):
    """Hands messages to a [`Receiver`]. No request raises: its outcome is in the status."""

    init_info_cls = SketchInitInfo
    update_info_cls = SketchUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.receiver = Receiver(self.model, whole=self.parallel_config.world_size == 1)
        _add_worker_methods()

    def parse_init_info(self, init_dict: dict[str, Any]) -> SketchInitInfo:
        """Any dictionary: the receiver says what is wrong with it."""
        return SketchInitInfo(init_dict)

    def init_transfer_engine(self, init_info: SketchInitInfo) -> None:
        """Record where the weights of the run that is named go."""
        self.receiver.initialize(init_info.info)

    def start_weight_update(self) -> None:
        """Nothing: weights are changed in place."""

    def parse_update_info(self, update_dict: dict[str, Any]) -> SketchUpdateInfo:
        """Any dictionary: the receiver says what is wrong with it."""
        return SketchUpdateInfo(update_dict.get("id"), str(update_dict.get("body", "")))

    def receive_weights(self, update_info: SketchUpdateInfo, load_weights: Any = None) -> None:
        """Apply one message."""
        self.receiver.receive(update_info.id, update_info.body)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Apply one message, and wait until the device has done it."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Nothing: weights are changed in place."""

    def shutdown(self) -> None:
        """Nothing is held that has to be let go."""


class SketchWorkerExtension:
    """Methods of vLLM's worker for `/collective_rpc`. They read, and change nothing."""

    weight_transfer_engine: SketchWeightTransferEngine
    _weight_update_active: bool

    def sketch_status(self) -> dict[str, Any]:
        """[`Receiver.status`], and whether a weight update was started and not finished."""
        return self.weight_transfer_engine.receiver.status() | {"update_active": self._weight_update_active}

    def sketch_layout(self, run_id: str) -> dict[str, Any]:
        """[`Receiver.layout`]."""
        return self.weight_transfer_engine.receiver.layout(run_id)

    def sketch_checksums(self, run_id: str, names: list[str] | None = None) -> dict[str, Any]:
        """[`Receiver.checksums`]."""
        return self.weight_transfer_engine.receiver.checksums(run_id, names)


def _add_worker_methods() -> None:
    """What `--worker-extension-cls` does, so that the server needs one flag and not two."""
    for name in ("sketch_status", "sketch_layout", "sketch_checksums"):
        setattr(WorkerBase, name, vars(SketchWorkerExtension)[name])
