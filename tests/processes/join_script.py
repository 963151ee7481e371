"""One worker of a group on several hosts: join_script.py SIZE STEPS PAUSE; tells each step, and what ended it."""

import sys
import time

import torch

import manyhands as mh
from manyhands.engine.dynamo import defer

defer()  # torch's compiler takes seconds to import, and nothing is compiled


def main(size: int, steps: int, pause_s: float) -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(size, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with mh.join() as group:
        model, optimizer = group.prepare(model, optimizer)
        try:
            for step in range(steps):
                model(torch.ones(2, size)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                print(f"step {step}", flush=True)
                time.sleep(pause_s)
        except mh.ManyhandsError as error:
            print(f"ended: {error}", flush=True)
            raise
    print("done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
