"""Tokens, and files of them, against the `tokenizers` library and lists written by hand."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import SHARED_DATA
from manyhands.errors import DataError, UserError
from manyhands.workloads.text.token_files import ShardWriter, TokenFiles, open_shard, proven_shard
from manyhands.workloads.text.token_worker import WordCache
from manyhands.workloads.text.tokenizer import (
    END_OF_TEXT,
    TextTokenizer,
    read_tokenizer,
    tokenizer_of_json,
    train_tokenizer,
)

tokenizers = pytest.importorskip("tokenizers", reason="the extra manyhands[text] is not installed")

TEXT = (
    "the cat sat on the mat.\nThe dog, the cat's friend — naïve café! «ΣΊΣΥΦΟΣ» 12345  don't\n\n\tif x:\n\t\tpass\n"
    * 4
)
BPE = train_tokenizer("bpe", [TEXT], 400)
PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "un",
    "##aff",
    "##able",
    "runs",
    ",",
    "a",
    "##b",
]


def word_pieces(folder: Path) -> TextTokenizer:
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return read_tokenizer(folder / "vocab.txt")


def test_word_pieces_by_hand(tmp_path: Path) -> None:
    tokenizer = word_pieces(tmp_path)
    assert tokenizer.encode(["The unaffable runs, ÁB", "zebra [MASK]", ""]) == [
        [5, 6, 7, 8, 9, 10, 11, 12],
        [1, 1, 1, 1],  # what looks like a special token is text
        [],
    ]
    assert tokenizer.special_ids == (0, 2, 3, 4)  # [UNK] is in texts
    assert np.flatnonzero(tokenizer.continues_word()).tolist() == [7, 8, 12]
    assert tokenizer.end_id is None
    assert tokenizer.decode([5, 6, 7, 8, 9]) == "the unaffable runs"


def test_words_of_bert_as_its_users_know_them() -> None:
    path = SHARED_DATA / "bert_base_uncased_vocab.txt"
    if not path.exists():
        pytest.skip("BERT's vocabulary is not on this machine")
    tokenizer = read_tokenizer(path)
    assert tokenizer.encode(["Hello, world! embeddings"]) == [[7592, 1010, 2088, 999, 7861, 8270, 4667, 2015]]
    assert tokenizer.vocabulary_size == 30522


def test_bytes_by_hand() -> None:
    """Without merges worth mentioning, each byte is a token, in the order of GPT-2's alphabet."""
    plain = train_tokenizer("bpe", ["x"], 257)
    (ids,) = plain.encode(["a é\n"])
    shown = [plain.library.id_to_token(one) for one in ids]
    assert shown == ["a", "Ġ", "Ã", "©", "Ċ"]
    assert (plain.vocabulary_size, plain.end_id, plain.special_ids) == (257, 0, ())
    assert plain.encode([END_OF_TEXT])[0].count(0) == 0


def test_a_trained_tokenizer_is_that_of_the_library() -> None:
    theirs = tokenizers.ByteLevelBPETokenizer()
    theirs.train_from_iterator([TEXT], vocab_size=400, special_tokens=[END_OF_TEXT], show_progress=False)
    assert theirs.get_vocab() == BPE.library.get_vocab()
    assert theirs.encode(TEXT).ids == BPE.encode([TEXT])[0]
    assert BPE.decode(BPE.encode([TEXT])[0]) == TEXT
    again = tokenizer_of_json(BPE.json)
    assert (again.sha256, again.encode([TEXT])) == (BPE.sha256, BPE.encode([TEXT]))


SIGNS = st.text(st.sampled_from(" \t\n\r  \u00a0\u3000\u0085ab'sZ1.,é\u0301ΣςЖ漢!\u200d𝄞"), max_size=30)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_remembered_words_have_the_tokens_of_the_library(kind: str) -> None:
    tokenizer = BPE if kind == "bpe" else train_tokenizer("wordpiece", [TEXT], 300)
    words = WordCache(tokenizer)
    assert words.applies

    @given(st.lists(SIGNS | st.text(max_size=12), max_size=4))
    def check(texts: list[str]) -> None:
        found = [np.frombuffer(one, "<u4").tolist() for one in words.encode([one.encode() for one in texts])]
        assert found == tokenizer.encode(texts)

    check()


def test_a_tokenizer_that_joins_words_is_asked_for_whole_texts() -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.Regex(r" ?\p{L}+| ?[^\s\p{L}]+[\r\n]*|\s+(?!\S)|\s+")  # as of GPT-4
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(split, "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(["six!\nsix!\n" * 9], trainer)
    tokenizer = tokenizer_of_json(library.to_str())
    words = WordCache(tokenizer)
    assert not words.applies
    assert tokenizer.joins_pieces()  # at spaces between words it may still be cut
    text = "six!\nfive"
    assert np.frombuffer(words.encode([text.encode()])[0], "<u4").tolist() == tokenizer.encode([text])[0]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (PIECES[1:], r"vocab.txt has no line \[PAD\]; a vocabulary of word pieces"),
        ([*PIECES, "a"], "vocab.txt, line 14 repeats 'a' of line 12"),
        ([*PIECES, "", "b"], "vocab.txt, line 14 is empty"),
    ],
)
def test_bad_vocabularies(lines: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(lines))
    with pytest.raises(DataError, match=said):
        read_tokenizer(tmp_path / "vocab.txt")


@pytest.mark.parametrize(
    "content", ["{}", "[]", "?", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}']
)
def test_bad_definitions(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer.json is not a tokenizer that `tokenizers` can read: "):
        read_tokenizer(tmp_path / "tokenizer.json")


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train is 'unigram'; allowed: bpe, wordpiece"):
        train_tokenizer("unigram", [], 1000)
    with pytest.raises(UserError, match="vocabulary is 256; bpe needs at least 257"):
        train_tokenizer("bpe", [], 256)
    with pytest.raises(UserError, match="whole words need a WordPiece tokenizer"):
        BPE.continues_word()
    with pytest.raises(UserError, match=r"the tokenizer has no token \[MASK\]"):
        BPE.require_id("[MASK]")


SHA = "ab" * 32


def shard(folder: Path, tokens: list[int], starts: list[int], dtype: str = "<u2") -> Path:
    path = folder / "shard-00000.tokens"
    with ShardWriter(path, np.dtype(dtype), SHA) as writer:
        half = len(tokens) // 2
        writer.add(np.array(tokens[:half]), [one for one in starts if one < half])
        writer.add(np.array(tokens[half:]), [one - half for one in starts if one >= half])
        writer.finish()
    return path


@pytest.mark.parametrize(("dtype", "largest"), [("<u2", 65_535), ("<u4", 70_000)])
def test_a_file_gives_back_what_was_written(dtype: str, largest: int, tmp_path: Path) -> None:
    tokens = [1, 2, largest, 4, 5, 6, 7]
    path = shard(tmp_path, tokens, [0, 3, 6], dtype)
    found = open_shard(path, SHA)
    assert found.tokens.tolist() == tokens
    assert found.starts.tolist() == [0, 3, 6]
    assert found.tokens.dtype == np.dtype(dtype)
    assert not found.tokens.flags.writeable
    raw = path.read_bytes()
    assert raw[:16] == b"MHTOKENS\x01\0\0\0" + bytes([found.header.dtype.itemsize, 0, 0, 0])
    assert len(raw) == found.header.num_bytes == 96 + -(-7 * found.header.dtype.itemsize // 8) * 8 + 24
    assert proven_shard(path, SHA) == found.header
    path.write_bytes(raw[:100] + bytes([raw[100] ^ 1]) + raw[101:])
    assert proven_shard(path, SHA) is None
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda raw: raw[:-1], r"is cut off: it has 135 bytes instead of 136; tokenize again"),
        (lambda raw: raw[:50], "is cut off: it has 50 bytes, fewer than its header"),
        (lambda raw: raw + b"x", "continues after its end: it has 137 bytes instead of 136"),
        (lambda raw: b"GARBAGE!" + raw[8:], "is not a file of tokens: it does not begin with MHTOKENS"),
        (lambda raw: raw[:8] + b"\2" + raw[9:], "has version 2 of files of tokens; this manyhands reads 1"),
        (lambda raw: raw[:12] + b"\3" + raw[13:], "is damaged: its header announces 7 tokens of 3 bytes"),
        (lambda raw: raw[:16] + b"\xff" * 8 + raw[24:], "is damaged: its header announces"),
        (lambda raw: raw[:32] + b"\0" * 32 + raw[64:], "was made by another tokenizer"),
        *((lambda raw, starts=starts: raw[:112] + struct.pack("<3q", *starts),
           r"is damaged: its documents do not start one after another; tokenize again")
          for starts in ([1, 3, 6], [0, 6, 3], [0, 3, 3], [0, 3, 7], [0, -3, 6])),
        (lambda raw: raw[:24] + bytes(8) + raw[32:112], "its documents do not start one after another"),
    ],
)  # fmt: skip
def test_another_file_is_refused(spoil: object, said: str, tmp_path: Path) -> None:
    path = shard(tmp_path, [1, 2, 3, 4, 5, 6, 7], [0, 3, 6])
    assert path.stat().st_size == 136
    path.write_bytes(spoil(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DataError, match=said):
        open_shard(path, SHA)


def test_a_writer_that_does_not_finish_leaves_nothing(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "shard-00000.tokens", np.dtype("<u2"), SHA) as writer:
        writer.add(np.array([1, 2]), [0])
    assert os.listdir(tmp_path) == []


def test_folders_that_are_not_finished_or_not_whole(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"holds no tokens: there is no tokens.json; see `manyhands tokenize`"
    ):
        TokenFiles(tmp_path)
    index = {"tokenizer": SHA}
    (tmp_path / "tokens.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="is not finished; continue it by `manyhands tokenize` with --resume"):
        TokenFiles(tmp_path)
    path = shard(tmp_path, [1, 2, 3, 4], [0, 2])
    listed = {"tokens": 4, "documents": 2, "sha256": open_shard(path).header.body}
    (tmp_path / "tokens.json").write_text(json.dumps(index | {"shards": [listed]}))
    files = pickle.loads(pickle.dumps(TokenFiles(tmp_path)))
    assert (files.num_tokens, files.num_documents) == (4, 2)
    assert [files.document(at).tolist() for at in (0, 1)] == [[1, 2], [3, 4]]
    with pytest.raises(UserError, match=r"document is 2; it must be in 0\.\.1"):
        files.document(2)
    (tmp_path / "tokens.json").write_text(json.dumps(index | {"shards": [listed | {"sha256": SHA}]}))
    with pytest.raises(DataError, match=r"is not the file that tokens.json lists; tokenize again"):
        TokenFiles(tmp_path)
