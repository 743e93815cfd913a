"""The interface between the loop and the model it trains, and its implementation by a transformers model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from qarl_kernels import QuantFormat
from qarl_nemo.checkpoints.optimizer_file import load_state, save_state
from qarl_nemo.layers.frozen import FrozenBase
from qarl_nemo.layers.install import InstallReport
from qarl_nemo.layers.logprobs import head_logprobs
from qarl_nemo.layers.lora import LoraSettings
from qarl_nemo.layers.norm_noise import takes_noise
from qarl_nemo.layers.weight import MasterChanges
from qarl_nemo.refit.publish import Layer, publish_layers
from qarl_nemo.train.engine_attention import use_attention
from qarl_nemo.train.engine_forward import checkpoint_layers
from qarl_nemo.train.optimizer import MasterOptimizer
from qarl_nemo.train.packing import Packing
from qarl_nemo.train.rollouts import Rollouts
from qarl_nemo.train.trained import load_trained, save_trained


class PolicyOptimizer(Protocol):
    """Steps the model's weights by the gradients that `backward` accumulated.

    Attributes:
        lr: learning rate of the next step.
        skipped_in_a_row: number of skipped steps since the last one that was applied.
    """

    lr: float
    skipped_in_a_row: int

    def accumulate(self) -> None:
        """Add the gradients of one backward to those since the last step."""

    def step(self, *, finite: bool = True) -> tuple[float, bool]:
        """Clip and apply the gradients unless they or the loss are not finite; return (norm, whether applied)."""

    def reset_moments(self) -> None:
        """Forget the gradients of all steps so far."""


class NoisyNorm(Protocol):
    """A norm of the model.

    Attributes:
        weight: [H].
        noise: [H] FP32, added to the weight in the forward; None adds nothing.
    """

    weight: nn.Parameter
    noise: Tensor | None


class Policy(Protocol):
    """A model in training: in this process, or on many ranks that each hold a part of it and work on part of the rows.

    Attributes:
        changes: counts the changes of its weights; the learner bumps it after every applied step.
        optimizer: steps its weights.
    """

    changes: MasterChanges
    optimizer: PolicyOptimizer

    def response_logprobs(
        self, rollouts: Rollouts, *, temperature: float, replay_routes: bool
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs of the response tokens, and the policy's entropy where it chose them.

        Args:
            rollouts: B responses with N tokens.
            temperature: the rollouts' sampling temperature.
            replay_routes: use the experts the rollout engine chose, if it returned any.

        Returns:
            logprobs [N] FP32 with a graph, entropy [N] FP32 without, in nats, response after response.
        """

    def own_rows(self, rows: Tensor) -> Tensor:
        """Return the rows that this rank works on, as many as on every other rank."""

    def sum_over_ranks(self, tensors: Sequence[Tensor]) -> None:
        """Add the other ranks' values in place."""

    def layers(self, fmt: QuantFormat) -> Iterable[Layer]:
        """Return the weights as the rollout engine will serve them in `fmt`, layer by layer."""

    def execute(self, fmt: QuantFormat) -> None:
        """Execute `fmt` from now on, which differs from the format before in its grid alone."""

    def noisy_norms(self) -> Mapping[str, NoisyNorm]:
        """Return the norms that take noise, by the published names of their weights."""

    def table(self) -> list[dict[str, Any]]:
        """Return one line for each module with weights: `InstallRow`'s fields."""

    def save(self, folder: Path) -> None:
        """Write the model to `folder/model`, as a Hugging Face directory, and the optimizer beside it.

        Of a model with a frozen base what is trained is written alone.
        """

    def load_optimizer(self, folder: Path) -> None:
        """Restore the optimizer that `save` wrote, and what is trained on a frozen base; other models were loaded."""


class TransformersPolicy:
    """A whole transformers model with aligned layers, in this process.

    Sequences are packed: no padding reaches the model.

    Args:
        model: the model with aligned layers.
        report: what `install` returned.
        optimizer: steps the parameters that are trained.
        attention: the kernel that attends, `torch` or `engine`.
        activation_checkpointing: keep only each layer's input for the backward, which computes the rest again.
        logprob_chunk_size: how many positions' logits exist at a time.
        lora: settings of the model's adapters, if it has any.
        base: what their files say that they are made for.

    Raises:
        ValueError: the attention kernel does not run here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        report: InstallReport,
        optimizer: MasterOptimizer,
        *,
        attention: str = "torch",
        activation_checkpointing: bool = False,
        logprob_chunk_size: int = 1024,
        lora: LoraSettings | None = None,
        base: str = "",
    ) -> None:
        self.lora, self.base = lora, base
        self.model = model
        self.report = report
        self.optimizer = optimizer
        self.changes = report.changes
        self.frozen = FrozenBase.of(model)
        self.logprob_chunk_size = logprob_chunk_size
        use_attention(model, attention)
        if activation_checkpointing:
            checkpoint_layers(model, report.routes.same_again)

    def response_logprobs(
        self, rollouts: Rollouts, *, temperature: float, replay_routes: bool
    ) -> tuple[Tensor, Tensor]:
        """See `Policy`."""
        mask, first = rollouts.attention_mask, rollouts.num_prompt_columns
        packing = Packing.of(mask.sum(-1))
        routes = rollouts.routes[mask] if replay_routes and rollouts.routes is not None else None
        with self.report.routes.replay(routes):
            hidden = self.model.model(
                input_ids=rollouts.input_ids[mask][None],
                position_ids=packing.positions[None],
                use_cache=False,
                packing=packing,
            ).last_hidden_state[0]
        # Each token's place in the packed row; the one before it predicts it.
        places = mask.flatten().cumsum(0).view_as(mask)[:, first:][rollouts.response_mask] - 1
        tokens = rollouts.input_ids[:, first:][rollouts.response_mask]
        rows = hidden.index_select(0, places - 1)
        return head_logprobs(rows, self.model.lm_head.weight, tokens, temperature, chunk_size=self.logprob_chunk_size)

    def own_rows(self, rows: Tensor) -> Tensor:
        """Return all rows."""
        return rows

    def sum_over_ranks(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: there is one rank."""

    def layers(self, fmt: QuantFormat) -> list[Layer]:
        """See `Policy`."""
        return publish_layers(self.report.weights, self.frozen.refitted(self.model), fmt)

    def execute(self, fmt: QuantFormat) -> None:
        """See `Policy`."""
        for weight in self.report.weights.values():
            weight.execute(fmt)

    def noisy_norms(self) -> Mapping[str, NoisyNorm]:
        """See `Policy`."""
        named: Any = ((f"{name}.weight", module) for name, module in self.model.named_modules())
        return {name: module for name, module in named if takes_noise(name)}

    def table(self) -> list[dict[str, Any]]:
        """See `Policy`."""
        return [asdict(row) for row in self.report.rows]

    def save(self, folder: Path) -> None:
        """See `Policy`."""
        if self.frozen:
            save_trained(self.model, folder / "model", self.lora, self.base)
        else:
            self.model.save_pretrained(folder / "model")
        save_state(self.optimizer, folder / "optimizer.pt")

    def load_optimizer(self, folder: Path) -> None:
        """See `Policy`."""
        if self.frozen:
            load_trained(self.model, folder / "model")
        load_state(self.optimizer, folder / "optimizer.pt", self.model.device)
