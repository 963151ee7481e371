"""Documents of files: split as asked for, cut where no token is cut, and refused with the place of what is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from manyhands.errors import DataError, UserError
from manyhands.workloads.text import documents
from manyhands.workloads.text.documents import Documents


def whole(path: Path, **settings: str) -> list[str]:
    """The documents, put together from their pieces."""
    found: list[bytes] = []
    for piece in Documents(paths=[path], **settings):
        if piece.begins:
            found.append(b"")
        found[-1] += piece.text
    return [one.decode() for one in found]


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        ("file", ["one\ntwo\r\n\r\nthree ä\n \n\n\nfour\n"]),
        ("line", ["one", "two", "three ä", "four"]),
        ("paragraph", ["one\ntwo", "three ä", "\nfour"]),
    ],
)
@pytest.mark.parametrize("read_bytes", [1, 3, 1 << 20])
def test_plain_text(
    split: str, wanted: list[str], read_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_READ_BYTES", read_bytes)
    content = "one\ntwo\r\n\r\nthree ä\n \n\n\nfour\n".encode()
    for name, raw in (
        ("a.txt", content),
        ("b.gz", gzip.compress(content)),
        ("c.txt", b"\xef\xbb\xbf" + content),
    ):
        (tmp_path / name).write_bytes(raw)
        assert [one.strip() for one in whole(tmp_path / name, split=split)] == [one.strip() for one in wanted]


def test_json_lines(tmp_path: Path) -> None:
    rows = [{"text": "one\ntwo"}, {"text": ["three", " ", "four"]}, {"text": ""}]
    content = "\n\n".join(map(json.dumps, rows)).encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert whole(tmp_path / name) == ["one\ntwo", "three", "four"]


def test_a_long_document_comes_in_pieces(tmp_path: Path) -> None:
    text = "".join(f"wörd{number}{'  ' * (number % 7 == 0)} " for number in range(60_000))
    (tmp_path / "long.txt").write_text(text)
    pieces = list(Documents(paths=[tmp_path / "long.txt"]))
    assert b"".join(piece.text for piece in pieces).decode() == text
    assert len(pieces) > 5
    assert max(len(piece.text) for piece in pieces) <= 3 * documents.PIECE_BYTES
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.text[:1] == b" " != piece.text[1:2] for piece in pieces[1:])


@pytest.mark.parametrize("read_bytes", [1, 2, 3, 5, 1 << 20])
def test_another_encoding_is_named_with_its_offset(
    read_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_READ_BYTES", read_bytes)
    path = tmp_path / "latin.txt"
    good = "grüße €𝄞 ".encode()
    for content in (good + "über".encode("latin-1"), good + "€".encode()[:2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"latin.txt, byte {len(good)}: not UTF-8 text: .*; convert it"):
            whole(path)
        path.write_bytes(gzip.compress(content))
        with pytest.raises(DataError, match=rf"uncompressed byte {len(good)}: not UTF-8"):
            whole(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        (b'{"other": "a"}', "line 1 has no field 'text'; name the field of the text by --field"),
        (b"[]", "line 1 is not a JSON object"),
        (b'{"text": [1]}', "line 1: 'text' is neither a text nor a list of texts"),
        (
            rb'{"text": "a\ud800"}',
            "line 1: 'text' is not text: it has half of a surrogate pair at character 1",
        ),
        (b"[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_bad_json_lines(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=said):
        whole(tmp_path / "a.jsonl")


def test_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * (3 << 20))
    with pytest.raises(DataError, match=r"1\.0 MiB of text without a space; try --split line"):
        whole(tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_bytes(b'"' + b"x" * (70 << 20))
    with pytest.raises(DataError, match=r"a line is longer than 64.0 MiB"):
        whole(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"missing\.txt cannot be read: No such file"):
        whole(tmp_path / "missing.txt")
    with pytest.raises(
        UserError, match="split is 'lines'; allowed: file, line, paragraph; did you mean 'line'"
    ):
        Documents(paths=[tmp_path / "a.txt"], split="lines")
    with pytest.raises(UserError, match="name at least one"):
        Documents(paths=[])
