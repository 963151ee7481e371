"""Checkpoints: damage is found and named, rotation and crashed writers cost no good one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyhands.data.store.atomic import FileDigest, WriteFailed
from manyhands.data.store.checkpoint import (
    CONTENT_FILES,
    MANIFEST_FILE,
    CheckpointStore,
    Loaded,
    Manifest,
    NoCheckpoint,
    NonFiniteSnapshot,
    SavedStep,
    Snapshot,
    rotated_out,
)
from manyhands.errors import CorruptCheckpoint, UserError

FILES = (*CONTENT_FILES, MANIFEST_FILE)


def weights(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"fc.weight": torch.randn(3, 5, generator=generator), "fc.bias": torch.full((3,), float(step))}


def snapshot(step: int, score: float | None = None) -> Snapshot:
    moments = {"step": torch.tensor(float(step)), "exp_avg": weights(step + 1000)["fc.weight"]}
    optimizer = {
        "state": {0: moments},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}],
    }
    return Snapshot(
        step=step, model=weights(step), optimizer=optimizer, extra={"position": 64 * step}, score=score
    )


def filled(folder: Path, *steps: int, keep: int = 10) -> CheckpointStore:
    store = CheckpointStore(folder, keep=keep)
    for step in steps:
        store.save(snapshot(step))
    return store


def assert_is_snapshot(loaded: Loaded, step: int) -> None:
    expected = snapshot(step)
    assert loaded.step == step
    for part in ("model", "optimizer", "extra"):
        torch.testing.assert_close(getattr(loaded, part), getattr(expected, part), rtol=0, atol=0)


# ---- damage ----


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip,
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "deleted": lambda path: path.unlink(),
    "directory": to_directory,
    "pipe": to_pipe,
    "link": to_link,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_makes_load_fall_back_and_say_its_name(file: str, damage: str, tmp_path: Path) -> None:
    store = filled(tmp_path, 10, 20, 30)
    DAMAGES[damage](tmp_path / "step-00000030" / file)
    loaded = store.load()
    assert_is_snapshot(loaded, 20)
    assert [skipped.file for skipped in loaded.skipped] == [tmp_path / "step-00000030" / file]
    assert f"step-00000030/{file}" in str(loaded.skipped[0])


def test_when_all_are_damaged_the_error_names_every_file(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2, 3, 4)
    for step, file in zip((1, 2, 3, 4), FILES, strict=True):
        flip(tmp_path / f"step-0000000{step}" / file)
    with pytest.raises(CorruptCheckpoint) as raised:
        store.load()
    for step, file in zip((1, 2, 3, 4), FILES, strict=True):
        assert f"step-0000000{step}/{file}" in str(raised.value)


def test_a_step_asked_for_is_that_step_or_an_error(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2, 3)
    assert_is_snapshot(store.load(step=2), 2)
    flip(tmp_path / "step-00000002" / "state.json")
    with pytest.raises(CorruptCheckpoint, match=r"step 2 cannot be trusted.*step-00000002/state.json"):
        store.load(step=2)
    with pytest.raises(NoCheckpoint, match=r"no checkpoint of step 7; there are: 1, 2, 3"):
        store.load(step=7)


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_no_checkpoint_at_all_is_said(folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoCheckpoint, match=rf"{folder} holds no checkpoint"):
        CheckpointStore(tmp_path / folder).load()


def test_a_folder_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NoCheckpoint, match=r"file cannot be read: Not a directory"):
        CheckpointStore(tmp_path / "file").load()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_single_damage_is_found_and_named(data: st.DataObject, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    if not store.steps():
        filled(tmp_path, 1, 2)
    file = tmp_path / "step-00000002" / data.draw(st.sampled_from(FILES))
    good = file.read_bytes()
    offset = data.draw(st.integers(0, len(good) - 1))
    replacement = data.draw(
        st.sampled_from([b"", bytes([good[offset] ^ data.draw(st.integers(1, 255))]), b"ab"])
    )
    tail = data.draw(st.sampled_from([good[offset + 1 :], b""]))
    damaged = good[:offset] + replacement + tail
    try:
        file.write_bytes(damaged)
        loaded = store.load()
    finally:
        file.write_bytes(good)
    if damaged != good:
        assert_is_snapshot(loaded, 1)
        assert [skipped.file for skipped in loaded.skipped] == [file]


def test_a_manifest_with_any_one_byte_changed_is_refused() -> None:
    files = {name: FileDigest(num_bytes=7, sha256="ab" * 32) for name in CONTENT_FILES}
    text = Manifest(step=5, score=0.25, files=files).render()
    assert Manifest.parse(text).files == files
    for offset in range(len(text)):
        for change in (1, 2, 0x20):
            with pytest.raises(ValueError, match=r"format|manifest|JSON|hash|lists"):
                Manifest.parse(text[:offset] + bytes([text[offset] ^ change]) + text[offset + 1 :])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"../../secret": FileDigest(num_bytes=1, sha256="00")}, r"manifest.json lists \.\./\.\./secret"),
        ({"/etc/passwd": FileDigest(num_bytes=1, sha256="00")}, "manifest.json lists /etc/passwd"),
    ],
)
def test_a_manifest_that_names_other_files_is_refused(change: Any, named: str, tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    path = tmp_path / "step-00000001" / MANIFEST_FILE
    honest = Manifest.parse(path.read_bytes())
    path.write_bytes(Manifest(step=1, score=None, files={**honest.files, **change}).render())
    with pytest.raises(CorruptCheckpoint, match=named):
        store.load()


def test_a_huge_manifest_and_a_checkpoint_under_another_name_are_refused(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / MANIFEST_FILE).write_bytes(b" " * ((1 << 20) + 1))
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000003")
    with pytest.raises(
        CorruptCheckpoint, match=r"step-00000003/manifest.json is of step 1; .*1048577 bytes long"
    ):
        store.load()


# ---- rotation ----


@pytest.mark.parametrize(
    ("entries", "saved", "keep", "removed"),
    [
        ([SavedStep(step=s) for s in (1, 2, 3)], 3, 3, ()),
        ([SavedStep(step=s) for s in (1, 2, 3, 4)], 4, 3, (1,)),
        ([SavedStep(step=s) for s in (1, 2, 3, 4)], 4, 1, (1, 2, 3)),
        (
            [SavedStep(step=1, score=0.1), SavedStep(step=2, score=0.5), SavedStep(step=3)],
            3,
            1,
            (2,),
        ),
        (
            [
                SavedStep(step=1, score=0.1),
                SavedStep(step=2, score=0.1),
                SavedStep(step=3, score=0.2),
            ],
            3,
            1,
            (1,),
        ),
        (
            [
                SavedStep(step=1, score=0.1, intact=False),
                SavedStep(step=2, score=0.5),
                SavedStep(step=3),
            ],
            3,
            1,
            (1,),
        ),
        ([SavedStep(step=1), SavedStep(step=2, intact=False), SavedStep(step=3)], 3, 2, ()),
        (
            [
                SavedStep(step=1),
                SavedStep(step=2, intact=False),
                SavedStep(step=3),
                SavedStep(step=4),
            ],
            4,
            2,
            (1, 2),
        ),
        ([SavedStep(step=10), SavedStep(step=20), SavedStep(step=15)], 15, 1, (10,)),
        (
            [
                SavedStep(step=10),
                SavedStep(step=15),
                SavedStep(step=20),
                SavedStep(step=30, intact=False),
            ],
            15,
            2,
            (),
        ),
    ],
)
def test_rotation_as_a_table(
    entries: list[SavedStep], saved: int, keep: int, removed: tuple[int, ...]
) -> None:
    assert rotated_out(entries, saved, keep) == removed


def test_the_last_and_the_best_stay_on_disk(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step, score in enumerate([0.9, 0.2, 0.7, 0.8, 0.6]):
        store.save(snapshot(step, score))
    assert store.steps() == (1, 3, 4)
    assert store.load(step=1).score == 0.2


def poisoned(**changes: Any) -> Snapshot:
    good = {"step": 9, "model": weights(9), "optimizer": {}, "extra": {}, "score": 0.0}
    return Snapshot(**{**good, **changes})


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (poisoned(model={**weights(9), "w": torch.tensor([1.0, math.nan])}), "w"),
        (poisoned(model={"w": torch.tensor([[-math.inf, 1.0]], dtype=torch.bfloat16)}), "w"),
        (poisoned(model={"w": torch.tensor([math.nan]).to(torch.float8_e5m2)}), "w"),
        (poisoned(optimizer={"state": {0: {"m": torch.tensor(math.inf)}}}), "optimizer.state.0.m"),
        (poisoned(extra={"ema": [torch.tensor(math.nan)]}), "extra.ema.0"),
        (poisoned(score=math.nan), "score"),
        (poisoned(score=-math.inf), "score"),
        (poisoned(model={"m": torch.tensor([math.nan, math.inf])}, may_hold_infinity=frozenset("m")), "m"),
    ],
)
def test_a_snapshot_that_is_not_finite_is_refused_by_name_and_costs_nothing(
    bad: Snapshot, named: str, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(snapshot(1, 0.5))
    with pytest.raises(NonFiniteSnapshot, match="step 9") as raised:
        store.save(bad)
    assert raised.value.name == named
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert_is_snapshot(store.load(), 1)


def test_a_buffer_may_hold_infinities_where_that_is_said(tmp_path: Path) -> None:
    mask = torch.full((3, 3), -math.inf).triu(1)
    store = CheckpointStore(tmp_path)
    store.save(Snapshot(step=1, model={"mask": mask}, optimizer={}, may_hold_infinity=frozenset({"mask"})))
    assert torch.equal(store.load().model["mask"], mask)


# ---- what crashed writers leave, and what resists ----


def test_the_next_save_clears_our_leftovers_and_nothing_else(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    ours = ["step-00000002.writing", "step-00000000.removing", "step-00000001.replaced"]
    others = ["step-00000002.bak", "notes.writing", "step-2.writing", "step-000000002.writing"]
    for name in ours + others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    assert_is_snapshot(store.load(), 1)
    store.save(snapshot(2))
    assert set(os.listdir(tmp_path)) == {"step-00000001", "step-00000002", *others}


@pytest.mark.parametrize("successor", ["gone", "damaged"])
def test_a_replaced_copy_is_read_and_put_back_while_its_successor_is_not_there(
    successor: str, tmp_path: Path
) -> None:
    store = filled(tmp_path, 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000002.replaced")
    if successor == "damaged":
        (tmp_path / "step-00000002").mkdir()
    assert store.steps() == (1, 2)
    assert_is_snapshot(store.load(), 2)
    store.save(snapshot(3))
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002", "step-00000003"]
    assert_is_snapshot(store.load(step=2), 2)


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2)
    store.save(Snapshot(step=2, model={"w": torch.ones(1)}, optimizer={}, score=0.5))
    assert store.load().model.keys() == {"w"}
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_a_folder_that_can_not_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        WriteFailed, match=r"step 3 could not be written to .*file/checkpoints: Not a directory"
    ):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(snapshot(3))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: CheckpointStore(Path("x"), keep=0), "keep=0 must be"),
        (lambda: Snapshot(step=-1, model={}, optimizer={}), "step=-1 must be"),
        (lambda: Snapshot(step=1, model={"n": 3}, optimizer={}), r"model\['n'\] is a int"),  # type: ignore[dict-item]
    ],
)
def test_arguments_that_make_no_sense_are_named(make: Callable[[], object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        make()
