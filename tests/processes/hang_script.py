"""A script whose worker 1 goes its own way at step 5, or never joins; how, is its argument."""

import sys
import time
from typing import Any

import torch

import manyhands as mh


def go_astray(group: Any, how: str) -> None:
    if how == "sleeps":
        time.sleep(1e9)
    if how == "other call":
        group.barrier()


def main(how: str) -> None:
    if how == "never joins" and sys.orig_argv[-1] == "worker 1":
        time.sleep(1e9)
    with mh.join() as group:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = group.prepare(model, optimizer)
        for step in range(10):
            astray = group.rank == 1 and step == 5
            if astray:
                go_astray(group, how)
            model(torch.ones(2, 4)).sum().backward()
            if not (astray and how == "skips its step"):
                optimizer.step()
            optimizer.zero_grad()


main(sys.argv[1])
