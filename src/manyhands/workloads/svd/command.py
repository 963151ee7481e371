"""`manyhands train svd` and `compare svd`: truncated SVD and PCA of a matrix in a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.errors import num_of
from manyhands.workloads import compiled_workload as seam
from manyhands.workloads.compiled_workload import TableRows, TrainEnd
from manyhands.workloads.svd.options import SvdOptions
from manyhands.workloads.task_options import narrowed, option

if TYPE_CHECKING:
    from manyhands.data.matrix_files import MatrixFile
    from manyhands.engine.training import Keeping
    from manyhands.observe.draw.bars import Bars

_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class _Matrix(seam.TableOptions, SvdOptions):
    path: Path | None = option(
        None,
        "matrix as CSV or LIBSVM (plain or gzip), npy or Parquet",
        metavar="FILE",
        shown="scikit-learn's digits",
    )

    @property
    def rows(self) -> MatrixFile | None:
        from manyhands.workloads.svd.model import opened_rows

        return None if self.path is None else opened_rows(self.path, self.table_reading())


@dataclass(frozen=True, kw_only=True)
class _TrainSvd(seam.WorkerOptions, _Matrix):
    pass


@dataclass(frozen=True, kw_only=True)
class _CompareSvd(_Matrix):
    strategies: str = option("single; allreduce; mirrored", "what to compare")
    workers: int = option(2, "processes")


@contextmanager
def _compared(asked: _CompareSvd, _out: Path) -> Iterator[seam.ComparedTask]:
    # Imported here, as below, so that help texts do not wait for torch and compiled code.
    from manyhands.observe.draw.bars import Bars
    from manyhands.workloads.svd.task import SvdTask
    from manyhands.workloads.svd.training import stored

    options = narrowed(SvdOptions, asked)
    with Bars() as bars, stored(asked.rows, options, bars) as matrix:
        yield seam.ComparedTask(task=SvdTask(matrix=matrix, svd=options, workers=asked.workers))


def _train(asked: _TrainSvd, keep: Keeping, bars: Bars) -> TrainEnd:
    from manyhands.workloads.svd.model import SVD_FILE
    from manyhands.workloads.svd.training import train_svd

    how: dict[str, Any] = {"strategy": asked.strategy, "workers": asked.workers}
    result = train_svd(asked.rows, narrowed(SvdOptions, asked), bars=bars, keep=keep, **how)
    model, file = result.model, keep.out / SVD_FILE
    model.save(file)
    summary = {
        **result.full_summary(),
        "rows": model.rows,
        "rank": len(model.singular_values),
        "center": model.mean is not None,
        "singular_values": model.singular_values.tolist(),
        "explained_variance": model.explained_variance.tolist() if model.mean is not None else None,
        "explained_ratio": model.explained_ratio.tolist(),
        "error": model.error,
        "converged": model.converged,
        "passes": model.passes,
        **how,
        "model": str(file),
    }
    passes = f"{model.passes} pass{'es' if model.passes != 1 else ''}"
    predict = ("predict", keep.out, asked.path or "FILE", "--out", "coordinates.txt")
    return TrainEnd(
        summary=summary,
        shown=_shown(summary, passes),
        notes=[
            *([f"{num_of(result.bad_rows, 'bad row')} of {asked.path} left out"] if result.bad_rows else []),
            *([] if model.converged or result.interrupted else [_not_exact(summary, passes, asked)]),
        ],
        interrupted=f"the result is from {passes}" * result.interrupted,
        next={"rows projected on the components": predict, "the page of the run": ("show", keep.out)},
    )


def _shown(summary: dict[str, Any], passes: str) -> list[str | TableRows]:
    kind = "sparse" if summary["is_sparse"] else "dense"
    rows: list[tuple[str, ...]] = []
    total = 0.0
    for value, ratio in zip(summary["singular_values"], summary["explained_ratio"], strict=True):
        total += ratio
        rows.append((str(len(rows) + 1), f"{value:.6g}", f"{ratio:.2%}", f"{total:.2%}"))
    part = "variance" if summary["center"] else "squares"
    more = f"and {summary['rank'] - _SHOWN} more, which together have {total:.2%}"
    return [
        f"{'PCA' if summary['center'] else 'SVD'} · rank {summary['rank']} · {summary['strategy']} · "
        f"{num_of(summary['workers'], 'worker')} · {summary['rows']:,} × {summary['columns']:,} {kind} · {passes} in "
        f"{summary['train_seconds']:.2f} s ({summary['seconds']:.1f} s with reading and starting) · "
        f"error {summary['error']:.1e}",
        TableRows(head=("", "singular value", f"share of {part}", "so far"), rows=rows[:_SHOWN]),
        *([more] if summary["rank"] > _SHOWN else []),
        f"components  {summary['model']}",
    ]


def _not_exact(summary: dict[str, Any], passes: str, asked: _TrainSvd) -> str:
    values = summary["singular_values"]
    if values[-1] < 1e-5 * values[0]:
        why = "the smallest singular values are little more than rounding errors of the largest; use a smaller rank"
        return why if asked.center else f"{why}, or --center if the mean of the columns is that large"
    return (
        f"after {passes} the singular values have an error of about {summary['error']:.1e}, more than --tolerance "
        f"{asked.tolerance:g}; continue with --resume and more --passes"
    )


SVD = seam.CompiledWorkload(
    name="svd",
    help="Decompose a matrix: its largest singular values and their components (truncated SVD, PCA).",
    options_type=_TrainSvd,
    train=_train,
    files=("svd.safetensors",),
    compare_help="Compare strategies on a truncated SVD.",
    compared_type=_CompareSvd,
    compared=_compared,
)
