"""Promises that several strategies make, in the same words."""

from __future__ import annotations

from manyhands.facts import Answer, Promise, Promises

# Why a loop of one's own that cuts the model cannot have workers on several hosts
CUT_ON_ONE_HOST = "workers of your own loop that cut a model must be on one host; mh.fit has them on several"

ENDS = Promise(
    answer=Answer.NO, words="the run ends with an error that names it; resume from the last checkpoint"
)
NO_SERVERS = Promise(answer=Answer.NONE, words="it has no servers")
NOBODY_JOINS = Promise(
    answer=Answer.NO, words="the number of workers is fixed; resume from a checkpoint with another number"
)
TO_ROUNDING = Promise(
    answer=Answer.YES, words="those of one process on the same batches, except for rounding"
)
ROUNDED = Promise(
    answer=Answer.PARTLY,
    words="those of one process that rounds as the codec does; the same in every repetition and on all workers",
)
BY_CHANCE = Promise(answer=Answer.NO, words="they depend on timing; every run differs")
# Of strategies whose workers take every step together, so that all are needed
IN_STEP = Promises(
    worker_dies=ENDS, server_dies=NO_SERVERS, workers_join=NOBODY_JOINS, same_numbers=TO_ROUNDING
)
# Of strategies whose workers take every step together, whoever is there
ELASTIC = Promises(
    worker_dies=Promise(
        answer=Answer.YES,
        words="the others continue from their own memory, at most one step is repeated, and a replacement starts",
    ),
    server_dies=NO_SERVERS,
    workers_join=Promise(
        answer=Answer.YES,
        words="they can be added and removed during the run (mh.start); a new one gets its state from another",
    ),
    same_numbers=TO_ROUNDING,
)
