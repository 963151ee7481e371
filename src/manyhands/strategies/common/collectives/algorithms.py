"""The all-reduce algorithms, one function each: (rank, world) to the table of that rank's steps.

To add one: write its function, have it `registered`, and give it a row of expected costs in the tests. Nothing else
knows the algorithms by name. `docs/allreduce.md` shows each at work on four workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from math import isqrt

from manyhands.errors import check_count
from manyhands.strategies.common.collectives.schedule import (
    Algorithm,
    How,
    Receive,
    Schedule,
    Send,
    Step,
    Table,
    chunk_bounds,
)

ALGORITHMS: dict[str, Algorithm] = {}
_WHOLE = range(1)
_PAIRWISE = "Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005)"


def registered(chunks: Callable[[int], int], source: str) -> Callable[[Schedule], Schedule]:
    """Offer a schedule under its name; the first sentence of its docstring describes it to users."""

    def register(schedule: Schedule) -> Schedule:
        name, first = (
            schedule.__name__.replace("_", "-"),
            (schedule.__doc__ or "").partition(".\n")[0].strip(" .\n"),
        )
        ALGORITHMS[name] = Algorithm(
            name=name,
            schedule=schedule,
            chunks=chunks,
            description=first[:1].lower() + first[1:],
            source=source,
            rotates=chunks is _one_each,
        )
        return schedule

    return register


def _single(_world: int) -> int:
    return 1


def _one_each(world: int) -> int:
    return world


def _lower_power(world: int) -> int:
    return 1 << (world.bit_length() - 1)


@registered(_one_each, "two-shot all-reduce; 'all pairs' in MSCCLang, Cowan et al., ASPLOS 2023")
def direct(rank: int, world: int) -> Table:
    """Chunk j of everyone goes to rank j, is summed in rank order and goes to all."""
    if world == 1:
        return ()
    mine, ahead, behind = _one(rank), _ahead(rank, world), _behind(rank, world)
    scatter = _step([(p, _one(p)) for p in ahead], [(p, mine) for p in behind], How.KEEP, (mine,))
    gather = _step([(p, mine) for p in ahead], [(p, _one(p)) for p in behind], How.COPY)
    return (scatter, gather)


@registered(_one_each, "Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009)")
def ring(rank: int, world: int) -> Table:
    """Chunks travel around a ring twice, first gathering their sum, then spreading it.

    In round k a rank passes on chunk (rank - k): the partial sum it has just added to, later the finished one.
    """
    right, left = (rank + 1) % world, (rank - 1) % world
    hows = [How.ADD] * (world - 1) + [How.COPY] * (world - 1)
    return tuple(
        _swap(right, _one((rank - k) % world), left, _one((rank - k - 1) % world), how)
        for k, how in enumerate(hows)
    )


@registered(_one_each, f"pairwise exchange: {_PAIRWISE}")
def round_robin(rank: int, world: int) -> Table:
    """As direct with one peer a round: in round k rank i sends to i + k, hears from i - k.

    "Round-robin" means several things in the literature; this is what it means here. A chunk is added the moment it
    arrives, so chunk j is summed in the order j, j - 1, j - 2, ... mod P.
    """
    mine, pairs = _one(rank), list(zip(_ahead(rank, world), _behind(rank, world), strict=True))
    scatter = (_swap(ahead, _one(ahead), behind, mine, How.ADD) for ahead, behind in pairs)
    gather = (_swap(ahead, mine, behind, _one(behind), How.COPY) for ahead, behind in pairs)
    return (*scatter, *gather)


@registered(_lower_power, "halving and doubling: Rabenseifner, ICCS 2004")
def butterfly(rank: int, world: int) -> Table:
    """Partners swap halves, quarters, ... and add, then swap results back the same way.

    At distance d each partner is left with the aligned block of d chunks around its own number.
    """

    def block(owner: int, length: int) -> range:
        begin = owner - owner % length
        return range(begin, begin + length)

    def exchanges(rank: int, power: int) -> Table:
        peers = [(rank ^ 1 << level, 1 << level) for level in range(power.bit_length() - 1)]
        halve = (_swap(peer, block(peer, d), peer, block(rank, d), How.ADD) for peer, d in reversed(peers))
        double = (_swap(peer, block(rank, d), peer, block(peer, d), How.COPY) for peer, d in peers)
        return (*halve, *double)

    return _with_guests(rank, world, exchanges, range(_lower_power(world)))


@registered(_single, f"recursive doubling: {_PAIRWISE}")
def doubling(rank: int, world: int) -> Table:
    """Partners at distance 1, 2, 4, ... swap and add whole vectors."""

    def exchanges(rank: int, power: int) -> Table:
        peers = (rank ^ 1 << level for level in range(power.bit_length() - 1))
        return tuple(_swap(peer, _WHOLE, peer, _WHOLE, How.ADD) for peer in peers)

    return _with_guests(rank, world, exchanges, _WHOLE)


@registered(_single, f"binomial tree: {_PAIRWISE}")
def tree(rank: int, world: int) -> Table:
    """Sums climb a binomial tree to rank 0 and the result comes down again."""
    climb = []
    for level in range((world - 1).bit_length()):
        distance = 1 << level
        if rank % (2 * distance) == distance:
            climb.append(_step([(rank - distance, _WHOLE)], [], How.ADD))
        elif rank % (2 * distance) == 0 and rank + distance < world:
            climb.append(_step([], [(rank + distance, _WHOLE)], How.ADD))
        else:
            climb.append(Step())
    return (*climb, *broadcast(rank, world))


def broadcast(rank: int, world: int, root: int = 0) -> Table:
    """The root's whole vector to everyone, down a binomial tree: half of `tree`, useful by itself."""
    place = (rank - root) % world
    steps = []
    for level in reversed(range((world - 1).bit_length())):
        distance = 1 << level
        if place % (2 * distance) == distance:
            steps.append(_step([], [((place - distance + root) % world, _WHOLE)], How.COPY))
        elif place % (2 * distance) == 0 and place + distance < world:
            steps.append(_step([((place + distance + root) % world, _WHOLE)], [], How.COPY))
        else:
            steps.append(Step())
    return tuple(steps)


@registered(_single, "a parameter server of one node: Li et al., OSDI 2014")
def master_worker(rank: int, world: int) -> Table:
    """Rank 0 adds everyone's vector in rank order and sends the sum to each."""
    if world == 1:
        return ()
    if rank == 0:
        workers = [(worker, _WHOLE) for worker in range(1, world)]
        return (_step([], workers, How.ADD), _step(workers, [], How.COPY))
    return (_step([(0, _WHOLE)], [], How.ADD), _step([], [(0, _WHOLE)], How.COPY))


@registered(_single, "one-shot all-reduce; the simplest algorithm")
def all_to_all(rank: int, world: int) -> Table:
    """Everyone sends its whole vector to everyone and sums in rank order."""
    if world == 1:
        return ()
    sends = [(peer, _WHOLE) for peer in _ahead(rank, world)]
    receives = [(peer, _WHOLE) for peer in _behind(rank, world)]
    return (_step(sends, receives, How.KEEP, (_WHOLE,)),)


def hierarchical(rank: int, world: int, group_size: int | None = None) -> Table:
    """`direct` inside groups of neighbouring ranks, `direct` among their leaders, and back.

    The vector has one part per place in a group, and in each group the member at that place leads the part: it sums its
    group's values of the part in rank order, all-reduces them with the leaders of the same part in the other groups (in
    group order), and hands the result to its group. So each of G groups sends 2(G-1)/G vectors to others, however many
    members share that. In a group with fewer members than parts some lead several. `group_size` is by default the one
    that makes the fewest steps, near the square root of `world`.
    """
    if world == 1:
        return ()
    layout = _Groups(world, group_size)
    group = rank // layout.size
    mates, own, mine = layout.members(group), layout.led_by(rank), layout.chunks_of(rank)
    ahead = [mates[k] for k in _ahead(rank - mates.start, len(mates))]
    behind = [mates[k] for k in _behind(rank - mates.start, len(mates))]
    gather = _step([(m, layout.chunks_of(m)) for m in ahead], [(m, mine) for m in behind], How.KEEP, (mine,))
    spread = _step([(m, mine) for m in ahead], [(m, layout.chunks_of(m)) for m in behind], How.COPY)
    # Among the leaders of each part: who leads it in the groups ahead and behind, its chunk there, and its chunk here.
    after, before = (
        [
            (layout.leader(g, part), layout.chunk(part, g), layout.chunk(part, group))
            for g in others
            for part in own
        ]
        for others in (_ahead(group, layout.count), _behind(group, layout.count))
    )
    folds = tuple(layout.chunk(part, group) for part in own)
    collect = _step(
        [(to, theirs) for to, theirs, _ in after], [(to, ours) for to, _, ours in before], How.KEEP, folds
    )
    share = _step([(to, ours) for to, _, ours in after], [(to, theirs) for to, theirs, _ in before], How.COPY)
    return (gather, collect, share, spread)


@cache
def grouped(group_size: int) -> Algorithm:
    """`hierarchical` in groups of `group_size` neighbouring ranks: as many as one host has."""
    check_count("group_size", group_size)
    return _hierarchical_of(group_size)


@lru_cache(maxsize=1024)
def _one(chunk: int) -> range:
    return range(chunk, chunk + 1)


def _step(
    sends: Sequence[tuple[int, range]],
    receives: Sequence[tuple[int, range]],
    how: How,
    folds: tuple[range, ...] = (),
) -> Step:
    """A step of these messages, each a peer and chunks; what arrives is dealt with as `how` says."""
    return Step(
        sends=tuple(Send(to=peer, chunks=chunks) for peer, chunks in sends),
        receives=tuple(Receive(source=peer, chunks=chunks, how=how) for peer, chunks in receives),
        folds=folds,
    )


def _swap(to: int, given: range, source: int, taken: range, how: How) -> Step:
    return _step([(to, given)], [(source, taken)], how)


def _ahead(rank: int, world: int) -> list[int]:
    """The others in the order rank + 1, rank + 2, ...: all send so, and no two meet at one receiver."""
    return [(rank + k) % world for k in range(1, world)]


def _behind(rank: int, world: int) -> list[int]:
    """The order in which the messages of `_ahead` arrive: rank - 1, rank - 2, ..."""
    return [(rank - k) % world for k in range(1, world)]


def _with_guests(rank: int, world: int, core: Schedule, whole: range) -> Table:
    """Run `core` on the lower power of two; each rank beyond it is the guest of one inside, two more rounds.

    `whole` is all chunks: what a guest brings and takes back.
    """
    power = _lower_power(world)
    guests = world - power
    middle = core(rank % power, power)
    if not guests:
        return middle
    if rank >= power:
        host = [(rank - power, whole)]
        return (_step(host, [], How.ADD), *(Step() for _ in middle), _step([], host, How.COPY))
    if rank < guests:
        guest = [(rank + power, whole)]
        return (_step([], guest, How.ADD), *middle, _step(guest, [], How.COPY))
    return (Step(), *middle, Step())


class _Groups:
    """Who leads what: `size` parts, each of `count` chunks, one chunk per group."""

    def __init__(self, world: int, group_size: int | None) -> None:
        self.world = world
        root, sizes = isqrt(world), range(1, world + 1)
        fewest = min(sizes, key=lambda size: (size + -(-world // size), abs(size - root)))
        self.size = min(world, group_size or fewest)
        self.count = -(-world // self.size)

    def members(self, group: int) -> range:
        return range(group * self.size, min(self.world, (group + 1) * self.size))

    def led_by(self, rank: int) -> range:
        members = self.members(rank // self.size)
        return range(*chunk_bounds(self.size, len(members), rank - members.start))

    def leader(self, group: int, part: int) -> int:
        return next(rank for rank in self.members(group) if part in self.led_by(rank))

    def chunk(self, part: int, group: int) -> range:
        return _one(part * self.count + group)

    def chunks_of(self, rank: int) -> range:
        parts = self.led_by(rank)
        return range(parts.start * self.count, parts.stop * self.count)


def _hierarchical_of(group_size: int | None) -> Algorithm:
    def chunks(world: int) -> int:
        layout = _Groups(world, group_size)
        return layout.size * layout.count

    return Algorithm(
        name="hierarchical",
        schedule=partial(hierarchical, group_size=group_size),
        chunks=chunks,
        description="direct inside groups, direct among the leaders of each part, and back",
        source="2-D torus all-reduce: Mikami et al. 2018 (arXiv:1811.05233), with direct in both dimensions",
    )


ALGORITHMS["hierarchical"] = _hierarchical_of(None)
