"""Exports a trained model as a `torch.export` program, which runs without manyhands and the model's source.

The written file is read back and compared with the module on the same inputs; a mismatch is an error, and leaves no
file.
"""

from __future__ import annotations

import io
import math
import warnings

import torch

from manyhands.data.store.atomic import write_atomically
from manyhands.errors import ManyhandsError, UserError
from manyhands.serving.opening import open_predictor
from manyhands.workloads.exporting import Export, ExportAsked, trained_steps
from manyhands.workloads.predictor import ModulePredictor

__all__ = ["PROGRAM_FILE", "export_program"]

PROGRAM_FILE = "model.pt2"
_BATCHES = (1, 2, 5)  # batch sizes that are compared; none is 3, with which the program is traced
_MADE_FROM = 3
_EQUAL_TO = 1e-5


def export_program(asked: ExportAsked) -> Export:
    """Write the program of a run's module, for any batch size, to `out` or RUN/model.pt2."""
    if asked.precision != "fp32" or asked.test is not None:
        raise UserError(
            "--format torch-export writes the module as it is: leave --precision and --test out, or write safetensors"
        )
    predictor = open_predictor(asked.run)
    if not isinstance(predictor, ModulePredictor):
        raise UserError(
            f"{asked.run} is of the task {predictor.task!r}, whose model is no PyTorch module; leave --format out"
        )
    file = asked.target(PROGRAM_FILE)
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about LSTM's list of weights, which export sets and restores
        example, sizes = (predictor.example_batch(_MADE_FROM),), ({0: torch.export.Dim("batch")},)
        torch.export.save(torch.export.export(predictor.model, example, dynamic_shapes=sizes), stream)
    content = stream.getvalue()
    difference = _largest_difference(predictor, content)
    if not difference <= _EQUAL_TO:
        raise ManyhandsError(
            f"the exported program differs from the module by {difference:.3g}, more than {_EQUAL_TO:g}: nothing was "
            "written; mh.load(RUN) gives the module"
        )
    write_atomically(file, [content])
    return Export(
        path=file,
        precision="fp32",
        steps=trained_steps(asked.run),
        num_bytes=len(content),
        full_bytes=sum(value.nbytes for value in predictor.model.state_dict().values()),
        largest_difference=difference,
    )


def _largest_difference(predictor: ModulePredictor[object], content: bytes) -> float:
    program = torch.export.load(io.BytesIO(content)).module()
    largest = 0.0
    with torch.inference_mode():
        for count in _BATCHES:
            batch = predictor.example_batch(count, seed=count)
            difference = (program(batch) - predictor.model(batch)).abs().max().item()
            largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest
