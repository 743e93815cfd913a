"""The interface between the loop and the model it trains, and its implementation by a transformers model."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qarl_kernels import QuantFormat
from qarl_nemo.checkpoints.optimizer_file import load_state, save_state
from qarl_nemo.layers.install import InstallReport
from qarl_nemo.layers.weight import MasterChanges
from qarl_nemo.refit.publish import Layer, publish_layers
from qarl_nemo.train.optimizer import MasterOptimizer


class PolicyOptimizer(Protocol):
    """Steps the model's weights by the gradients that `backward` accumulated.

    Attributes:
        lr: learning rate of the next step.
        skipped_in_a_row: number of skipped steps since the last one that was applied.
    """

    lr: float
    skipped_in_a_row: int

    def step(self, *, finite: bool = True) -> tuple[float, bool]:
        """Clip and apply the gradients unless they or the loss are not finite; return (norm, whether applied)."""


class Policy(Protocol):
    """A model in training: in this process, or on many ranks that each hold a part of it and work on part of the rows.

    Attributes:
        changes: counts the changes of its weights; the learner bumps it after every applied step.
        optimizer: steps its weights.
    """

    changes: MasterChanges
    optimizer: PolicyOptimizer

    def logits(self, input_ids: Tensor, places: Tensor, routes: Tensor | None) -> Tensor:
        """Return the next-token logits at these positions.

        Args:
            input_ids: [B, S]; columns after a sequence's last token are ignored.
            places: [B, R] columns whose next token is predicted.
            routes: [B, S, L, k] experts to replay, or None.

        Returns:
            [B, R, V] in the model's dtype, with a graph.
        """

    def own_rows(self, rows: Tensor) -> Tensor:
        """Return the rows that this rank works on, as many as on every other rank."""

    def sum_over_ranks(self, tensors: Sequence[Tensor]) -> None:
        """Add the other ranks' values in place."""

    def layers(self, fmt: QuantFormat) -> Iterable[Layer]:
        """Return the weights as the rollout engine will serve them in `fmt`, layer by layer."""

    def table(self) -> list[dict[str, Any]]:
        """Return one line for each module with weights: `InstallRow`'s fields."""

    def save(self, folder: Path) -> None:
        """Write the model to `folder/model`, as a Hugging Face directory, and the optimizer beside it."""

    def load_optimizer(self, folder: Path) -> None:
        """Restore the optimizer that `save` wrote; the model has been loaded."""


class TransformersPolicy:
    """A whole transformers model with aligned layers, in this process.

    Args:
        model: the model with aligned layers.
        report: what `install` returned.
        optimizer: steps the model's parameters.
    """

    def __init__(self, model: PreTrainedModel, report: InstallReport, optimizer: MasterOptimizer) -> None:
        self.model = model
        self.report = report
        self.optimizer = optimizer
        self.changes = report.changes

    def logits(self, input_ids: Tensor, places: Tensor, routes: Tensor | None) -> Tensor:
        """See `Policy`."""
        with self.report.routes.replay(None if routes is None else routes.flatten(0, 1)):
            hidden = self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.model.lm_head(torch.take_along_dim(hidden, places[..., None], dim=1))

    def own_rows(self, rows: Tensor) -> Tensor:
        """Return all rows."""
        return rows

    def sum_over_ranks(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: there is one rank."""

    def layers(self, fmt: QuantFormat) -> list[Layer]:
        """See `Policy`."""
        return publish_layers(self.report.weights, self.model.named_parameters(), fmt)

    def table(self) -> list[dict[str, Any]]:
        """See `Policy`."""
        return [asdict(row) for row in self.report.rows]

    def save(self, folder: Path) -> None:
        """See `Policy`."""
        self.model.save_pretrained(folder / "model")
        save_state(self.optimizer, folder / "optimizer.pt")

    def load_optimizer(self, folder: Path) -> None:
        """See `Policy`."""
        load_state(self.optimizer, folder / "optimizer.pt", self.model.device)
