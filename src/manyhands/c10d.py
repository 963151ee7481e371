"""The public name of the torch.distributed backend: `import manyhands.c10d`, then `init_process_group("manyhands")`."""

from manyhands.interop.c10d import BACKEND, ManyhandsGroup, Options, new_group

__all__ = ["BACKEND", "ManyhandsGroup", "Options", "new_group"]
