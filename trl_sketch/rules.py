"""From sketches to factors: pure functions on tensors.

`row_adam` acts on a sketch only by one multiplier per row, so it works on the row norms of all matrices at once. In the
shapes below R is the number of rows of all matrices together, M the number of matrices, and `sizes` their row counts.
"""

import torch


def per_matrix(rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Norms of the matrices `(M,)` from the norms of their rows `(R,)`, in float64."""
    return torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in rows.split(sizes)])


def per_row(matrices: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Spread a value per matrix `(M,)` to its rows `(R,)`."""
    return matrices.repeat_interleave(torch.tensor(sizes, device=matrices.device), output_size=sum(sizes))


def row_adam(
    row_mean_square: torch.Tensor,
    second_moment: torch.Tensor,
    sizes: list[int],
    *,
    step: int,
    beta2: float,
    relative_epsilon: float,
) -> torch.Tensor:
    """RowAdam (LoGRA, equation 15): rows with a history of larger gradients move less.

    Args:
        row_mean_square: Mean square of each row of the normalized sketches, `(R,)`.
        second_moment: Running estimate v of it, `(R,)`; updated in place.
        sizes: Rows of each matrix.
        step: t, counted from 1.
        beta2: Decay of the running estimate.
        relative_epsilon: ε as a fraction of the mean of √v̂ over a matrix's rows.

    Returns:
        Multiplier of each row, `(R,)`, which leaves the norm of each matrix as it was.
    """
    second_moment.mul_(beta2).add_(row_mean_square, alpha=1 - beta2)
    root = (second_moment.double() / (1 - beta2**step)).sqrt_()
    tiny = torch.finfo(torch.float32).tiny
    mean = torch.stack([part.mean() for part in root.split(sizes)])
    # In place, because a vector of float64 for all rows of a model takes tens of megabytes.
    multiplier = root.add_(per_row((relative_epsilon * mean).clamp_min(tiny), sizes)).reciprocal_()
    row_norm = row_mean_square.to(torch.float64, copy=True).sqrt_()
    before = per_matrix(row_norm, sizes)
    after = per_matrix(row_norm.mul_(multiplier), sizes)
    del row_norm
    restore = torch.where(after > 0, before / after.clamp_min(tiny), 0)
    return multiplier.mul_(per_row(restore, sizes)).to(row_mean_square.dtype)


def adam_(
    sketch: torch.Tensor,
    first_moment: torch.Tensor,
    second_moment: torch.Tensor,
    *,
    step: int,
    beta1: float,
    beta2: float,
    relative_epsilon: float,
) -> None:
    """Adam on the entries of one sketch `(d, r)`, in place; for a projection that is never redrawn.

    Args:
        sketch: S, normalized; becomes the factor U.
        first_moment: `(d, r)`; updated in place.
        second_moment: `(d, r)`; updated in place.
        step: t, counted from 1.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        relative_epsilon: ε as a fraction of the mean of √v̂ over the matrix.
    """
    first_moment.lerp_(sketch, 1 - beta1)
    second_moment.mul_(beta2).addcmul_(sketch, sketch, value=1 - beta2)
    root = (second_moment / (1 - beta2**step)).sqrt_()
    root += (relative_epsilon * root.mean()).clamp_min(torch.finfo(torch.float32).tiny)
    torch.div(first_moment, root, out=sketch).div_(1 - beta1**step)
