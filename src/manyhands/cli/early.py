"""What the words of a command tell before it is parsed, so that a mistake is not paid for with an import of torch."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.errors import UserError, nearest
from manyhands.places.place import may_be_started_externally
from manyhands.strategy import Strategy, check_count
from manyhands.workloads.registry import find, names

__all__ = ["check_counts", "check_training", "given_options", "usual_workers"]

_WORKERS = 2
_MOST_USUAL_WORKERS = 64


def given_options(words: Sequence[str]) -> dict[str, str]:
    """The text of each option among `words`, without its dashes; the last one where an option is given twice."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            found[name] = text if equals else following
    return found


def check_counts(words: Sequence[str], names: Sequence[str]) -> None:
    """UserError for an option of these names that is not an integer of at least 1."""
    given = given_options(words)
    for name in names:
        if given.get(name):  # where its text is missing, the parser says so
            try:
                value: object = int(given[name])
            except ValueError:
                value = given[name]
            check_count(name, value)


def check_training(words: Sequence[str]) -> None:
    """UserError for a task that does not exist, and for a strategy that is wrong or cannot have so many workers."""
    task, given = words[0], given_options(words)
    workload = None if task.startswith("-") else find(task)
    if workload is None and not task.startswith("-"):
        raise UserError(f"there is no task {task!r}; {nearest(task, names())}")
    if not given.get("strategy"):
        return
    strategy = Strategy.parse(given["strategy"])
    by_others = "cluster" in given or may_be_started_externally()
    compiled = workload is not None and bool(workload.training)
    if not compiled and not by_others and given.get("device", "cpu") == "cpu":
        workers = given.get("workers")
        strategy.check(int(workers) if workers else usual_workers(strategy), "cpu")


def usual_workers(strategy: Strategy) -> int:
    """Where nobody says how many: two, or the next number that the strategy takes; one where it is one process."""
    if strategy.most_workers is not None:
        return min(_WORKERS, strategy.most_workers)
    for count in range(_WORKERS, _MOST_USUAL_WORKERS + 1):
        try:
            strategy.check(count, "cpu")
        except UserError:
            continue
        return count
    return _WORKERS  # with which the error says what is wrong
