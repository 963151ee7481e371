"""Who serves and who works, decided without a process: events in, actions out."""

from __future__ import annotations

import pytest

from manyhands.errors import UserError
from manyhands.places.place import AddWorker, RemoveWorker
from manyhands.strategies.common.membership import (
    MAX_DEATHS,
    Died,
    Fail,
    KillMember,
    MemberJoined,
    MemberSilent,
    StartWorker,
)
from manyhands.strategies.ps.client_core import Reason
from manyhands.strategies.ps.member_events import (
    Assign,
    Left,
    Over,
    Progressed,
    PsAction,
    PsEvent,
    Publish,
    Recovered,
    Rejoin,
    ShardLost,
    SlotFinished,
    StartServer,
)
from manyhands.strategies.ps.ps_membership import MembershipPlan, PsMembership
from manyhands.strategies.ps.ps_messages import Concluded, Installed, Update, View


class Play:
    """A membership whose launcher starts whatever it is asked for, at once, unless told to hold back."""

    def __init__(self, shards: int = 2, workers: int = 2, replicas: int = 1, *, restore: bool = True) -> None:
        plan = MembershipPlan(num_shards=shards, num_workers=workers, replicas=replicas, can_restore=restore)
        self.core = PsMembership(plan)
        self.hold = False
        self.starting: list[int] = []
        self.view = self.core.view
        self.seen: list[PsAction] = []
        self._obey(self.core.begin())

    def do(self, event: PsEvent) -> list[PsAction]:
        """Every action that `event` leads to."""
        self.seen = []
        self._obey(self.core.handle(event))
        return self.seen

    def install(self) -> list[PsAction]:
        """Every backup gets its copy, every primary its snapshot."""
        seen: list[PsAction] = []
        for shard in self.view.shards:
            for member in (shard.primary, shard.backup):
                seen += self.do(Installed(shard=shard.shard, epoch=shard.epoch, member=member))
        return seen

    def join(self) -> list[PsAction]:
        """Everybody who was held back joins."""
        self.hold, held, self.starting = False, self.starting, []
        return [action for member in held for action in self.do(MemberJoined(member=member))]

    def holder(self, slot: int) -> int:
        return next(place.member for place in self.view.slots if place.slot == slot)

    def _obey(self, actions: list[PsAction]) -> None:
        for action in actions:
            self.seen.append(action)
            match action:
                case Publish(view=view):
                    assert view.epoch > self.view.epoch
                    self.view = view
                case StartServer(member=member) | StartWorker(member=member):
                    if self.hold:
                        self.starting.append(member)
                    else:
                        self._obey(self.core.handle(MemberJoined(member=member)))


def kinds(actions: list[PsAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


def places(view: View) -> list[tuple[int, int]]:
    return [(shard.primary, shard.backup) for shard in view.shards]


def test_one_view_once_everybody_is_there() -> None:
    play = Play(shards=3, workers=2)
    assert places(play.view) == [(1, 2), (2, 3), (3, 1)]
    assert [(place.slot, place.member) for place in play.view.slots] == [(0, 4), (1, 5)]
    assert kinds(play.seen).count("Publish") == 1
    assert play.view.epoch == 1
    assert places(Play(shards=1, replicas=0).view) == [(1, 0)]
    assert places(Play(shards=1, replicas=1).view) == [(1, 2)]


def test_a_dead_primary_is_followed_by_its_backup_and_a_new_server_takes_the_copies() -> None:
    play = Play(shards=3)
    play.install()
    play.hold = True
    seen = play.do(Died(member=2))
    assert kinds(seen) == ["Publish", "StartServer"]
    assert places(play.view) == [(1, 0), (3, 0), (3, 1)]
    assert [shard.epoch for shard in play.view.shards] == [2, 2, 1]
    seen = play.join()
    new = seen[0]
    assert kinds(seen) == ["Publish"]
    assert isinstance(new, Publish)
    assert places(play.view) == [(1, 6), (3, 6), (3, 1)]
    assert play.do(Installed(shard=0, epoch=3, member=6)) == []
    assert play.do(Installed(shard=1, epoch=2, member=6)) == [], "a copy of an older epoch"
    assert play.do(Installed(shard=1, epoch=3, member=6)) == [Recovered(what="every shard", member=6)]


def test_a_silent_server_is_killed_before_its_shard_moves() -> None:
    play = Play()
    play.install()
    before = play.view
    assert play.do(MemberSilent(member=1)) == [KillMember(member=1)]
    assert play.view == before
    play.do(Died(member=1))
    assert play.view.shards[0].primary == 2


@pytest.mark.parametrize("replicas", [0, 1])
def test_without_a_whole_copy_a_snapshot_is_restored_or_the_run_fails(replicas: int) -> None:
    """With replicas: the backups have not been installed yet when the primary dies."""
    play = Play(shards=2, replicas=replicas)
    play.hold = True
    play.do(Died(member=1))
    assert play.view.shards[0].primary == 0
    seen = play.join()
    assert kinds(seen) == ["ShardLost", "Publish"]
    assert seen[0] == ShardLost(shard=0, member=5)
    assert play.view.shards[0].primary == 5
    assert all(shard.primary != shard.backup for shard in play.view.shards)
    assert play.install()[-1] == Recovered(what="every shard", member=play.view.shards[1].backup or 5)

    play = Play(shards=2, replicas=replicas, restore=False)
    (fail,) = play.do(Died(member=1))
    assert isinstance(fail, Fail)
    assert "shard 0" in fail.sentence
    assert play.do(Died(member=2)) == [], "it is over"


def test_the_death_of_a_server_that_serves_nothing_is_made_good_too() -> None:
    play = Play(shards=1, replicas=1)
    play.install()
    play.hold = True
    play.do(Died(member=1))  # 2 serves now
    play.do(Died(member=play.starting.pop()))  # the successor dies before it joins
    assert play.join()[0] == Publish(view=play.view)
    assert kinds(play.install()) == ["Recovered"]


def test_a_dead_workers_slot_is_taken_by_a_new_process() -> None:
    play = Play(workers=3)
    play.hold = True
    holder = play.holder(1)
    seen = play.do(Died(member=holder))
    assert kinds(seen) == ["Publish", "StartWorker"]
    assert play.holder(1) == 0
    successor = play.starting[0]
    seen = play.join()
    assert seen[0] == Assign(member=successor, as_member=successor, slot=1)
    assert seen[-1] == Recovered(what="slot 1", member=successor)
    assert play.holder(1) == successor > holder


def test_a_paused_worker_that_wakes_takes_the_slot_whose_successor_is_not_there_yet() -> None:
    play = Play(workers=2)
    play.hold = True
    zombie = play.holder(0)
    assert kinds(play.do(MemberSilent(member=zombie))) == ["Publish", "StartWorker"], "it is not killed"
    assert play.do(MemberSilent(member=zombie)) == []
    seen = play.do(Rejoin(member=zombie))
    assert isinstance(seen[0], Assign)
    assert seen[0].member == zombie
    assert seen[0].slot == 0
    assert seen[0].as_member == play.holder(0) > play.starting[0]
    assert seen[-1] == Recovered(what="slot 0", member=seen[0].as_member)
    assert play.join() == [], "the successor stands by"
    seen = play.do(Died(member=play.holder(1)))
    assert kinds(seen) == ["Publish", "Assign", "Publish", "Recovered"], "and is used at once"
    assert play.holder(1) > play.holder(0)
    assert play.do(Died(member=zombie)) == [], "that number is nobody's"


def test_a_paused_worker_that_wakes_too_late_stands_by() -> None:
    play = Play(workers=2)
    zombie = play.holder(0)
    play.do(MemberSilent(member=zombie))
    assert play.do(Rejoin(member=zombie)) == []
    play.hold = True
    assert kinds(play.do(Died(member=play.holder(1)))) == ["Publish", "Assign", "Publish", "Recovered"]
    assert play.starting == []


def test_a_process_that_comes_back_to_a_slot_with_a_higher_number_gets_one_too() -> None:
    play = Play(workers=2)
    play.hold = True
    zombie = play.holder(0)
    play.do(MemberSilent(member=zombie))
    play.do(Rejoin(member=zombie))
    play.do(Died(member=play.holder(0)))  # the zombie, under its new number; a second successor is started
    first, second = play.starting
    seen = play.do(MemberJoined(member=first))
    assert seen[0] == Assign(member=first, as_member=play.holder(0), slot=0)
    assert play.holder(0) > second
    assert play.do(MemberJoined(member=second)) == []


def test_slots_are_added_when_their_worker_is_there_and_removed_at_once() -> None:
    play = Play(workers=2)
    play.hold = True
    assert kinds(play.do(AddWorker())) == ["StartWorker"]
    assert [place.slot for place in play.view.slots] == [0, 1]
    assert kinds(play.join()) == ["Assign", "Publish"]
    assert [place.slot for place in play.view.slots] == [0, 1, 2]
    retiring = play.holder(1)
    assert kinds(play.do(RemoveWorker(slot=1))) == ["Publish"]
    assert [place.slot for place in play.view.slots] == [0, 2]
    seen = play.do(Died(member=retiring))
    assert kinds(seen) == ["Publish", "StartWorker", "Assign", "Publish", "Recovered"], (
        "somebody must do what slot 1 owes"
    )
    worker = seen[1]
    assert isinstance(worker, StartWorker)
    for member in (play.holder(0), play.holder(2)):
        assert play.do(SlotFinished(member=member, reason=Reason.FINISHED)) == []
    assert play.do(SlotFinished(member=worker.member, reason=Reason.RETIRED)) == [Over(shards=(0, 1))]
    with pytest.raises(UserError, match="slot=1"):
        Play(workers=1).do(RemoveWorker(slot=1))
    with pytest.raises(UserError, match="last active slot"):
        Play(workers=1).do(RemoveWorker(slot=0))


def test_before_a_run_begins_only_slots_that_were_added_can_be_removed() -> None:
    core = PsMembership(MembershipPlan(num_shards=1, num_workers=2))
    started = [action.member for action in core.begin() if isinstance(action, StartServer | StartWorker)]
    core.handle(AddWorker())
    with pytest.raises(
        UserError, match="slot=1: the run has not started; remove it after every worker joined"
    ):
        core.handle(RemoveWorker(slot=1))
    assert not [
        a for member in started for a in core.handle(MemberJoined(member=member)) if isinstance(a, Publish)
    ]
    (published,) = core.handle(RemoveWorker(slot=2))
    assert isinstance(published, Publish), "nobody else is waited for"
    assert [place.slot for place in published.view.slots] == [0, 1]


def test_an_added_slot_that_is_removed_before_its_worker_came_was_never_there() -> None:
    play = Play(workers=1)
    play.hold = True
    play.do(AddWorker())
    assert play.do(RemoveWorker(slot=1)) == []
    assert play.join() == []
    assert [place.slot for place in play.view.slots] == [0]
    assert play.do(SlotFinished(member=play.holder(0), reason=Reason.FINISHED)) == [Over(shards=(0, 1))]


def test_the_run_is_over_when_every_slot_has_finished() -> None:
    play = Play(workers=2)
    first, second = play.holder(0), play.holder(1)
    assert play.do(SlotFinished(member=first, reason=Reason.FINISHED)) == []
    assert play.do(Died(member=first)) == [], "it was done"
    assert play.do(SlotFinished(member=second, reason=Reason.FINISHED)) == [Over(shards=(0, 1))]
    assert play.do(Died(member=second)) == [], "it was done, too"
    assert play.do(AddWorker()) == []


def test_a_server_that_dies_when_all_is_done_is_followed_by_its_backup() -> None:
    play = Play(workers=1)
    play.install()
    assert play.do(SlotFinished(member=play.holder(0), reason=Reason.FINISHED)) == [Over(shards=(0, 1))]
    play.hold = True
    assert play.do(MemberSilent(member=1)) == [KillMember(member=1)]
    assert kinds(play.do(Died(member=1))) == ["Publish", "StartServer", "Over"]
    assert places(play.view) == [(2, 0), (2, 0)], "it leaves both shards now"


def test_a_server_that_dies_when_all_is_done_is_followed_by_one_that_restores() -> None:
    play = Play(workers=1, replicas=0)
    play.do(SlotFinished(member=play.holder(0), reason=Reason.FINISHED))
    play.hold = True
    assert kinds(play.do(Died(member=1))) == ["Publish", "StartServer"], "shard 0 cannot be left by anybody"
    assert kinds(play.join()) == ["ShardLost", "Publish"]
    assert kinds(play.install())[-1:] == ["Publish"]
    assert play.do(Concluded(shard=1, view=play.view.epoch)) == []
    assert play.do(Concluded(shard=0, view=play.view.epoch)) == [Over(shards=(0, 1))], (
        "and leave what they hold once more"
    )


def test_a_server_that_has_left_its_shards_is_followed_only_if_another_needs_it() -> None:
    play = Play(workers=1, replicas=0)
    play.do(SlotFinished(member=play.holder(0), reason=Reason.FINISHED))
    play.hold = True
    assert play.do(Left(member=1, shards=(0,))) == []
    assert play.do(Died(member=1)) == [], "shard 0 is where it is wanted"
    assert kinds(play.do(Died(member=2))) == ["Publish", "StartServer"] * 2, (
        "shard 1 cannot be had without a lead"
    )
    assert places(play.view) == [(0, 0), (0, 0)]
    play.join()
    play.install()
    assert play.do(Concluded(shard=0, view=play.view.epoch)) == []
    assert play.do(Concluded(shard=1, view=play.view.epoch)) == [Over(shards=(0, 1))], (
        "shard 0 is another now"
    )


def test_a_server_that_has_left_its_shards_is_followed_while_another_comes_back() -> None:
    play = Play(workers=1, replicas=0)
    play.do(SlotFinished(member=play.holder(0), reason=Reason.FINISHED))
    play.do(Left(member=1, shards=(0,)))
    play.hold = True
    assert kinds(play.do(Died(member=2))) == ["Publish", "StartServer"]
    assert kinds(play.do(Died(member=1))) == ["Publish", "StartServer"], (
        "who restores shard 1 waits for its word"
    )


def test_a_copy_that_died_unfollowed_is_not_taken_for_one() -> None:
    """Server 2 serves both shards and has left neither; its backups went with a server that served nothing."""
    play = Play(workers=1)
    play.install()
    play.do(Died(member=1))
    play.install()
    backup = play.view.shards[0].backup
    assert places(play.view) == [(2, backup), (2, backup)]
    assert play.do(SlotFinished(member=play.holder(0), reason=Reason.FINISHED)) == [Over(shards=(0, 1))]
    play.hold = True
    assert play.do(Died(member=backup)) == []
    play.do(Died(member=2))
    assert places(play.view) == [(0, 0), (0, 0)], "there is no copy"


def test_a_server_that_raises_is_a_dead_server() -> None:
    play = Play()
    play.install()
    for error in ("RuntimeError", "OSError"):
        seen = play.do(Died(member=play.view.shards[0].primary, error=error))
        assert kinds(seen)[:2] == ["Publish", "StartServer"]
        play.install()
    assert "Fail" not in kinds(play.do(Died(member=play.view.shards[1].primary, error="RuntimeError"))), (
        "every shard was whole since the last"
    )


def test_an_error_that_the_successor_raises_too_ends_the_run() -> None:
    play = Play()
    play.install()
    play.do(Died(member=2, error="RuntimeError"))
    assert "Fail" not in kinds(play.do(Died(member=play.view.shards[0].backup, error="OSError")))
    (fail,) = play.do(Died(member=1, error="RuntimeError"))
    assert isinstance(fail, Fail)
    assert "RuntimeError again" in fail.sentence
    assert play.do(Died(member=3)) == []


def test_errors_that_come_back_after_every_recovery_end_the_run() -> None:
    play = Play(replicas=0)
    for _ in range(MAX_DEATHS - 1):
        assert "Fail" not in kinds(play.do(Died(member=play.view.shards[1].primary, error="ValueError")))
        play.install()
    (fail,) = play.do(Died(member=play.view.shards[1].primary, error="ValueError"))
    assert isinstance(fail, Fail)
    assert "server error 5 of this run" in fail.sentence


def test_a_restored_shard_is_told_of_the_slots_that_were_left_for_good() -> None:
    play = Play(workers=3, replicas=0)
    first, second = play.holder(0), play.holder(1)
    play.do(Progressed(member=first, clock=7))
    assert play.do(SlotFinished(member=first, reason=Reason.FINISHED)) == [], "no shard can lack anything"
    play.do(Died(member=play.view.shards[1].primary))
    assert play.view.gone == (Update(slot=0, clock=8),)
    assert kinds(play.do(SlotFinished(member=second, reason=Reason.FINISHED))) == ["Publish"]
    assert play.view.gone == (Update(slot=0, clock=8), Update(slot=1, clock=0))
    play.hold = True
    play.do(Died(member=play.view.shards[0].primary))
    assert kinds(play.do(SlotFinished(member=play.holder(2), reason=Reason.FINISHED))) == ["Publish"], (
        "not yet"
    )
    play.join()
    assert "Over" not in kinds(play.install())
    assert [last.slot for last in play.view.gone] == [0, 1, 2]


def test_after_a_restore_the_run_is_over_when_nothing_is_open_at_any_shard() -> None:
    play = Play(workers=1, replicas=0)
    play.do(Died(member=play.view.shards[1].primary))
    play.install()
    assert kinds(play.do(SlotFinished(member=play.holder(0), reason=Reason.FINISHED))) == ["Publish"]
    assert play.do(Concluded(shard=0, view=play.view.epoch)) == []
    play.hold = True
    play.do(Died(member=play.view.shards[0].primary))
    assert play.do(Concluded(shard=1, view=play.view.epoch)) == [], "shard 0 is lost"
    play.join()
    play.install()
    assert play.do(Concluded(shard=0, view=play.view.epoch)) == []
    assert play.do(Concluded(shard=1, view=play.view.epoch - 1)) == [], "it has not heard of that restore"
    assert play.do(Concluded(shard=1, view=play.view.epoch)) == [Over(shards=(0, 1))]


def test_who_was_given_a_new_place_keeps_it_when_it_says_that_it_is_there() -> None:
    play = Play(workers=3)
    play.hold = True
    zombie = play.holder(0)
    play.do(MemberSilent(member=zombie))
    assigned = next(action for action in play.do(Rejoin(member=zombie)) if isinstance(action, Assign))
    assert (assigned.member, assigned.slot) == (zombie, 0)
    assert play.do(MemberJoined(member=assigned.as_member)) == [], "it has its place"
    assert kinds(play.do(Died(member=play.holder(1)))) == ["Publish", "StartWorker"], (
        "who works in slot 0 does not stand by for slot 1"
    )
    assert play.holder(0) == assigned.as_member


def test_a_slot_that_gets_nowhere_ends_the_run() -> None:
    play = Play(workers=2)
    for _ in range(MAX_DEATHS - 1):
        play.do(Died(member=play.holder(1)))
    play.do(Progressed(member=play.holder(1), clock=3))
    for _ in range(MAX_DEATHS - 1):
        play.do(Progressed(member=play.holder(1), clock=3))
        assert "Fail" not in kinds(play.do(Died(member=play.holder(1))))
    (fail,) = play.do(Died(member=play.holder(1)))
    assert isinstance(fail, Fail)
    assert "slot 1" in fail.sentence
    assert "clock 3" in fail.sentence


def test_servers_that_keep_dying_end_the_run() -> None:
    play = Play(shards=2)
    deaths = 0
    while "Fail" not in kinds(play.do(Died(member=play.view.shards[0].primary))):
        deaths += 1
        assert deaths < 100
    assert deaths == 2 * MAX_DEATHS - 1


def test_who_can_not_be_used_while_silent_is_killed() -> None:
    play = Play(workers=2)
    play.hold = True
    zombie = play.holder(0)
    play.do(MemberSilent(member=zombie))
    successor = play.starting[0]
    assert play.do(MemberSilent(member=successor)) == [KillMember(member=successor)]
    play.join()
    play.do(Rejoin(member=zombie))
    assert play.do(MemberSilent(member=zombie)) == [KillMember(member=zombie)], "it stood by"
    assert play.do(Died(member=zombie)) == []


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ({"num_shards": 0, "num_workers": 1}, "num_shards=0"),
        ({"num_shards": 1, "num_workers": 0}, "num_workers=0"),
        ({"num_shards": 1, "num_workers": 1, "replicas": 2}, "replicas=2"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(plan: dict[str, int], match: str) -> None:
    with pytest.raises(UserError, match=match):
        MembershipPlan(**plan)
