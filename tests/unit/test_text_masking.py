"""Masks of BERT: the shares that the paper names, whole words, and nothing random but (seed, epoch, row)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from manyhands.errors import UserError
from manyhands.workloads.text.masking import IGNORED, Masking

PAD, CLS, SEP, MASK = 0, 1, 2, 3
PLAIN = Masking(mask_id=MASK, vocabulary=1000, special_ids=(PAD, CLS, SEP, MASK))


def rows_of(count: int, length: int = 128) -> np.ndarray:
    rows = np.random.default_rng(0).integers(4, 1000, (count, length))
    rows[:, 0], rows[:, -1], rows[::2, -30:] = CLS, SEP, PAD
    return rows


def labels_everywhere(masked_rows) -> np.ndarray:
    found = np.full_like(masked_rows.tokens, IGNORED)
    np.put_along_axis(found, masked_rows.places, masked_rows.labels, 1)
    return found


def test_shares_are_those_of_the_paper() -> None:
    rows = rows_of(4000)
    masked_rows = PLAIN.mask(rows, np.arange(4000), 0)
    tokens, labels = masked_rows.tokens, labels_everywhere(masked_rows)
    assert masked_rows.places.shape == (4000, 19)
    assert (np.diff(masked_rows.places[1::2]) > 0).all()
    targets = labels != IGNORED
    assert (labels[targets] == rows[targets]).all()
    assert (tokens[~targets] == rows[~targets]).all()
    ordinary = rows >= 4
    assert not (targets & ~ordinary).any()
    assert (targets.sum(1) == np.floor(ordinary.sum(1) * 0.15 + 0.5)).all()  # known before anything is drawn
    count = targets.sum()
    masked, kept = (tokens[targets] == MASK), tokens[targets] == rows[targets]
    # three standard deviations of a binomial share; a random token is the old one once in 996 draws
    for share, wanted in ((masked.mean(), 0.8), (kept.mean(), 0.1 + 0.1 / 996)):
        assert abs(share - wanted) < 3 * np.sqrt(wanted * (1 - wanted) / count)
    replaced = tokens[targets][~masked & ~kept]
    assert replaced.min() >= 4
    assert len(np.unique(replaced)) == 996
    position = targets[1::2].mean(0)[1:-1]  # every place is as likely
    assert abs(position - 0.15).max() < 5 * np.sqrt(0.15 * 0.85 / 2000)


def test_a_row_is_masked_alike_in_any_batch_and_anew_in_each_epoch() -> None:
    rows, numbers = rows_of(40), np.arange(100, 140)
    whole = PLAIN.mask(rows, numbers, 3)
    for part in (slice(0, 7), slice(7, 8), slice(8, 40)):
        some = PLAIN.mask(rows[part], numbers[part], 3)
        assert (some.tokens == whole.tokens[part]).all()
        assert (some.places == whole.places[part]).all()
        assert (some.labels == whole.labels[part]).all()
    for other in (
        PLAIN.mask(rows, numbers, 4),
        PLAIN.mask(rows, numbers + 1, 3),
        replace(PLAIN, seed=1).mask(rows, numbers, 3),
    ):
        ours, others = (labels_everywhere(one) != IGNORED for one in (whole, other))
        assert (ours & others).sum() < 0.3 * ours.sum()  # 0.15 of them by chance


def test_whole_words_by_hand() -> None:
    continues = np.zeros(1000, np.bool_)
    continues[500:] = True
    masking = replace(PLAIN, continues_word=continues, rate=0.5)
    row = np.array([[CLS, 10, 501, 502, 11, 12, 503, 13, SEP, PAD]])
    words = [{1, 2, 3}, {4}, {5, 6}, {7}]
    seen = set()
    for number in range(200):
        labels = labels_everywhere(masking.mask(row, np.array([number]), 0))[0]
        targets = set(np.flatnonzero(labels != IGNORED).tolist())
        assert all(not word & targets or word <= targets for word in words)
        assert len(targets) <= 4  # half of seven, rounded
        seen.add(frozenset(targets))
    assert {frozenset({1, 2, 3, 4}), frozenset({4, 5, 6, 7}), frozenset({1, 2, 3, 7})} <= seen


def test_a_row_without_an_ordinary_token_has_no_target() -> None:
    rows = np.array([[CLS, SEP, PAD, PAD], [CLS, 9, SEP, PAD]])
    labels = PLAIN.mask(rows, np.array([0, 1]), 0).labels
    assert (labels != IGNORED).sum(1).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rate": 0.0}, "rate is 0.0; it must be above 0 and below 1"),
        ({"mask_id": 1000}, r"must be in 0\.\.999"),
        ({"vocabulary": 5}, "of which 1 are no special tokens"),
    ],
)
def test_settings_that_make_no_sense(change: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        replace(PLAIN, **change)


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(UserError, match=r"rows hold ids from 5 to 1000; the vocabulary has 0\.\.999"):
        PLAIN.mask(np.array([[5, 1000]]), np.array([0]), 0)
