"""The server of torch.distributed.rpc in the server benchmark: `python -m manyhands.lab.bench.server_rpc PLAN`.

What it does is in `server_peers`, whose functions the other process calls here; it is killed when that one is done.
"""

from __future__ import annotations

import json
import signal
import sys

from manyhands.lab.bench.server_peers import join_rpc
from manyhands.places.local.parent import die_with_parent

if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    die_with_parent(plan["parent_pid"], signal.SIGKILL)
    join_rpc(plan["store"], 1, plan["timeout_s"])
    signal.pause()
