"""`torch._dynamo` is not imported by eager training, and is the real one for whoever asks more of it."""

import json
import subprocess
import sys
import textwrap

# Forks itself for every script that it is given: each has torch, and of its compiler what is of others.
_EACH = """
import json, os, sys, traceback
import sympy, torch
import torch.distributed.fsdp, torch._functorch._aot_autograd.schemas, torch.fx.experimental.symbolic_shapes
from manyhands.engine import dynamo
assert "torch._dynamo" not in sys.modules
print(flush=True)
for script in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            exec(script, {"__name__": "__main__", "sys": sys, "dynamo": dynamo})
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        print("-----", flush=True)
        os._exit(status)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(1)
"""


def _tell(*scripts: str) -> list[str]:
    """What each script printed."""
    given = json.dumps([textwrap.dedent(script) for script in scripts])
    done = subprocess.run([sys.executable, "-c", _EACH, given], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.lstrip("\n").split("-----\n")[:-1]


# Trains with every optimizer of torch, keeps and loads its state, and prints the digits of the weights.
_TRAIN = """
import warnings
import torch

if {deferred}:
    dynamo.defer()
    assert dynamo.is_deferred()
warnings.simplefilter("ignore")
made = 0
for name, kind in sorted(vars(torch.optim).items()):
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or name in ("Optimizer", "SparseAdam"):
        continue
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4, bias=False), torch.nn.Tanh(), torch.nn.Linear(4, 2, bias=False))
    optimizer = kind(net.parameters(), lr=0.01)
    x = torch.randn(8, 5)
    for _ in range(3):
        def loss():
            optimizer.zero_grad()
            value = net(x).square().sum()
            value.backward()
            return value
        optimizer.step(loss)
        optimizer.load_state_dict(optimizer.state_dict())
    print(name, [p.detach().double().sum().item().hex() for p in net.parameters()])
    made += 1
assert made >= 10
assert ("torch._dynamo.convert_frame" in sys.modules) != {deferred}
"""


_COMPILES = """
import torch
dynamo.defer()
stand_in = torch._dynamo
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
optimizer.zero_grad()
x = torch.randn(4, 3)
gradient = torch.func.grad(lambda weight, row: torch.nn.functional.linear(row, weight).square().sum())
rows = torch.func.vmap(gradient, (None, 0))(net.weight.detach(), x)
assert torch.allclose(rows[:, 0], 2 * (x @ net.weight.T.detach()) * x)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel = torch.nn.parallel.DistributedDataParallel(net)
parallel(x).sum().backward()
torch.distributed.destroy_process_group()
autograd, mode = torch._dynamo.compiled_autograd, torch._dynamo.utils.get_optimize_ddp_mode()
assert dynamo.is_deferred()

compiled = torch.compile(net, backend="eager")
assert torch.equal(compiled(x), net(x))
assert not dynamo.is_deferred()
assert torch._dynamo is sys.modules["torch._dynamo"] is not stand_in
assert stand_in.config is torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert not any("manyhands" in type(finder).__module__ for finder in sys.meta_path)
assert autograd.reset is sys.modules["torch._dynamo.compiled_autograd"].reset
assert torch._dynamo.utils.get_optimize_ddp_mode() == mode
with autograd._disable():
    assert torch._dynamo.compiled_autograd.active_disable_ctx

# what was decorated before is left alone by the compiler from now on, as torch means it
try:
    torch.compile(lambda: optimizer.state_dict(), backend="eager", fullgraph=True)()
except torch._dynamo.exc.Unsupported:
    pass
else:
    raise AssertionError("state_dict was compiled")
"""

_ASKED = [
    "import torch._dynamo.config as config",
    "from torch._dynamo import config",
    "import torch._dynamo as d; d.reset_code = print; assert sys.modules['torch._dynamo'].reset_code is print; "
    "config = d.config",
]

_ONCE = """
dynamo.defer()
{asked}
import torch
assert not dynamo.is_deferred()
assert config is sys.modules["torch._dynamo.config"] is torch._dynamo.config
assert config.__spec__.loader is not None and config.__spec__.origin == config.__file__
assert torch._dynamo.eval_frame.config is config, "two copies"
"""

_IMPORTED_ALREADY = """
import torch._dynamo
real = torch._dynamo
dynamo.defer()
assert torch._dynamo is real and not dynamo.is_deferred()
"""


_MADE_TO_BE_LOOKED_AT = """
import torch
import manyhands as mh

task = mh.Task(
    model=lambda: torch.nn.Linear(3, 1),
    loss=lambda model, batch: model(batch).sum(),
    data=torch.ones(4, 3),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
)
model = task.model()
optimizer = dynamo.optimizer_of(task, model)
assert len(optimizer.param_groups[0]["params"]) == 2
assert "torch._dynamo" not in sys.modules
assert not hasattr(torch.optim.Optimizer.add_param_group.__wrapped__, "__dynamo_disable"), "torch is as it was"
optimizer.step()
assert "torch._dynamo.convert_frame" in sys.modules
"""


def test_every_optimizer_steps_as_ever_without_it_and_who_asks_for_more_gets_the_real_one_once() -> None:
    scripts = [*(_ONCE.format(asked=asked) for asked in _ASKED), _IMPORTED_ALREADY, _MADE_TO_BE_LOOKED_AT]
    trained = (_TRAIN.format(deferred=deferred) for deferred in (True, False))
    deferred, imported, *report = _tell(*trained, _COMPILES, *scripts)
    assert deferred == imported
    assert report == [""] * (1 + len(scripts)), "each ran to its end, and had nothing to say"
