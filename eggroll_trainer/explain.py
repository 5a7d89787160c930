"""`Report`: how a model is perturbed and evaluated, as a table that people can act on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import ESTrainer


@dataclass(frozen=True)
class Row:
    """One parameter.

    Attributes:
        name: Its name in the model.
        shape: Its shape.
        treatment: `low-rank r`, `full`, `frozen`; and why, or that it is `unused`.
        noise: Numbers drawn for one direction.
        lazy: Operations that used it without forming a member's weight.
        dense: Operations for which each member's weight was formed.
    """

    name: str
    shape: tuple[int, ...]
    treatment: str
    noise: int
    lazy: tuple[str, ...]
    dense: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What `trainer.explain()` found; prints as a table.

    Attributes:
        rows: The parameters of the model.
        evaluator: `vmap` or `sequential`.
        reason: Why `auto` fell back, or None.
        looped: Operations that torch does for one member after another.
        chunk_size: Members in one batched pass, or None.
        noise_bytes: Bytes of a generation's noise.
        cost: Multiplications for one row of inputs of one member, over those of inference.
    """

    rows: tuple[Row, ...]
    evaluator: str
    reason: str | None
    looped: tuple[str, ...]
    chunk_size: int | None
    noise_bytes: int
    cost: float

    def __str__(self) -> str:
        table = [("parameter", "shape", "treatment", "noise", "operations")]
        for row in self.rows:
            operations = ", ".join([*row.lazy, *(f"{name} (dense)" for name in row.dense)])
            shape = "×".join(map(str, row.shape)) or "scalar"
            table.append((row.name, shape, row.treatment, f"{row.noise:,}", operations or "–"))
        widths = [max(len(line[i]) for line in table) for i in range(4)]
        lines = []
        for name, shape, treatment, noise, operations in table:
            cells = (name.ljust(widths[0]), shape.rjust(widths[1]), treatment.ljust(widths[2]))
            lines.append("  ".join((*cells, noise.rjust(widths[3]), operations)).rstrip())
        lines.insert(1, "─" * max(map(len, lines)))
        chunk = f", {self.chunk_size:,} members at once" if self.chunk_size else ""
        lines += [
            "",
            f"evaluation: {self.evaluator}{chunk}; {self.noise_bytes / 2**20:,.1f} MiB of noise a "
            f"generation; {self.cost:.2f} × the multiplications of inference",
        ]
        if self.reason:
            lines.append(f"one after another because: {self.reason}")
        if self.looped:
            lines.append(
                f"{', '.join(self.looped)}: torch has no batched form and does one member after "
                "another"
            )
        if any(row.dense for row in self.rows):
            lines.append(
                "(dense): the operation has no low-rank form, so each member's weight is formed"
            )
        if any("unused" in row.treatment for row in self.rows):
            lines.append(
                "unused: perturbed, but no operation saw it, so its update is pure noise: leave it "
                "out of params, or use it"
            )
        return "\n".join(lines)

    __repr__ = __str__


def make_report(trainer: ESTrainer) -> Report:
    """Look at what the evaluator has seen, running the fitness once if it has seen nothing."""
    population = trainer.ask()
    trace = trainer.evaluator.trace
    if trace is not None and not trace.used and trainer.evaluator.reason is None:
        trainer.evaluate(population)
    noise = {p.name: p for p in trainer.parameter_noise()}
    rows, inference, cost = [], 0, 0
    for name, parameter in trainer.model.named_parameters():
        own = noise.get(name)
        numbers = 0 if own is None else parameter.numel()
        treatment = "frozen" if own is None else f"full{own.note}"
        lazy: tuple[str, ...] = ()
        dense: tuple[str, ...] = ()
        if own is not None and own.rank is not None:
            treatment, numbers = f"low-rank {own.rank}", own.rank * sum(own.matrix_shape)
        if trace is not None and trace.used:
            lazy = tuple(sorted(op for label, op in trace.lazy if label == name))
            dense = tuple(sorted(op for label, op in trace.dense if label == name))
            if own is not None and name not in trace.used:
                treatment += ", unused"
        if parameter.dim() > 1:
            inference += parameter.numel()
            cost += parameter.numel()
            if own is not None and own.rank is not None:
                cost += own.rank * parameter.numel() if dense else numbers
        rows.append(Row(name, tuple(parameter.shape), treatment, numbers, lazy, dense))
    return Report(
        tuple(rows),
        trainer.evaluator.name,
        trainer.evaluator.reason,
        () if trace is None else tuple(sorted(trace.looped)),
        trainer.evaluator.chunk_size,
        population.perturbations.nbytes,
        cost / max(1, inference),
    )
