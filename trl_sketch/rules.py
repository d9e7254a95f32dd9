"""From sketches to factors: pure functions on tensors.

`row_adam` acts on a sketch only by one multiplier per row, so it works on the row norms of all matrices at once. In the
shapes below R is the number of rows of all matrices together, M the number of matrices, and `sizes` their row counts.
"""

import torch


BLOCK_ELEMENTS = 2**20  # of a factor, in a temporary


def least(dtype: torch.dtype) -> float:
    """The least number whose square is not lost; what is divided by a root mean square is divided by no less."""
    return torch.finfo(dtype).tiny ** 0.5


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
    restore: bool = True,
) -> torch.Tensor:
    """RowAdam (LoGRA, equations 15 f.): rows with a history of larger gradients move less.

    Args:
        row_mean_square: Mean square of each row of the sketches, `(R,)`.
        second_moment: Running estimate v of it, `(R,)`; updated in place.
        sizes: Rows of each matrix.
        step: t, counted from 1.
        beta2: Decay of the running estimate.
        relative_epsilon: ε as a fraction of the mean of √v̂ over a matrix's rows.
        restore: Leave the norm of each matrix as it was, as LoGRA does. Else a matrix moves less in a step whose gradient
            is small for its history, and more in one where it is large, as with Adam.

    Returns:
        Multiplier of each row, `(R,)`.
    """
    second_moment.mul_(beta2).add_(row_mean_square, alpha=1 - beta2)
    root = (second_moment.double() / (1 - beta2**step)).sqrt_()
    tiny = torch.finfo(torch.float32).tiny
    mean = torch.stack([part.mean() for part in root.split(sizes)])
    # In place, because a vector of float64 for all rows of a model takes tens of megabytes.
    root.add_(per_row(relative_epsilon * mean, sizes)).clamp_min_(least(second_moment.dtype))
    multiplier = root.reciprocal_()
    if not restore:
        return multiplier.to(row_mean_square.dtype)
    row_norm = row_mean_square.to(torch.float64, copy=True).sqrt_()
    before = per_matrix(row_norm, sizes)
    after = per_matrix(row_norm.mul_(multiplier), sizes)
    del row_norm
    ratio = torch.where(after > 0, before / after.clamp_min(tiny), 0)
    return multiplier.mul_(per_row(ratio, sizes)).to(row_mean_square.dtype)


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
    root.add_(relative_epsilon * root.mean()).clamp_min_(least(root.dtype))
    torch.div(first_moment, root, out=sketch).div_(1 - beta1**step)


def flatten_(factor: torch.Tensor, power: float) -> None:
    """Raise the singular values of a factor to a power, in place; its norm and its singular vectors stay.

    U = P diag(σ) Qᵀ becomes P diag(σ^power) Qᵀ times a number: at 1 nothing changes, at 0 all directions are equally strong, as
    in Muon (Jordan et al., 2024, who do it to a momentum of the whole gradient), and between the weak ones gain. Where the
    rows of A are orthogonal, σ are the update's singular values too. No history is needed, so A may be redrawn at every step.
    It costs two products of 2·d·r·min(d, r) operations, the eigendecomposition of a Gram matrix of min(d, r) rows, and no
    memory that grows with d.

    Directions that are weaker than this precision can tell, σ² below min(d, r) · ε of the largest, are enlarged as those at
    that edge.

    Args:
        factor: U, finite, `(d, r)`.
        power: In [0, 1].
    """
    rows, rank = factor.shape
    number = torch.finfo(factor.dtype)
    norm = torch.linalg.vector_norm(factor, dtype=torch.float64)
    # First to a norm of 1, of which the squares neither over- nor underflow.
    factor.mul_(torch.where(norm > 0, 1 / norm, 0.0).clamp_max(number.max))
    squares, directions = torch.linalg.eigh(factor @ factor.T if rows < rank else factor.T @ factor)
    edge = (squares[-1] * len(squares) * number.eps).clamp_min(number.tiny)
    change = directions * squares.clamp_min(edge).pow_((power - 1) / 2) @ directions.T
    if rows < rank:
        factor.copy_(change @ factor)
    else:
        for part in factor.split(max(1, BLOCK_ELEMENTS // rank)):
            part.copy_(part @ change)
    reached = torch.linalg.vector_norm(factor, dtype=torch.float64)
    factor.mul_(torch.where(reached > 0, norm / reached, 0.0))
