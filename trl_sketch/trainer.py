"""`SketchGRPOTrainer`: TRL's GRPO, training from gradient sketches."""

import contextlib
import copy
import logging
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import trl.trainer.grpo_trainer as trl_grpo
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from . import distributed
from .baseline import BaselineGRPOTrainer
from .callback import SketchCallback
from .checkpoint import WholeCheckpoints
from .config import SketchConfig
from .model import get_sketch_model, sketch_state
from .optimizer import SketchOptimizer


if TYPE_CHECKING:
    from .sync.trainer_side import SketchVLLMGeneration

logger = logging.getLogger(__name__)

_CITATION = """\
@article{zhang2026logra,
    title   = {{LoGRA: Scaling LLM Reinforcement Learning with Low-Rank Gradient Sketches}},
    author  = {Shaokun Zhang and Yifan Zhang and Jian Hu and Yueying Li and Hao Zhang and Binfeng Xu and Jan Kautz and Yi Dong},
    year    = 2026,
    eprint  = {arXiv:2610.06647},
}
@misc{rgc2026,
    title   = {{RGC: Randomized Gradient Compression}},
    year    = 2026,
}
"""


class SketchGRPOTrainer(WholeCheckpoints, BaselineGRPOTrainer):
    """[`trl.GRPOTrainer`] that trains all attention and MLP weights from low-rank gradient sketches.

    It takes what `trl.GRPOTrainer` takes; `peft_config` is a [`SketchConfig`] (default: `SketchConfig()`).

    What it changes of TRL:
      * `__init__` takes the `SketchConfig` out, lets TRL build everything, then calls [`get_sketch_model`] on the model.
        With `beta > 0` and a model that was passed as an object, the reference model is a copy of that object (TRL
        would load the checkpoint that its config names, which need not have the same weights).
      * With `use_vllm`, generation is by a [`SketchVLLMGeneration`], which follows the optimizer's updates.
      * `create_optimizer` returns a [`SketchOptimizer`].
      * `_save` leaves out the second name of a tied weight, which FSDP2 gathers as a weight of its own.
      * `_save_checkpoint`, `_get_output_dir`, `_push_from_checkpoint`, `_run_epoch` and `_finalize_training` are those of
        [`WholeCheckpoints`]: a folder `checkpoint-N` is whole, and a run resumes, whenever the process is killed.
      * `_save_rng_state` and `_load_optimizer_and_scheduler` take the rollout along where several optimizer steps use one
        (`num_iterations`, `steps_per_generation`). TRL makes a new one on resuming.
      * Between backward and step, a [`SketchCallback`] does the rest.
      * What [`BaselineGRPOTrainer`] changes, if `args` is a [`SketchGRPOConfig`] with `advantage_baseline="running"`.

    Raises:
        TypeError: `peft_config` is a PEFT config.
        ValueError: A setting that gradient sketches do not work with; the message says which and what to do.
    """

    _tag_names = ["trl", "grpo", "trl-sketch"]
    _name = "GRPO from low-rank gradient sketches (trl_sketch)"
    _paper = {
        "title": "LoGRA: Scaling LLM Reinforcement Learning with Low-Rank Gradient Sketches",
        "id": "2610.06647",
        "citation": _CITATION + GRPOTrainer._paper["citation"],
    }

    vllm_generation: "SketchVLLMGeneration"

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: SketchConfig | None = None,
        **kwargs: Any,
    ) -> None:
        _check_arguments(model, args, optimizers, quantization_config, peft_config)
        with _reference_model_is_a_copy_of(model), distributed.fsdp_on_cpu(args), _vllm_in_step(args):
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                **kwargs,
            )
        policy: Any = self.model
        if not _is_sketched(policy):
            get_sketch_model(
                policy,
                peft_config,
                compute_dtype=torch.bfloat16 if self.accelerator.mixed_precision == "bf16" else None,
            )
        state = sketch_state(policy)
        if isinstance(self.optimizer, SketchOptimizer) and self.optimizer.sketches is not state:
            raise ValueError(
                "optimizers[0] is a SketchOptimizer of another model: make it with the model object that is passed to the "
                "trainer, or leave it out"
            )
        if state.config.projection_seed is None:
            state.set_seed(self.args.seed)
        self.add_callback(SketchCallback(self))
        if self.use_vllm:
            self.vllm_generation.attach(state.config, self._save_before_stopping)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """A [`SketchOptimizer`] with the trainer's learning rate, unless one was passed to `__init__`."""
        if self.optimizer is None:
            policy: Any = self.model
            self.optimizer = SketchOptimizer(policy, lr=self.args.learning_rate)
        if self.use_vllm:
            self.vllm_generation.follow(self.optimizer)
        return self.optimizer

    def _save_before_stopping(self) -> str | None:
        """Save a checkpoint, if training has begun; returns its folder."""
        if self.optimizer is None or self.lr_scheduler is None:
            return None
        policy: Any = self.model
        self._save_checkpoint(policy, trial=None)
        return os.path.join(str(self.args.output_dir), f"checkpoint-{self.state.global_step}")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is not None:
            tied = getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", None) or {}
            state_dict = {name: tensor for name, tensor in state_dict.items() if name not in tied}
        super()._save(output_dir, state_dict)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        plan = self._rollout_plan()
        step = self._step % math.prod(plan[-2:])
        if step:
            rollout = {"plan": plan, "step": step, "inputs": self._buffered_inputs}
            torch.save(rollout, self._rollout_file(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self.use_vllm:
            self.vllm_generation.forget()
        self._step, self._buffered_inputs = 0, None
        if os.path.isfile(self._rollout_file(checkpoint)):
            rollout = torch.load(self._rollout_file(checkpoint), map_location=self.args.device)
            if rollout["plan"] == self._rollout_plan():
                self._step, self._buffered_inputs = rollout["step"], rollout["inputs"]

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.use_vllm:
            self.vllm_generation.forget()

    def _rollout_file(self, checkpoint: str) -> str:
        return os.path.join(checkpoint, f"rollout_{self.args.process_index}.pt")

    def _rollout_plan(self) -> list[int]:
        """A rollout goes on only in a run that uses it in the same parts."""
        args: Any = self.args
        return [args.world_size, args.per_device_train_batch_size, args.steps_per_generation, self.num_iterations]


def _is_sketched(model: Any) -> bool:
    try:
        sketch_state(model)
    except ValueError:
        return False
    return True


def _check_arguments(
    model: str | PreTrainedModel,
    args: GRPOConfig | None,
    optimizers: tuple[torch.optim.Optimizer | None, Any],
    quantization_config: Any,
    peft_config: Any,
) -> None:
    if isinstance(peft_config, PeftConfig):
        raise TypeError(
            f"peft_config is a {type(peft_config).__name__}: adapters are trained with trl.GRPOTrainer; "
            "SketchGRPOTrainer takes a trl_sketch.SketchConfig"
        )
    if peft_config is not None and not isinstance(peft_config, SketchConfig):
        raise TypeError(f"peft_config must be a trl_sketch.SketchConfig, got {type(peft_config).__name__}")
    if isinstance(model, PeftModel):
        raise ValueError(
            "the model is a PeftModel: merge its adapter first (model.merge_and_unload()), or train it with trl.GRPOTrainer"
        )
    if not isinstance(model, str) and peft_config is not None and _is_sketched(model):
        raise ValueError(
            "the model already accumulates sketches: leave peft_config out, or pass a model without sketches"
        )
    if quantization_config is not None:
        raise ValueError(
            "quantization_config: an update changes the weights in place, so they cannot be quantized. Leave it out; "
            "bfloat16 weights take two bytes each"
        )
    optimizer = optimizers[0]
    if optimizer is not None and not isinstance(optimizer, SketchOptimizer):
        raise ValueError(
            f"optimizers[0] is a {type(optimizer).__name__}: pass a SketchOptimizer, or None to have one made; a "
            "learning-rate scheduler may be passed alone, as (None, scheduler)"
        )
    if args is None:
        return
    if args.use_vllm:
        config = peft_config or SketchConfig()
        if not isinstance(model, str) and _is_sketched(model):
            config = sketch_state(model).config
        _check_sync(config, args)
    if args.fp16:
        raise ValueError("fp16=True needs loss scaling, which works on dense gradients: use bf16=True")
    if args.deepspeed is not None:
        raise ValueError("deepspeed shards weights in a way that sketches do not support: leave it out")
    if args.optim != type(args).optim:
        logger.warning("optim=%s is not used: the weights are trained by a SketchOptimizer.", args.optim)
    if args.weight_decay:
        logger.warning("weight_decay=%s is not applied: sketched updates have no weight decay.", args.weight_decay)


@contextlib.contextmanager
def _reference_model_is_a_copy_of(model: str | PreTrainedModel) -> Iterator[None]:
    """Within the block, TRL's reference model is a copy of `model`, where that is an object.

    TRL loads it with `create_model_from_path`, by the name in the config of the policy. That is the initial policy only
    where the policy was loaded from there unchanged.
    """
    if isinstance(model, str):
        yield
        return

    def copy_policy(model_id: str, **model_init_kwargs: Any) -> PreTrainedModel:
        return copy.deepcopy(model).eval()

    original = trl_grpo.create_model_from_path
    trl_grpo.create_model_from_path = copy_policy  # type: ignore[assignment]
    try:
        yield
    finally:
        trl_grpo.create_model_from_path = original


@contextlib.contextmanager
def _vllm_in_step(args: GRPOConfig | None) -> Iterator[None]:
    """Within the block, TRL's trainer makes a [`SketchVLLMGeneration`], if it is to generate by vLLM.

    (Imported here, because what talks to vLLM needs packages that are installed with it.)
    """
    if args is None or not args.use_vllm:
        yield
        return
    from .sync.trainer_side import SketchVLLMGeneration

    original = trl_grpo.VLLMGeneration
    trl_grpo.VLLMGeneration = SketchVLLMGeneration  # type: ignore[misc]
    try:
        yield
    finally:
        trl_grpo.VLLMGeneration = original  # type: ignore[misc]


def _check_sync(config: SketchConfig, args: GRPOConfig) -> None:
    """Before vLLM is built, see that `vllm_sync` goes with TRL's settings.

    Raises:
        ValueError: It does not; the message says what to do.
    """
    if config.vllm_sync == "share" and args.vllm_mode == "server":
        raise ValueError("vllm_sync='share' needs vLLM in the trainer's process: set vllm_mode='colocate'")
    if config.vllm_sync == "share" and args.vllm_enable_sleep_mode:
        raise ValueError(
            "vllm_sync='share' keeps one copy of the weights, and vllm_enable_sleep_mode throws vLLM's away (level 2): "
            "set vllm_enable_sleep_mode=False, or vllm_sync='auto'"
        )
