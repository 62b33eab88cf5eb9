"""Comparing a candidate's outputs with the reference, by tolerances derived from the baseline's own error.

``derived``: with e = |candidate - reference|, b = |baseline - reference|, u = ulp(reference) in the stored dtype, and a
row being the last dimension,

    noise    =  rule.noise * the row's largest |reference|  +  8 * the row's largest  b - u / 2
    element  e  <=  element_floor * u + noise
    row      rms(e / (u + noise))  <=  factor * rms(b / (u + noise)) + floor
    tensor   the same over all rows

The row and tensor limits bound the arithmetic: rounding to storage alone gives the baseline's error, in whatever order
the sums are taken. Errors count in ulps, so that a few large elements do not hide what the others are. The element
limit finds a single wrong value among thousands of right ones, which no L2 norm does: one that rounds to the neighbour
of the right value is off by less than one ulp. Noise is the float32 error before that rounding, felt where values
cancel: what the baseline is off beyond half an ulp, and the error of a long sum, which it may lack by luck.
"""

from __future__ import annotations

import torch

from kernelmill.specs.data import Frozen
from kernelmill.specs.numerics import ulp
from kernelmill.specs.schema import OutputRule, Spec, Tensors, TensorSpec

APPROXIMATE = 8.0
"""Noise of approximate instructions over the baseline's: ex2, rsqrt and rcp are good to 2^-22 or better (PTX ISA),
float32 rounding to 2^-24; twice that for the order of sums."""

SMALLEST = 2.0**-96
"""Magnitude below which ulps no longer shrink: float32 steps on the way, such as exp(-x) beyond 88, have overflowed or
become subnormal well before the result does."""


class Comparison(Frozen):
    """One output against its rule. ``*_share``: error as a share of its limit (1.0 is the limit; for ``exact`` 0 or
    infinity). ``index``: the worst element, for ``exact`` the first wrong one. ``differing``: elements whose bits are
    not those of the reference rounded to storage."""

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
            if self.passed:
                return f"{self.output} is bit-identical"
            return f"{where} differs, {self.differing} of {self.elements} elements are not bit-identical"
        if self.max_error == float("inf"):
            return f"{where} is not finite"
        norm, share = max(
            ("element", self.element_share), ("row", self.row_share), ("tensor", self.tensor_share), key=lambda s: s[1]
        )
        return (
            f"{where}: {norm} error is {share:.3g} times its limit; "
            f"largest error {self.max_error:.3g}, relative L2 {self.relative_l2:.3g}"
        )


def compare(spec: Spec, reference: Tensors, baseline: Tensors, candidate: Tensors) -> tuple[Comparison, ...]:
    """Every output and state of ``candidate`` (stored dtypes) against ``reference``; see ``Functions.reference``.

    Raises KeyError when an output is missing, ValueError when a shape or dtype is not the spec's."""
    checked = [t for t in spec.tensors if t.rule is not None]
    return tuple(_compare(t, reference[t.name], baseline[t.name], candidate[t.name]) for t in checked)


def _compare(tensor: TensorSpec, reference: torch.Tensor, baseline: torch.Tensor, got: torch.Tensor) -> Comparison:
    if got.dtype != tensor.dtype.torch or got.shape != reference.shape:
        raise ValueError(
            f"{tensor.name} is {got.dtype} {tuple(got.shape)}, the spec says "
            f"{tensor.dtype.torch} {tuple(reference.shape)}"
        )
    assert tensor.rule is not None
    if tensor.rule.kind == "exact":
        return _exact(tensor.name, reference, got)
    return _derived(tensor, tensor.rule, reference, baseline, got)


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))


def _exact(name: str, reference: torch.Tensor, got: torch.Tensor) -> Comparison:
    if reference.dtype != got.dtype:
        raise ValueError(f"{name}: an exact reference must be stored as {got.dtype}, it is {reference.dtype}")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    wrong = got.contiguous().view(bits) != reference.contiguous().view(bits)
    count = int(wrong.sum())
    share = float("inf") if count else 0.0
    errors = (got[wrong].to(torch.float64) - reference[wrong].to(torch.float64)).abs()
    return Comparison(
        output=name,
        rule="exact",
        passed=count == 0,
        element_share=share,
        row_share=share,
        tensor_share=share,
        max_error=float(errors.nan_to_num(nan=torch.inf, posinf=torch.inf).max()) if count else 0.0,
        relative_l2=0.0,
        index=_index(int(wrong.flatten().to(torch.uint8).argmax()), got.shape) if count else (),
        differing=count,
        elements=got.numel(),
    )


def _derived(
    tensor: TensorSpec, rule: OutputRule, reference: torch.Tensor, baseline: torch.Tensor, got: torch.Tensor
) -> Comparison:
    columns = reference.shape[-1]
    ref = reference.reshape(-1, columns)
    step = ulp(ref.abs().clamp_min(SMALLEST), tensor.dtype.torch)
    values = got.reshape(-1, columns).to(torch.float64)
    error = torch.where(torch.isfinite(values), (values - ref).abs(), torch.inf)
    base = (baseline.reshape(-1, columns).to(torch.float64) - ref).abs()

    noise = rule.noise * ref.abs().amax(1, keepdim=True) + APPROXIMATE * (base - step / 2).clamp_min(0).amax(
        1, keepdim=True
    )
    element = error / (rule.element_floor * step + noise)
    off, base_off = (error / (step + noise)).square(), (base / (step + noise)).square()
    row = off.mean(1).sqrt() / (rule.factor * base_off.mean(1).sqrt() + rule.floor)
    whole = float(off.mean().sqrt() / (rule.factor * base_off.mean().sqrt() + rule.floor))

    worst = int(element.argmax())
    if row.max() > element.max():
        r = int(row.argmax())
        worst = r * columns + int(element[r].argmax())
    return Comparison(
        output=tensor.name,
        rule="derived",
        passed=bool(element.max() <= 1 and row.max() <= 1 and whole <= 1),
        element_share=float(element.max()),
        row_share=float(row.max()),
        tensor_share=whole,
        max_error=float(error.max()),
        relative_l2=float(error.norm() / ref.norm().clamp_min(SMALLEST)),
        index=_index(worst, reference.shape),
        differing=int((values != ref.to(tensor.dtype.torch).to(torch.float64)).sum()),
        elements=got.numel(),
    )
