"""A drop-in backend for torch.distributed: `import manyhands.c10d` and `init_process_group("manyhands")`.

Collectives on CPU tensors of one host go through shared memory. CUDA tensors fall back to NCCL, and groups that span
hosts to Gloo. See docs/drop-in.md.
"""

from manyhands.interop.c10d.torch_group import BACKEND, ManyhandsGroup, Options, new_group

__all__ = ["BACKEND", "ManyhandsGroup", "Options", "new_group"]
