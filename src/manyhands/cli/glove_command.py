"""`manyhands glove eval|neighbours|analogy`: what word vectors know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from manyhands.cli import command_options
from manyhands.cli.command_options import argument, command_group, from_options, json_option, option
from manyhands.cli.runs import print_rows
from manyhands.errors import UserError
from manyhands.workloads.compiled_workload import TableRows
from manyhands.workloads.glove.command import neighbours_table

glove_app = command_group()

_FORMS = "Vectors in Stanford's text format, or word2vec's text or binary format."
_VectorsFile = Annotated[Path, typer.Argument(metavar="VECTORS", help=_FORMS)]


@dataclass(frozen=True)
class _EvaluateOptions:
    vectors: Path = argument(..., _FORMS, metavar="VECTORS")
    analogies: Path | None = option(
        None, "Analogies of four words; ': name' starts a section.", metavar="FILE"
    )
    similarity: Path | None = option(None, "Two words and a score per line, with tabs.", metavar="FILE")
    json_file: Path | None = json_option("Also write the result to this file.")


@glove_app.command("eval")
@from_options
def _evaluate(asked: _EvaluateOptions) -> None:
    """Measure the vectors on analogies and on word similarities judged by people."""
    from manyhands.observe.draw.bars import Bars
    from manyhands.workloads.glove.analogies import (
        ask_analogies,
        compare_similarity,
        read_pairs,
        read_questions,
    )
    from manyhands.workloads.glove.vector_files import Vectors

    analogies, similarity = asked.analogies, asked.similarity
    if analogies is None and similarity is None:
        raise UserError("glove eval needs --analogies FILE, --similarity FILE or both")
    questions = read_questions(analogies) if analogies is not None else None
    pairs = read_pairs(similarity) if similarity is not None else None
    loaded = Vectors.load(asked.vectors)
    found: dict[str, Any] = {"words": len(loaded), "dim": loaded.dim}
    if questions is not None:
        with Bars() as bars:
            score = ask_analogies(loaded, questions, bars)
        rows = [*score.sections, score.semantic, score.syntactic, score.total]
        found["analogies"] = {
            row.name: {"asked": row.asked, "known": row.known, "right": row.right, "accuracy": row.accuracy}
            for row in rows
        }
        head = ("analogies", "right", "known", "asked", "accuracy")
        cells = [
            (row.name, str(row.right), str(row.known), str(row.asked), f"{100 * row.accuracy:.2f} %")
            for row in rows
        ]
        print_rows(TableRows(head=head, rows=cells))
    if pairs is not None:
        agreement = compare_similarity(loaded, pairs)
        found["similarity"] = {
            "spearman": agreement.correlation,
            "asked": agreement.asked,
            "known": agreement.known,
        }
        print(
            f"similarity  Spearman {agreement.correlation:.4f}  {agreement.known} of {agreement.asked} pairs known"
        )
    command_options.write_json(asked.json_file, found)


@glove_app.command("neighbours")
def _neighbours(
    vectors: _VectorsFile,
    words: Annotated[list[str], typer.Argument(metavar="WORD...")],
    top: Annotated[int, typer.Option(help="Neighbours per word.")] = 10,
) -> None:
    """List the words nearest to each WORD, by cosine."""
    from manyhands.workloads.glove.vector_files import Vectors

    loaded = Vectors.load(vectors)
    print_rows(neighbours_table({word: loaded.neighbours(word, top) for word in words}))


@glove_app.command("analogy")
def _analogy(
    vectors: _VectorsFile,
    expression: Annotated[str, typer.Argument(help="Words with + and -, such as 'king - man + woman'.")],
    top: Annotated[int, typer.Option(help="Number of words.")] = 10,
) -> None:
    """List the words nearest to a sum of words, without the words in it."""
    from manyhands.workloads.glove.vector_files import Vectors

    print_rows(neighbours_table({expression: Vectors.load(vectors).combine(expression, top)}))
