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
    multiplier = root.add_(per_row((relative_epsilon * mean).clamp_min(tiny), sizes)).reciprocal_()
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
    root += (relative_epsilon * root.mean()).clamp_min(torch.finfo(torch.float32).tiny)
    torch.div(first_moment, root, out=sketch).div_(1 - beta1**step)


def flatten_(sketch: torch.Tensor, power: float) -> None:
    """Raise the singular values of a factor to a power, in place; its norm and its singular vectors stay.

    U = P diag(σ) Qᵀ becomes P diag(σ^power) Qᵀ times a number. 1 changes nothing, 0 makes all directions equally strong as
    Muon does, and between them the weak ones gain. It needs no history, so it works for a projection that is redrawn.
    It costs four products of the size of (UᵀU) and one eigendecomposition of min(d, r)². Directions of which floating-point
    numbers of this precision know nothing, σ² below min(d, r) · ε of the largest, are enlarged as if they were at that edge.

    Args:
        sketch: U, finite, `(d, r)`.
        power: In [0, 1].
    """
    norm = torch.linalg.vector_norm(sketch, dtype=torch.float64)
    wide = sketch.shape[0] < sketch.shape[1]
    unit = sketch * torch.where(norm > 0, 1 / norm, 0.0).to(sketch.dtype)  # its squares neither over- nor underflow
    squares, directions = torch.linalg.eigh(unit @ unit.T if wide else unit.T @ unit)
    known, tiny = len(squares) * torch.finfo(sketch.dtype).eps, torch.finfo(sketch.dtype).tiny
    gain = squares.clamp_min((squares[-1] * known).clamp_min(tiny)).pow_((power - 1) / 2)
    change = (directions * gain) @ directions.T
    flat = change @ unit if wide else unit @ change
    reached = torch.linalg.vector_norm(flat, dtype=torch.float64)
    torch.mul(flat, torch.where(reached > 0, norm / reached, 0.0).to(sketch.dtype), out=sketch)
