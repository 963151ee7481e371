"""`manyhands tokenize`: text files into a folder of tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from manyhands.cli import command_options
from manyhands.cli.command_options import argument, from_options, json_option, option
from manyhands.errors import num_of
from manyhands.strategy import parse_size


@dataclass(frozen=True)
class _TokenizeOptions:
    files: list[Path] = argument(
        ..., "Text in UTF-8, or JSON lines (.jsonl), plain or .gz.", metavar="FILE..."
    )
    out: Path = option(..., "Folder for the tokens.")
    train: str | None = option(None, "Train a tokenizer on the text: bpe (of bytes) or wordpiece.")
    vocabulary: int = option(8192, "Tokens to train.", min=1)
    train_size: str = option("1GiB", "Text to train on, from the beginning.")
    tokenizer: Path | None = option(None, "Use this tokenizer.json, or this list of word pieces (vocab.txt).")
    split: str = option("file", "A document of plain text is a file, a line or a paragraph.")
    field: str = option("text", "Field of JSON lines that has the text.")
    workers: int | None = option(None, "Processes that encode.", min=1, shown="one a core")
    memory: str = option("2GiB", "Limit for all processes together.")
    shard: str = option("64MiB", "Text in each file of tokens.")
    resume: bool = option(False, "Continue, and keep the files that are finished.")
    json_file: Path | None = json_option()


@from_options
def tokenize_command(asked: _TokenizeOptions) -> None:
    """Turn text into files of tokens, with a tokenizer of your own or a new one, in several processes."""
    from manyhands.workloads.text.documents import Documents
    from manyhands.workloads.text.tokenizing import TokenizerChoice, tokenize

    found = tokenize(
        Documents(paths=asked.files, split=asked.split, field=asked.field),
        TokenizerChoice(
            path=asked.tokenizer,
            train=asked.train,
            vocabulary=asked.vocabulary,
            train_bytes=parse_size(asked.train_size),
        ),
        asked.out,
        workers=asked.workers or len(os.sched_getaffinity(0)),
        memory_bytes=parse_size(asked.memory),
        shard_bytes=parse_size(asked.shard),
        resume=asked.resume,
    )
    summary = found.summary()
    kept = f", {num_of(found.kept, 'file')} kept" if found.kept else ""
    print(
        f"{summary['tokens']:,} tokens in {num_of(summary['documents'], 'document')} and "
        f"{num_of(len(found.shards), 'file')}{kept} · vocabulary {summary['vocabulary']:,} · "
        f"{found.text_bytes / max(1, summary['tokens']):.2f} bytes a token · {found.text_bytes / 1e6:,.1f} MB of text "
        f"in {found.seconds:.1f} s"
    )
    print(f"tokens  {asked.out}")
    command_options.write_json(asked.json_file, summary)
