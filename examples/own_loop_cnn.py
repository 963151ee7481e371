"""A CNN on handwritten digits, in a loop of its own: one script alone, on several workers, and on several hosts.

    python own_loop_cnn.py
    manyhands launch own_loop_cnn.py --workers 4
    manyhands launch own_loop_cnn.py --workers 4 --strategy central
    torchrun --standalone --nproc-per-node 4 own_loop_cnn.py

All four end with the same weights. The digits come with scikit-learn, so nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images of 8×8 to train on, 360 to test with."""
    bundle = load_digits()
    images = torch.from_numpy(bundle.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(bundle.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def cnn() -> nn.Module:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 2 * 2, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of images whose most likely class is right."""
    images, labels = data.tensors
    return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    """Train, and say how well it went."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    asked = parser.parse_args()

    torch.manual_seed(0)
    train, test = digits()
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    loader = DataLoader(train, batch_size=asked.batch_size, shuffle=True)

    with mh.join() as group:
        model, optimizer, loader = group.prepare(model, optimizer, loader)
        for epoch in range(asked.epochs):
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            right = accuracy(model, test)
            group.print(f"epoch {epoch + 1}: loss {group.mean(loss):.4f}, test accuracy {right:.4f}")


if __name__ == "__main__":
    main()
