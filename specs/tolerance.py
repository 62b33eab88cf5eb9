"""Comparing a candidate's outputs with the reference, by tolerances derived from the baseline's own error.

``derived``: with e = |candidate - reference| and b = |baseline - reference|, per output (a row is the last dimension):

    element   e[i]         <= factor * max(b of the row) + floor_element * ulp(reference[i])
    row       |e| in L2    <= factor * |b| in L2 + floor * |ulp(reference)| in L2
    tensor    the same over all rows

The element limit uses the row's largest baseline error because a single element of the baseline may be exact by luck.
"""

from __future__ import annotations

import torch

from kernelmill.specs.data import Frozen
from kernelmill.specs.numerics import ulp
from kernelmill.specs.schema import Spec, Tensors, TensorSpec

ELEMENT_FLOOR = 1.0
"""ulps of the stored dtype that one element may be off beyond the baseline: a sum in another order may round to the
neighbouring value."""


class Comparison(Frozen):
    """One output against its rule. ``*_share``: error as a share of its limit (1.0 is the limit; for ``exact`` 0 or
    infinity). ``index``: the worst element. ``differing``: elements whose bits differ from the rounded reference."""

    output: str
    rule: str
    passed: bool
    element_share: float
    row_share: float
    tensor_share: float
    max_error: float
    relative_l2: float
    index: tuple[int, ...] = ()
    differing: int = 0
    elements: int = 0

    @property
    def share_of_limit(self) -> float:
        return max(self.element_share, self.row_share, self.tensor_share)

    def describe(self) -> str:
        """One line: which tensor, where, by how much."""
        where = f"{self.output}{list(self.index)}"
        if self.rule == "exact":
            return f"{where} differs, {self.differing} of {self.elements} elements are not bit-identical"
        if self.max_error != self.max_error or self.max_error == float("inf"):
            return f"{where} is not finite"
        worst = max(
            ("element", self.element_share), ("row", self.row_share), ("tensor", self.tensor_share), key=lambda s: s[1]
        )
        return (
            f"{where} is off by {self.max_error:.3g}; {worst[0]} error is {worst[1]:.3g} times its limit, "
            f"relative L2 {self.relative_l2:.3g}"
        )


def compare(spec: Spec, reference: Tensors, baseline: Tensors, candidate: Tensors) -> tuple[Comparison, ...]:
    """Every output and state of ``candidate`` (stored dtypes) against ``reference``; see ``Functions.reference``.

    Raises KeyError when an output is missing, ValueError when a shape or dtype is not the spec's."""
    checked = [t for t in spec.tensors if t.rule is not None]
    return tuple(_compare(t, reference[t.name], baseline[t.name], candidate[t.name]) for t in checked)


def _compare(tensor: TensorSpec, reference: torch.Tensor, baseline: torch.Tensor, got: torch.Tensor) -> Comparison:
    assert tensor.rule is not None
    if got.dtype != tensor.dtype.torch or got.shape != reference.shape:
        raise ValueError(f"{tensor.name}: {got.dtype} {tuple(got.shape)} where the spec has {tensor.dtype}")
    if tensor.rule.kind == "exact":
        return _exact(tensor, reference, got)
    return _derived(tensor, reference, baseline, got)


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))


def _exact(tensor: TensorSpec, reference: torch.Tensor, got: torch.Tensor) -> Comparison:
    if reference.dtype != got.dtype:
        raise ValueError(f"{tensor.name}: an exact reference must be stored as {got.dtype}")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    wrong = (got.view(bits) != reference.view(bits)) | (got != got)
    count = int(wrong.sum())
    first = int(wrong.flatten().to(torch.uint8).argmax()) if count else 0
    share = float("inf") if count else 0.0
    error = (got.to(torch.float64) - reference.to(torch.float64)).abs()
    return Comparison(
        output=tensor.name,
        rule="exact",
        passed=count == 0,
        element_share=share,
        row_share=share,
        tensor_share=share,
        max_error=float(error.max()) if error.numel() else 0.0,
        relative_l2=0.0,
        index=_index(first, got.shape) if count else (),
        differing=count,
        elements=got.numel(),
    )


def _derived(tensor: TensorSpec, reference: torch.Tensor, baseline: torch.Tensor, got: torch.Tensor) -> Comparison:
    assert tensor.rule is not None
    factor, floor = tensor.rule.factor, tensor.rule.floor
    columns = reference.shape[-1]
    ref = reference.reshape(-1, columns)
    step = ulp(ref, tensor.dtype.torch)
    error = (got.reshape(-1, columns).to(torch.float64) - ref).abs()
    error = torch.where(torch.isfinite(error), error, torch.inf)
    base = (baseline.reshape(-1, columns).to(torch.float64) - ref).abs()
    element = error / (factor * base.amax(1, keepdim=True) + ELEMENT_FLOOR * step)
    row = error.norm(dim=1) / (factor * base.norm(dim=1) + floor * step.norm(dim=1))
    whole = error.norm() / (factor * base.norm() + floor * step.norm())
    shares = (float(element.max()), float(row.max()), float(whole))
    worst = (
        int(element.argmax())
        if shares[0] >= shares[1]
        else int(row.argmax()) * columns + int(error[row.argmax()].argmax())
    )
    return Comparison(
        output=tensor.name,
        rule="derived",
        passed=all(s <= 1.0 for s in shares),
        element_share=shares[0],
        row_share=shares[1],
        tensor_share=shares[2],
        max_error=float(error.max()),
        relative_l2=float(error.norm() / ref.norm().clamp_min(1e-300)),
        index=_index(worst, reference.shape),
        differing=int((got.to(torch.float64) != reference).sum()),
        elements=got.numel(),
    )
