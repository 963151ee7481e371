"""How the columns of a table become numbers: a plain value, which is stored with a model. Pure.

A column of text holds categories: its value is the place of the text among those of training, in alphabetical order.
One rule holds for a text that training did not have: it counts as missing (NaN), in every workload. Trees take the
numbers of categories as they are; for linear models every category is a feature of its own, 1 where a row has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.data.row_files import Rows
from manyhands.errors import DataError


def unnamed(columns: int) -> tuple[str, ...]:
    return tuple(f"Column_{column}" for column in range(columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEncoding:
    """The columns of features, what texts they hold, and the column of labels."""

    names: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # the texts, by the name of the column
    label: str | None = None
    classes: tuple[str, ...] = ()  # the labels, where they are texts: the label is the place among them
    label_index: int = 0  # which column of a table without names had the labels
    is_named: bool = True  # whether columns are found by their names, not by their places

    @property
    def firsts(self) -> NDArray[np.int64]:
        """The first feature of each column, and the number of features at the end: one for each category."""
        widths = [len(self.categories.get(name, "1")) for name in self.names]
        return np.cumsum([0, *widths]).astype(np.int64)

    def sparse(
        self, values: NDArray[Any], labels: NDArray[Any] | None, where: str = "X", begin: int = 0
    ) -> Rows:
        """Rows of encoded values as a linear model takes them; what is missing is left out.

        DataError names the row, the first of which is `begin`, of a number or label that single precision does not
        hold.
        """
        firsts, texts = self.firsts, np.array([name in self.categories for name in self.names])
        is_known = ~np.isnan(values)
        codes = np.where(is_known & texts, values, 0).astype(np.int64)
        with np.errstate(over="ignore"):
            entries = np.where(is_known, np.where(texts, 1.0, values), 0.0).astype(np.float32)
        if np.isinf(entries).any():
            row, column = np.argwhere(np.isinf(entries))[0]
            at = f"row {begin + row + 1}, column {self.names[column]!r}"
            raise DataError(
                f"{where}, {at}: {values[row, column]:g} is beyond single precision; scale the column"
            )
        given = np.zeros(len(values)) if labels is None else labels
        changed = (given.astype(np.float32) != given) & (given == given.round())
        if changed.any():
            row = int(np.argmax(changed))
            raise DataError(
                f"{where}, row {begin + row + 1}: label {given[row]:.17g} is beyond single precision; number the "
                "labels from 0"
            )
        kept = entries != 0
        nothing = np.full(len(values), np.nan, np.float32)
        return Rows(
            starts=np.cumsum([0, *kept.sum(axis=1)]).astype(np.int64),
            indices=(firsts[:-1] + codes)[kept].astype(np.int32),
            values=entries[kept],
            labels=nothing if labels is None else labels.astype(np.float32),
            weights=np.ones(len(values), np.float32),
            size=int(firsts[-1]),
        )

    def values_of(self, given: Sequence[Any], what: str) -> list[Any]:
        """One row of JSON with its texts as numbers; None where one is missing or new. DataError says what is wrong."""
        if len(given) != len(self.names):
            raise DataError(f"{what} has {len(given)} values; the model was trained on {len(self.names)}")
        found: list[Any] = []
        for name, value in zip(self.names, given, strict=True):
            texts = self.categories.get(name)
            if texts is not None and value is not None and not isinstance(value, str):
                raise DataError(
                    f"{what} has {str(value)[:40]!r} in column {name!r}; it must be a text or null"
                )
            if texts is not None and value is not None:
                value = texts.index(value) if value in texts else None
            found.append(value)
        return found

    @property
    def example(self) -> list[Any]:
        """A row as JSON that is easy to type."""
        return [
            next(iter(self.categories[name]), None) if name in self.categories else 1 for name in self.names
        ]

    def to_json(self) -> str:
        parts = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({**parts, "categories": dict(self.categories)}, ensure_ascii=True)

    @staticmethod
    def from_json(text: str) -> TableEncoding:
        """What `to_json` wrote; ValueError says what is wrong with it."""
        given = json.loads(text)
        if not isinstance(given, dict) or set(given) != set(TableEncoding.__slots__):
            raise ValueError("its columns are not described as they should be")
        names, classes = _texts(given["names"]), _texts(given["classes"])
        label, at, is_named = given["label"], given["label_index"], given["is_named"]
        if not isinstance(given["categories"], dict) or not set(given["categories"]) <= set(names):
            raise ValueError("its categories belong to columns that it does not have")
        if not (label is None or isinstance(label, str)) or type(is_named) is not bool or not names:
            raise ValueError("its columns are not described as they should be")
        if type(at) is not int or not 0 <= at <= len(names):
            raise ValueError("the column of its labels is not one of the table")
        return TableEncoding(
            names=names,
            categories={name: _texts(texts) for name, texts in given["categories"].items()},
            label=label,
            classes=classes,
            label_index=at,
            is_named=is_named,
        )


def _texts(given: Any) -> tuple[str, ...]:
    is_list = isinstance(given, list) and all(isinstance(one, str) for one in given)
    if not is_list or len(set(given)) != len(given):
        raise ValueError("its columns, categories or labels are not different texts")
    return tuple(given)
