"""Which labels a table has, in the order of their classes; and what predictions of them are worth."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import DataError

PAIRS = ((-1.0, 1.0), (0.0, 1.0), (1.0, 2.0))
"""No and yes, in the ways that files write them."""
MOST_CLASSES = 1000
_SHOWN = 5


class Labels(tuple[float | str, ...]):
    """The label of each class, numbers or names in ascending order; of two, no and yes."""

    __slots__ = ()

    def __new__(cls, *values: float | str) -> Self:
        return super().__new__(cls, values)

    def __getnewargs__(self) -> tuple[float | str, ...]:  # as `__new__` takes them
        return tuple(self)

    @property
    def no(self) -> float | str:
        return self[0]

    @property
    def yes(self) -> float | str:
        return self[1]

    @property
    def outputs(self) -> int:
        """How many scores a model of them has: one says all of two."""
        return len(self) if len(self) > 2 else 1

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(_shown, self))

    @property
    def listed(self) -> str:
        """The first of them in words."""
        return ", ".join(self.names[:_SHOWN]) + ", …" * (len(self) > _SHOWN)

    def __str__(self) -> str:
        """As a model file has them: a pair of numbers between blanks, others as JSON."""
        if tuple(self) in PAIRS:
            return " ".join(map(_shown, self))
        return json.dumps([int(one) if isinstance(one, float) else one for one in self])

    @classmethod
    def parse(cls, text: str) -> Self:
        """What `str` gave; ValueError where it did not."""
        pairs = {str(cls(*pair)): list(pair) for pair in PAIRS}
        try:
            found: Any = pairs[text] if text in pairs else json.loads(text)
        except (ValueError, RecursionError):
            found = None
        given = found if isinstance(found, list) else []
        values = [float(one) if type(one) is int and abs(one) < 1e300 else one for one in given]
        is_good = all(isinstance(one, str) for one in values) or all(
            isinstance(one, float) and one.is_integer() for one in values
        )
        if not is_good or not 2 <= len(values) <= MOST_CLASSES or len(set(values)) != len(values):
            raise ValueError(f"its labels are {text[:40]!r}")
        return cls(*values)

    def targets(
        self, labels: NDArray[Any], where: str, *, first: int = 0, names: Sequence[str] | None = None
    ) -> NDArray[np.float32]:
        """The class of each label, from 0; DataError names the row of one that is of none, `first` the first one's.

        Where labels are numbers of `names`, those are looked up.
        """
        found = np.full(len(labels), -1, np.float32)
        wanted = {name: at for at, name in enumerate(names)} if names is not None else None
        for at, value in enumerate(self):
            number = wanted.get(str(value)) if wanted is not None else value
            if isinstance(number, int | float):
                found[labels == number] = at
        if (found < 0).any():
            at = int(np.argmin(found))
            given = labels[at]
            shown = "no label" if np.isnan(given) else f"label {_of(given, names)}, which is new"
            raise DataError(f"{where}: row {first + at + 1} has {shown}; labels are {self.listed}")
        return found

    @property
    def are_named(self) -> bool:
        """Whether a prediction says which label it means: of several, and of two names."""
        return len(self) > 2 or (len(self) == 2 and isinstance(self.yes, str))

    def answers(self, chances: NDArray[np.float64]) -> list[dict[str, Any]]:
        """What a predictor says of rows whose probabilities of all classes, or of the second of two, these are."""
        chances = self._of_each(chances)
        return [
            {"label": self[at], "probabilities": dict(zip(self.names, row, strict=True))}
            for at, row in zip(chances.argmax(axis=1).tolist(), chances.tolist(), strict=True)
        ]

    def lines(self, chances: NDArray[np.float64], digits: int) -> Iterator[str]:
        """The same as text, between tabs: the label, and the probabilities in the order of the classes."""
        chances = self._of_each(chances)
        best = chances.argmax(axis=1).tolist()
        for at, row in zip(best, chances.tolist(), strict=True):
            yield "\t".join((self.names[at], *(f"{chance:.{digits}g}" for chance in row)))

    def _of_each(self, chances: NDArray[np.float64]) -> NDArray[np.float64]:
        return chances if chances.ndim == 2 else np.stack([1.0 - chances, chances], axis=1)


NO_LABELS = Labels()


def labels_of(seen: NDArray[Any], where: str, names: Sequence[str] | None = None) -> Labels:
    """The labels of a table from the values that it has; DataError for one alone, too many, or parts of numbers."""
    values = np.unique(np.asarray(seen, np.float64)).tolist()
    if names is not None:
        found = Labels(*sorted(names[int(value)] for value in values))
    else:
        fitting = [pair for pair in PAIRS if set(values) <= set(pair)]
        found = Labels(*(fitting[0] if len(fitting) == 1 else values))
        wrong = next((value for value in values if not float(value).is_integer()), None)
        if wrong is not None:
            raise DataError(f"{where} has label {_of(wrong)}; classes are integers or names")
    if len(found) < 2:
        raise DataError(f"{where}: all rows have label {found.names[0]}; a classifier needs two labels")
    if len(found) > MOST_CLASSES:
        raise DataError(f"{where} has {len(found):,} labels; a classifier has at most {MOST_CLASSES:,}")
    return found


def _of(value: float, names: Sequence[str] | None = None) -> str:
    return "none" if np.isnan(value) else _shown(float(value) if names is None else names[int(value)])


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if value.is_integer() else f"{value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Means over `examples`, each counted with its weight; `auc` is None unless there are two labels."""

    examples: int
    accuracy: float
    auc: float | None
    log_loss: float
    confusion: tuple[tuple[int, ...], ...]
    """How many examples of each label were predicted to be of each, in the order of classes; weights do not count."""

    @property
    def figures(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy, "auc": self.auc, "log_loss": self.log_loss}

    def quality(self, measured_on: str, labels: Labels) -> dict[str, Any]:
        """What the page of a run shows of a model that was measured on this."""
        scores = dict(zip(("accuracy", "AUC", "log loss"), self.figures.values(), strict=True))
        return {
            "measured_on": f"{self.examples:,} {measured_on}",
            "scores": {name: one for name, one in scores.items() if one is not None},
            "labels": list(labels.names),
            "confusion": self.confusion,
        }


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities of classes, a column each."""
    sizes: NDArray[np.float64] = np.exp(scores - scores.max(axis=1, keepdims=True))
    sizes /= sizes.sum(axis=1, keepdims=True)
    return sizes


def measure(
    margins: NDArray[np.float64], targets: NDArray[Any], weights: NDArray[Any] | None = None
) -> Metrics:
    """Compare margins (probability 1 / (1 + exp(-margin))) with targets of 0 and 1, at least one.

    Or scores, a column for each class, with the numbers of classes.
    """
    counted = np.ones(len(margins)) if weights is None else weights.astype(np.float64)
    if margins.ndim == 2:
        scores, classes, area = margins, margins.shape[1], None
    else:
        scores, classes = np.column_stack([np.zeros(len(margins)), margins]), 2
        area = _area(margins, targets > 0, counted)
    own, said = targets.astype(np.int64), scores.argmax(axis=1)  # of equal ones the first
    losses = np.logaddexp.reduce(scores - scores[np.arange(len(own)), own][:, None], axis=1)
    table = np.bincount(own * classes + said, minlength=classes * classes).reshape(classes, classes)
    return Metrics(
        examples=len(margins),
        accuracy=float(np.average(said == own, weights=counted)),
        auc=area,
        log_loss=float(np.average(losses, weights=counted)),
        confusion=tuple(map(tuple, table.tolist())),
    )


def _area(
    margins: NDArray[np.float64], is_yes: NDArray[np.bool_], counted: NDArray[np.float64]
) -> float | None:
    """The chance that a yes has a larger margin than a no, a tie being half of one (Mann and Whitney)."""
    _, group = np.unique(margins, return_inverse=True)
    yes, no = np.bincount(group, counted * is_yes), np.bincount(group, counted * ~is_yes)
    pairs = yes.sum() * no.sum()
    return float((yes * (np.cumsum(no) - no / 2)).sum() / pairs) if pairs else None
