"""Scripts as users of Lightning, Hugging Face and Accelerate write them, on Gloo and on our backend: the same weights.

Run by `processes.integrations_worker`; each function `check_...` is one program, run twice on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES = 22  # 11 for each of two workers: an uneven last batch, and an odd one to accumulate


class Workers(Protocol):
    """The processes of a run, as one of them sees it."""

    rank: int
    world: int
    folder: Path

    def using(self, backend: str) -> contextlib.AbstractContextManager[None]:
        """What torchrun sets is set for a new process group, which is gone at the end."""


Train = Callable[[str], list[torch.Tensor]]


def on_both(workers: Workers, train: Train) -> None:
    """What `train` returns under the name of each backend: the same bits, as there are two workers."""
    results = []
    for backend in ("gloo", "manyhands"):
        with workers.using(backend):
            torch.manual_seed(0)
            results.append(train(backend))
            assert dist.get_backend() == backend
            assert dist.get_world_size() == workers.world
    wanted, ours = results
    assert len(ours) == len(wanted) > 0
    for number, (got, want) in enumerate(zip(ours, wanted, strict=True)):
        assert torch.equal(got, want), (number, got, want)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def moved(model: nn.Module) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(model.parameters(), network().parameters(), strict=True))


# Lightning.


def regressor() -> Any:
    import lightning

    class Regressor(lightning.LightningModule):
        """Logs a float and, as Lightning does by itself for an epoch, integers."""

        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
            self.log("largest", loss.detach(), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Regressor()


def fit(workers: Workers, strategy: Any, **settings: Any) -> tuple[Any, Any]:
    """A short run of Lightning's Trainer, with the sampler that it puts in by itself."""
    import lightning

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=workers.world,
        strategy=strategy,
        max_epochs=2,
        enable_model_summary=False,
        default_root_dir=workers.folder,
        **quiet,
        **settings,
    )
    model = regressor()
    trainer.fit(model, DataLoader(data(), batch_size=4, shuffle=True), DataLoader(data(), batch_size=4))
    sampler: Any = trainer.train_dataloader.sampler
    assert isinstance(sampler, DistributedSampler)
    return trainer, model


def check_lightning_trainer(workers: Workers) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    def train(backend: str) -> list[torch.Tensor]:
        strategy = DDPStrategy(process_group_backend=backend)
        trainer, model = fit(workers, strategy, accumulate_grad_batches=2, gradient_clip_val=0.5)
        logged = [
            trainer.callback_metrics[name] for name in ("loss_epoch", "loss_step", "largest", "validation")
        ]
        assert moved(model.net)
        return [*weights(model), *logged]

    on_both(workers, train)


def check_lightning_trainer_with_a_static_graph_and_a_grad_scaler(workers: Workers) -> None:
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy

    def train(backend: str) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)  # overflows at first
        strategy = DDPStrategy(process_group_backend=backend, static_graph=True)
        _, model = fit(workers, strategy, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        assert moved(model.net)
        assert scaler.get_scale() < 2.0**20
        return [*weights(model), torch.tensor(scaler.get_scale())]

    on_both(workers, train)


def check_lightning_fsdp2(workers: Workers) -> None:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Sharded(type(regressor())):  # type: ignore[misc]
        def configure_model(self) -> None:
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def train(backend: str) -> list[torch.Tensor]:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=workers.world,
            strategy=ModelParallelStrategy(
                data_parallel_size=workers.world, tensor_parallel_size=1, process_group_backend=backend
            ),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Sharded()
        trainer.fit(model, DataLoader(data(), batch_size=4))
        return [parameter.full_tensor().detach() for parameter in model.parameters()]

    on_both(workers, train)


# Fabric.


@contextlib.contextmanager
def fabric(workers: Workers, strategy: Any, **settings: Any) -> Iterator[Any]:
    import lightning

    one = lightning.Fabric(accelerator="cpu", devices=workers.world, strategy=strategy, **settings)
    one.launch()
    yield one


def check_fabric(workers: Workers) -> None:
    """Accumulation without synchronising, clipping, reductions and gathers of its own."""
    from lightning.fabric.strategies import DDPStrategy

    def train(backend: str) -> list[torch.Tensor]:
        with fabric(workers, DDPStrategy(process_group_backend=backend)) as one:
            model = one.setup_module(network())
            optimizer = one.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.01))
            loader = one.setup_dataloaders(DataLoader(data(), batch_size=4, shuffle=True))
            assert isinstance(loader.sampler, DistributedSampler)
            seen = []
            for number, (inputs, targets) in enumerate(loader):
                with one.no_backward_sync(model, enabled=number % 2 == 0):
                    loss = F.mse_loss(model(inputs), targets)
                    one.backward(loss)
                if number % 2:
                    one.clip_gradients(model, optimizer, max_norm=0.1)
                    optimizer.step()
                    optimizer.zero_grad()
                seen += [
                    one.all_reduce(loss.detach().clone(), reduce_op="mean"),
                    one.all_gather(loss.detach()),
                ]
            counted = one.all_reduce(torch.tensor(SAMPLES + workers.rank), reduce_op="mean")
            assert one.broadcast({"from": workers.rank}, src=1) == {"from": 1}
            one.barrier()
            assert moved(model.module)
            return [*weights(model), *seen, counted]

    on_both(workers, train)


def check_fabric_joins_uneven_inputs_and_scales_gradients(workers: Workers) -> None:
    from lightning.fabric.plugins import MixedPrecision
    from lightning.fabric.strategies import DDPStrategy

    def train(backend: str) -> list[torch.Tensor]:
        precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
        strategy = DDPStrategy(process_group_backend=backend)
        with fabric(workers, strategy, plugins=[precision]) as one:
            model = one.setup_module(network())
            optimizer = one.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
            inputs, targets = data().tensors
            with Join([model._forward_module]):
                for _ in range(2 + 2 * workers.rank):
                    optimizer.zero_grad()
                    one.backward(F.mse_loss(model(inputs[workers.rank :: 2]), targets[workers.rank :: 2]))
                    optimizer.step()
            assert moved(model.module)
            return weights(model)

    on_both(workers, train)


def check_fabric_fsdp2(workers: Workers) -> None:
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(model: nn.Module, mesh: Any) -> nn.Module:
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    def train(backend: str) -> list[torch.Tensor]:
        strategy = ModelParallelStrategy(shard, workers.world, 1, process_group_backend=backend)
        with fabric(workers, strategy) as one:
            model = one.setup_module(network())
            optimizer = one.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.01))
            for inputs, targets in one.setup_dataloaders(DataLoader(data(), batch_size=4)):
                one.backward(F.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            found = [parameter.full_tensor().detach() for parameter in model.parameters()]
            assert any(not torch.equal(a, b) for a, b in zip(found, network().parameters(), strict=True))
            return found

    on_both(workers, train)


# Accelerate.


def check_accelerate(workers: Workers) -> None:
    """Its samplers, accumulation, clipping, gathers, and uneven inputs."""
    from accelerate import Accelerator

    def train(backend: str) -> list[torch.Tensor]:
        dist.init_process_group(backend)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(data(), batch_size=2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        assert isinstance(model, DistributedDataParallel)
        seen = []
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            seen += [accelerator.gather(loss.detach()), accelerator.reduce(loss.detach(), "mean")]
            seen.append(accelerator.gather_for_metrics(targets))
        assert accelerator.gather_for_metrics([workers.rank], use_gather_object=True) == list(
            range(workers.world)
        )
        accelerator.wait_for_everyone()
        assert moved(model.module)
        return [*weights(model), *seen]

    on_both(workers, train)


def check_accelerate_joins_uneven_inputs_and_scales_gradients(workers: Workers) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import DataLoaderConfiguration

    def train(backend: str) -> list[torch.Tensor]:
        dist.init_process_group(backend)
        accelerator = Accelerator(
            cpu=True,
            kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)],
            dataloader_config=DataLoaderConfiguration(even_batches=False),
        )
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, loader = accelerator.prepare(model, DataLoader(data(), batch_size=5))
        assert len(list(loader)) == 3 - workers.rank, "five batches for two workers"
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        with Join([model]):  # accelerator.join_uneven_inputs does so for GPUs, and nothing for CPUs
            for inputs, targets in loader:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = F.mse_loss(model(inputs), targets)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        assert moved(model.module)
        return weights(model)

    on_both(workers, train)


# Hugging Face.


def check_hugging_face_trainer(workers: Workers) -> None:
    """A small randomly initialised model: accumulation, clipping, evaluation, gathered predictions."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    generator = torch.Generator().manual_seed(3)
    texts = [
        {"input_ids": row, "labels": row} for row in torch.randint(0, 50, (SAMPLES, 8), generator=generator)
    ]

    def train(backend: str) -> list[torch.Tensor]:
        dist.init_process_group(backend)
        arguments = transformers.TrainingArguments(
            output_dir=str(workers.folder / backend),
            use_cpu=True,
            max_steps=4,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            eval_strategy="steps",
            eval_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=5,
        )
        assert arguments.world_size == workers.world
        transformers.set_seed(4)
        model = transformers.GPT2LMHeadModel(config)
        before = weights(model)
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=texts, eval_dataset=texts[:7]
        )
        result = trainer.train()
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        after = weights(model)
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        assert len(losses) == 2
        predicted = torch.as_tensor(trainer.predict(texts[:5]).predictions)
        assert len(predicted) == 5
        return [*after, predicted, torch.tensor([result.training_loss, *losses])]

    on_both(workers, train)


def check_fully_shard_of_a_hugging_face_model(workers: Workers) -> None:
    import transformers
    from torch.distributed.fsdp import fully_shard

    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    generator = torch.Generator().manual_seed(6)
    batches = torch.randint(0, 50, (2, workers.world, 3, 8), generator=generator)

    def train(backend: str) -> list[torch.Tensor]:
        dist.init_process_group(backend)
        transformers.set_seed(4)
        model = transformers.GPT2LMHeadModel(config)
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for batch in batches[:, workers.rank]:
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.full_tensor().detach() for parameter in model.parameters()]

    on_both(workers, train)
