"""A small model with a `SketchOptimizer`, its gradients, and how its weights move."""

import torch
from torch import nn

from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model


class Net(nn.Module):
    """Three matrices of different shapes; 16 inputs are a power of two, the others are not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 40), nn.Linear(40, 16, bias=False), nn.Linear(16, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def make(dtype: torch.dtype = torch.float32, lr: float = 1e-3, **config) -> tuple[nn.Module, SketchOptimizer]:
    torch.manual_seed(0)
    model = get_sketch_model(Net().to(dtype), SketchConfig(**{"rank": 8} | config))
    return model, SketchOptimizer(model, lr=lr)


def backward(model: nn.Module, batch: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Add the gradient of a random regression, which `batch` fixes."""
    dtype = model.a.weight.dtype
    generator = torch.Generator().manual_seed(batch)
    x, y = torch.randn(32, 24, generator=generator), torch.randn(32, 7, generator=generator)
    loss = ((model(x.to(dtype)) - y.to(dtype)) ** 2).mean() * scale
    loss.backward()
    return loss.detach()


def dense_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradient of `backward(model, 0)` by ordinary autograd, on an untouched copy of the network."""
    plain = Net().to(model.a.weight.dtype)
    plain.load_state_dict(model.state_dict())
    backward(plain)
    return {name: module.weight.grad for name, module in plain.named_children()}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: module.weight.detach().clone() for name, module in model.named_children()}


def movement(model: nn.Module, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: w.double() - before[name].double() for name, w in weights_of(model).items()}


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.double().flatten() for t in tensors.values()])


def sketch_entry(optimizer: SketchOptimizer) -> dict:
    """The optimizer's own part of its state."""
    return optimizer.state_dict()["param_groups"][0]["sketch"]


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a) and set(a) == set(b)
