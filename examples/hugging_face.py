"""Fine-tuning with the Hugging Face Trainer on the processes of torchrun, through our backend.

    python hugging_face.py                                             # alone
    torchrun --standalone --nproc-per-node 2 hugging_face.py
    torchrun --standalone --nproc-per-node 2 hugging_face.py --model gpt2   # weights of your own, or of the hub

The Trainer uses the process group that it finds, so one line before its arguments are made is all that is ours. Without
`--model`, a small GPT-2 with random weights learns to count, and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import manyhands.c10d


def main() -> None:
    """Train, and compare the loss before and after."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a name or folder for from_pretrained")
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()

    if dist.is_torchelastic_launched():
        dist.init_process_group("manyhands")  # what `import manyhands.c10d` has registered
    set_seed(0)
    if asked.model:
        model = AutoModelForCausalLM.from_pretrained(asked.model)
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    rows = torch.arange(8).repeat(64, 1) + torch.randint(0, 50, (64, 1))  # each counts upwards from somewhere
    texts = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            max_steps=asked.steps,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=texts, eval_dataset=texts[:16])
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    if arguments.process_index == 0:
        print(
            f"{arguments.world_size} workers, {manyhands.__version__}: loss {before:.3f} before, {after:.3f} after"
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
