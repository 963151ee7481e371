"""Files of tokens as the data of `gpt` and `bert`: whether they fit the model, and which rows are held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import Subset

from manyhands.data.batches import BatchedDataset
from manyhands.errors import DataError, UserError, num_of
from manyhands.workloads.language.presets import SizedOptions
from manyhands.workloads.text.token_files import TokenFiles
from manyhands.workloads.text.tokenizer import TOKENIZER_FILE, TextTokenizer, read_tokenizer


class TokenParts(NamedTuple):
    """Rows to learn from and rows to measure on, by their numbers in the folder; and what a run of them keeps."""

    training: Subset[Any]
    evaluation: Subset[Any]
    files: Mapping[str, str]


def token_parts(
    options: SizedOptions, rows_of: Callable[[TokenFiles, int], BatchedDataset], pad_id: int | None = None
) -> TokenParts:
    """The rows that `rows_of` makes of the folder `options.data`; the last tenth of them at most is held out.

    UserError where they do not fit the model; `pad_id` is the token that its embedding takes for padding, if any.
    """
    assert options.data is not None, "the caller looked"
    if options.path is not None:
        raise UserError(f"path is {options.path} and data is {options.data}; leave one out")
    length, context = options.length or options.sizes.context, options.sizes.context
    if length > context:
        raise UserError(f"length is {length}, but the model has {context} positions; give at most {context}")
    files = TokenFiles(options.data)
    _require_fit(files.tokenizer, options, pad_id)
    rows: Any = rows_of(files, length)
    held_out = min(len(rows) // 10, options.evaluation_bytes // length)
    if not held_out:
        raise DataError(
            f"{options.data} has {num_of(len(rows), 'row')} of {length} tokens, of which a tenth and at most "
            f"evaluation_bytes={options.evaluation_bytes} tokens are held out for evaluation: none; give more text or "
            "a shorter length"
        )
    learned = len(rows) - held_out
    return TokenParts(
        training=Subset(rows, range(learned)),
        evaluation=Subset(rows, range(learned, len(rows))),
        files={TOKENIZER_FILE: files.tokenizer.json},
    )


def _require_fit(tokenizer: TextTokenizer, options: SizedOptions, pad_id: int | None) -> None:
    known, whose = options.sizes.vocabulary, f"the tokenizer of {options.data}"
    if tokenizer.vocabulary_size > known:
        raise UserError(
            f"{whose} has {tokenizer.vocabulary_size} tokens, but the model knows {known}; leave vocabulary out, or "
            "tokenize with the tokenizer of the model"
        )
    if pad_id is not None and tokenizer.require_id("[PAD]") != pad_id:
        raise UserError(
            f"{whose} has [PAD] as token {tokenizer.id_of('[PAD]')}; this model needs it as {pad_id}"
        )
    own = options.init / TOKENIZER_FILE if options.init is not None else None
    if own is not None and own.is_file():
        expected, found = (one.library.get_vocab() for one in (read_tokenizer(own), tokenizer))
        if expected != found:
            raise UserError(
                f"{whose} is not that of the checkpoint, {own}; tokenize the text with --tokenizer {own}"
            )
