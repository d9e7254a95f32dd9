"""What generates the answers of an evaluation: transformers in this process, or vLLM."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .evaluation import Answer, Engine, EvalSettings


_STRIDE = 1_000_003  # between the seeds of neighbouring values of --seed; more than there are answers to a data set


def choose_backend(settings: EvalSettings) -> str:
    """`vllm` where it is installed, there is a GPU, and the model is no adapter; else `transformers`."""
    if settings.backend != "auto":
        return settings.backend
    suits = importlib.util.find_spec("vllm") and torch.cuda.is_available() and not is_adapter(settings.model)
    return "vllm" if suits else "transformers"


def is_adapter(model: str) -> bool:
    """Whether a model's folder has a PEFT adapter instead of weights."""
    return (Path(model) / "adapter_config.json").is_file()


def make_engine(settings: EvalSettings, longest: int) -> Engine:
    """The backend's engine; `longest` is the number of tokens of the longest prompt.

    Raises:
        ValueError: vLLM is not there, or does not take the model.
    """
    return (VllmEngine if settings.backend == "vllm" else TransformersEngine)(settings, longest)


class TransformersEngine:
    """`generate` of transformers, on the GPU if there is one. A batch is `batch_size` problems, all samples of each at once."""

    def __init__(self, settings: EvalSettings, longest: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        if settings.tensor_parallel_size > 1:
            raise ValueError(f"--tensor_parallel_size {settings.tensor_parallel_size} needs --backend vllm")
        self.settings = settings
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
        dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype)
        self.device = torch.accelerator.current_accelerator() or torch.device("cpu")
        self.model = model.to(self.device).eval()
        _check_length(settings, longest, self.model.config)
        ends = self.model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        self.ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self.padding = next(own for own in (tokenizer.pad_token_id, *sorted(self.ends), 0) if own is not None)
        sampling: dict[str, Any] = {"do_sample": False}
        if settings.temperature:
            sampling = {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}
        self.model.generation_config = GenerationConfig(  # in the place of the model's own, which may have a top_k
            max_new_tokens=settings.max_new_tokens,
            num_return_sequences=settings.samples,
            eos_token_id=sorted(self.ends) or None,
            pad_token_id=self.padding,
            **sampling,
        )

    @torch.no_grad()
    def generate(self, prompts: Sequence[list[int]], first: int) -> list[list[Answer]]:
        width = max(map(len, prompts))
        tokens = torch.tensor([[self.padding] * (width - len(own)) + own for own in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(own)) + [1] * len(own) for own in prompts], device=self.device)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.settings.seed * _STRIDE + first)
            generated = self.model.generate(input_ids=tokens, attention_mask=mask)[:, width:].tolist()
        answers = [self._answer(own) for own in generated]
        samples = self.settings.samples
        return [answers[i : i + samples] for i in range(0, len(answers), samples)]

    def _answer(self, tokens: list[int]) -> Answer:
        end = next((place for place, token in enumerate(tokens) if token in self.ends), None)
        return Answer(tokens, True) if end is None else Answer(tokens[: end + 1], False)


class VllmEngine:
    """vLLM. Every answer has a seed of its own, so it does not depend on the batch."""

    def __init__(self, settings: EvalSettings, longest: int) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "--backend vllm: vLLM is not installed. pip install 'trl-sketch[vllm]', or --backend transformers"
            )
        if is_adapter(settings.model):
            base = json.loads((Path(settings.model) / "adapter_config.json").read_text())["base_model_name_or_path"]
            raise ValueError(
                f"--backend vllm: {settings.model} is an adapter of {base}. Merge it (PEFT's merge_and_unload), or take --backend "
                "transformers"
            )
        from transformers import AutoConfig
        from vllm import LLM

        self.settings = settings
        _check_length(settings, longest, AutoConfig.from_pretrained(settings.model))
        dtype: Any = settings.dtype  # vLLM names the strings that it takes
        self.llm: Any = LLM(
            settings.model,
            dtype=dtype,
            max_model_len=longest + settings.max_new_tokens,
            tensor_parallel_size=settings.tensor_parallel_size,
            enforce_eager=not torch.cuda.is_available(),  # compiling takes minutes on a CPU
        )

    def generate(self, prompts: Sequence[list[int]], first: int) -> list[list[Answer]]:
        from vllm import SamplingParams

        own = self.settings
        sampling = [
            SamplingParams(
                n=own.samples,
                temperature=own.temperature,
                top_p=own.top_p if own.temperature else 1.0,
                max_tokens=own.max_new_tokens,
                seed=own.seed * _STRIDE + index * own.samples,  # vLLM counts on from here for the other samples
                detokenize=False,
            )
            for index in range(first, first + len(prompts))
        ]
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [[Answer([*o.token_ids], o.finish_reason == "length") for o in output.outputs] for output in outputs]


def _check_length(settings: EvalSettings, longest: int, config: Any) -> None:
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is not None and longest + settings.max_new_tokens > most:
        raise ValueError(
            f"--max_new_tokens {settings.max_new_tokens}: the longest prompt has {longest} tokens, and {settings.model} has room for "
            f"{most}. At most {most - longest} can be generated"
        )
