"""Windows over files of tokens: by hand, as data of a task, and attention that stays within documents."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset

from manyhands.data.batches import BatchSource
from manyhands.data.reading import batch_shares
from manyhands.errors import UserError
from manyhands.workloads.text.masking import IGNORED, Masking
from manyhands.workloads.text.packing import (
    MaskedWindows,
    TokenWindows,
    document_mask,
    next_tokens,
)
from manyhands.workloads.text.token_files import ShardWriter, TokenFiles, shard_name

SHA = "cd" * 32


def folder_of(path: Path, *shards: tuple[list[int], list[int]]) -> TokenFiles:
    listed = []
    for number, (tokens, starts) in enumerate(shards):
        with ShardWriter(path / shard_name(number), np.dtype("<u2"), SHA) as writer:
            writer.add(np.array(tokens), starts)
            header = writer.finish()
        listed.append({"tokens": header.tokens, "documents": header.documents, "sha256": header.body})
    (path / "tokens.json").write_text(json.dumps({"tokenizer": SHA, "shards": listed}))
    return TokenFiles(path)


@pytest.fixture
def files(tmp_path: Path) -> TokenFiles:
    return folder_of(
        tmp_path, ([*range(10, 21)], [0, 3, 5]), ([*range(30, 34)], [0]), ([*range(40, 49)], [0, 8])
    )


def test_windows_by_hand(files: TokenFiles) -> None:
    windows = TokenWindows(files, 4)
    rows = [[10, 11, 12, 13, 14], [14, 15, 16, 17, 18], [40, 41, 42, 43, 44], [44, 45, 46, 47, 48]]
    assert [windows[at].tolist() for at in range(len(windows))] == rows  # type: ignore[union-attr]
    batch = windows.batch(np.array([3, 0, 3]), 0)
    assert batch.tolist() == [rows[3], rows[0], rows[3]]  # type: ignore[union-attr]
    with pytest.raises(IndexError):
        windows[4]


def test_documents_and_positions_by_hand(files: TokenFiles) -> None:
    windows = TokenWindows(files, 4, within_documents=True)
    batch = windows.batch(np.array([0, 1, 3]), 0)
    assert isinstance(batch, dict)
    assert batch["documents"].tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3], [0, 1, 2, 3, 0]]
    assert next_tokens(batch).tolist() == [[11, 12, -100, 14], [-100, 16, 17, 18], [45, 46, 47, -100]]
    assert windows.num_targets.tolist() == [3, 3, 4, 3]


def test_attention_within_documents_is_that_of_each_alone() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64, generator=draw)
    packed = F.scaled_dot_product_attention(query, key, value, attn_mask=document_mask(documents))
    for part in (slice(0, 3), slice(3, 5), slice(5, 8)):
        given = (one[:, :, part] for one in (query, key, value))
        alone = F.scaled_dot_product_attention(*given, is_causal=True)
        torch.testing.assert_close(packed[:, :, part], alone, rtol=0, atol=1e-14)


def test_a_batch_is_what_a_data_loader_gives_and_goes_to_workers_as_a_path(files: TokenFiles) -> None:
    for within in (False, True):
        windows = TokenWindows(files, 2, within_documents=within)
        sent = pickle.dumps(windows)
        assert len(sent) < 2000
        ours = BatchSource(pickle.loads(sent)).fetch([5, 0, 3])
        (theirs,) = DataLoader(windows, batch_sampler=[[5, 0, 3]])  # type: ignore[arg-type, var-annotated]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


MASKING = Masking(mask_id=3, vocabulary=2000, special_ids=(0, 1, 2, 3), seed=7)


class BertFiles(TokenFiles):
    """Whose tokenizer is named by its ids alone."""

    class Named:
        def require_id(self, token: str) -> int:
            return {"[CLS]": 1, "[SEP]": 2}[token]

    tokenizer = Named()  # type: ignore[assignment]


def bert(tmp_path: Path, count: int = 3000) -> BertFiles:
    folder_of(tmp_path, ([*range(4, 4 + count // 2)], [0, 100]), ([*range(10, 10 + count // 2)], [0]))
    return BertFiles(tmp_path)


def test_masked_rows(tmp_path: Path) -> None:
    rows = MaskedWindows(bert(tmp_path), 32, MASKING)
    assert len(rows) == 2 * (1500 // 30)
    numbers = np.array([3, 60])
    batch = rows.batch(numbers, 2)
    plain = np.stack([[1, *range(4 + 90, 4 + 120), 2], [1, *range(10 + 300, 10 + 330), 2]])
    wanted = MASKING.mask(plain, numbers, 2)
    assert (batch["tokens"].numpy() == wanted.tokens).all()
    assert (batch["places"].numpy() == wanted.places).all()
    assert (batch["labels"].numpy() == wanted.labels).all()


def test_masks_are_drawn_by_epoch_and_the_same_for_any_workers(tmp_path: Path) -> None:
    rows = Subset(MaskedWindows(bert(tmp_path), 32, MASKING), range(10, 30))
    shares = batch_shares(rows, None, 8, 2, None, 11, streams=False)
    assert len(rows) == 20  # batches of 8, 8 and 4
    for step in (0, 2, 4):  # the last in the second epoch
        whole = [piece.fetch() for piece in shares.share(step, 0, 1).pieces]
        parts = [piece.fetch() for part in range(3) for piece in shares.share(step, part, 3).pieces]
        for name in ("tokens", "places", "labels"):
            assert torch.equal(*(torch.cat([one[name] for one in some]) for some in (whole, parts)))
    seen: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for step in range(6):
        for piece in shares.share(step, 0, 1).pieces:
            batch = piece.fetch()
            assert (batch["labels"] != IGNORED).all()
            originals = batch["tokens"].scatter(1, batch["places"], batch["labels"])
            for row, places in zip(originals, batch["places"], strict=True):
                seen.setdefault(tuple(row.tolist()), []).append(places)
    assert len(seen) == 20  # each once an epoch, with another mask
    assert all(len(places) == 2 and not torch.equal(*places) for places in seen.values())


def test_a_batch_reads_its_own_rows_alone(tmp_path: Path) -> None:
    """The file has a hole of half a gigabyte: whoever copied it would take that memory."""
    import resource

    path = tmp_path / shard_name(0)
    with ShardWriter(path, np.dtype("<u2"), SHA) as writer:
        writer.finish()
    count = 1 << 28
    header = writer_header(count)
    with path.open("r+b") as file:
        file.write(header.to_bytes())
        file.truncate(header.num_bytes)
    listed = [{"tokens": count, "documents": 1, "sha256": SHA}]
    (tmp_path / "tokens.json").write_text(json.dumps({"tokenizer": SHA, "shards": listed}))
    windows = TokenWindows(TokenFiles(tmp_path), 1024, within_documents=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batch = windows.batch(np.array([0, len(windows) // 2, len(windows) - 1]), 0)
    assert batch["tokens"].shape == (3, 1025)  # type: ignore[index]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10


def writer_header(count: int):  # type: ignore[no-untyped-def]
    from manyhands.workloads.text.token_files import ShardHeader

    return ShardHeader(np.dtype("<u2"), count, 1, SHA, SHA)


def test_bad_requests(files: TokenFiles, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="has no row of 12 tokens: its longest file has 11; give a shorter length"
    ):
        TokenWindows(files, 11)
    with pytest.raises(UserError, match="length=0 must be an integer of at least 1"):
        TokenWindows(files, 0)
    with pytest.raises(UserError, match="length is 2; it must be at least 3"):
        MaskedWindows(files, 2)
    with pytest.raises(
        UserError, match="collate is not called for data, a TokenWindows: it makes its batches"
    ):
        BatchSource(TokenWindows(files, 4), list)
