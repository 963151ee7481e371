"""What the processes of tests import, imported once; nothing here may compute (see `manyhands.places.local.forking`).

Not `manyhands.c10d`, as importing it makes torch know a backend, nor `manyhands.engine.preload`, which puts torch's
compiler off: a script decides on both for itself.
"""

from importlib import import_module

import typer.rich_utils  # noqa: F401

from manyhands.cli.main import COMMANDS
from manyhands.strategies.registry import STRATEGIES

for _home in STRATEGIES.values():
    _home.load_value()
    _home.load_training()
    _home.load_training(compiled=True)
for _name, _command in COMMANDS.items():
    if _name != "bench":  # which imports `manyhands.c10d`
        import_module(f"manyhands.cli.{_command.target.partition(':')[0]}")
for _name in (
    "engine.session",
    "engine.fitting",
    "lab.compare.run_comparison",
    "lab.compare.compare_report",
    "observe.draw.page",
    "observe.draw.page",
    "interop.own_loop.join",
    "engine.loaded",
):
    import_module(f"manyhands.{_name}")
