"""A Megatron model on one rank or several as a `Policy` that a learner trains, row by row."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor, nn

from qarl_formats import BASELINE
from qarl_kernels import QuantFormat, get_format
from qarl_nemo.checkpoints.optimizer_file import load_state, save_state
from qarl_nemo.layers.logprobs import score_in_chunks
from qarl_nemo.megatron.alignment import Alignment, aligned_weights
from qarl_nemo.megatron.publish import publish_layers
from qarl_nemo.names import parameter_name
from qarl_nemo.refit.publish import Layer
from qarl_nemo.train.megatron.optimizer import MegatronStepper
from qarl_nemo.train.rollouts import Rollouts, columns_from_first_token


class MegatronPolicy:
    """An aligned GPTModel and its optimizer. Every method is called on all ranks, with the same arguments.

    Data-parallel ranks share the rows of a batch; tensor- and expert-parallel ranks share the model.

    Args:
        model: the model without wrappers, its weights loaded.
        alignment: what it executes.
        optimizer: steps its weights.
        vocab_size: the Hugging Face model's vocabulary size.
        save_model: writes Hugging Face's parameters, by name, to a folder; called on the first rank only.
        logprob_chunk_size: how many positions' logits exist in FP32 at a time.
    """

    def __init__(
        self,
        model: GPTModel,
        alignment: Alignment,
        optimizer: MegatronStepper,
        *,
        vocab_size: int,
        save_model: Callable[[dict[str, Tensor], Path], None],
        logprob_chunk_size: int,
    ) -> None:
        self.model = model
        self.alignment = alignment
        self.optimizer = optimizer
        self.changes = alignment.changes
        self._vocab_size = vocab_size
        self._save_model = save_model
        self._logprob_chunk_size = logprob_chunk_size

    def response_logprobs(
        self, rollouts: Rollouts, *, temperature: float, replay_routes: bool
    ) -> tuple[Tensor, Tensor]:
        """See `Policy`."""
        # With all padding on the right, where no token attends, causal attention needs no mask for it.
        columns, first = columns_from_first_token(rollouts.attention_mask), rollouts.num_prompt_columns
        routes = rollouts.routes if replay_routes else None
        if routes is not None:
            routes = torch.take_along_dim(routes, columns[..., None, None], dim=1)
        places = torch.argsort(columns, dim=-1)[:, first - 1 : -1]
        logits = self._logits(rollouts.input_ids.gather(1, columns), places, routes)
        tokens, shape = rollouts.input_ids[:, first:], places.shape
        scores = score_in_chunks(
            logits.flatten(0, 1), tokens.flatten(), temperature, chunk_size=self._logprob_chunk_size
        )
        logprobs, entropy = (values.view(shape)[rollouts.response_mask] for values in scores)
        return logprobs, entropy

    def _logits(self, input_ids: Tensor, places: Tensor, routes: Tensor | None) -> Tensor:
        # [B, R, V] at places [B, R], in the model's dtype; routes [B, S, L, k] have -1 where the router chooses itself.
        # Pad the columns, because sequence-parallel ranks hold equal parts of them.
        extra = -input_ids.shape[1] % parallel_state.get_tensor_model_parallel_world_size()
        input_ids = nn.functional.pad(input_ids, (0, extra))
        if routes is not None:
            routes = nn.functional.pad(routes, (0, 0, 0, 0, 0, extra), value=-1)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        with self._replay(routes):
            logits = self.optimizer.model(input_ids, positions, _causal_mask(positions))
        return torch.take_along_dim(logits[..., : self._vocab_size], places[..., None], dim=1)

    @contextmanager
    def _replay(self, routes: Tensor | None) -> Iterator[None]:
        if routes is None:
            yield
            return
        # Megatron's order of tokens is [S, B], with S split over sequence-parallel ranks.
        size, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        own = routes.transpose(0, 1).chunk(size)[rank].flatten(0, 1).long()
        replays = [layer.mlp.router.router_replay for layer in self.model.decoder.layers]
        for replay, chosen in zip(replays, own.unbind(1), strict=True):
            replay.set_target_indices(chosen)
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
        finally:
            for replay in replays:
                replay.clear_router_replay_action()
                replay.clear_indices()

    def own_rows(self, rows: Tensor) -> Tensor:
        """Return this rank's share of the rows.

        Args:
            rows: [M] indices.

        Returns:
            [M / data parallel ranks].

        Raises:
            ValueError: the ranks' shares would not be equal, so their collectives would not match.
        """
        size = parallel_state.get_data_parallel_world_size()
        if len(rows) % size:
            raise ValueError(f"{size} data parallel ranks cannot share {len(rows)} responses equally")
        return rows.chunk(size)[parallel_state.get_data_parallel_rank()]

    def sum_over_ranks(self, tensors: Sequence[Tensor]) -> None:
        """Add the other data-parallel ranks' values in place."""
        group = parallel_state.get_data_parallel_group()
        if group.size() == 1:
            return
        for tensor in tensors:
            total = tensor.int() if tensor.dtype == torch.bool else tensor
            dist.all_reduce(total, group=group)
            tensor.copy_(total)

    def layers(self, fmt: QuantFormat) -> Iterator[Layer]:
        """Yield the weights as the rollout engine will serve them in `fmt`, each layer complete on every rank."""
        return publish_layers([self.optimizer.model], vocab_size=self._vocab_size, fmt=fmt)

    def execute(self, fmt: QuantFormat) -> None:
        """See `Policy`."""
        for weight in aligned_weights([self.model]):
            weight.execute(fmt)

    def noisy_norms(self) -> dict[str, Any]:
        """See `Policy`."""
        norms = {}
        for layer in self.model.decoder.layers:
            prefix = f"model.layers.{layer.layer_number - 1}."
            norms[f"{prefix}input_layernorm.weight"] = layer.input_layernorm
            norms[f"{prefix}post_attention_layernorm.weight"] = layer.pre_mlp_layernorm
        return norms

    def table(self) -> list[dict[str, Any]]:
        """Return one line for each aligned weight of this rank, with the fields of `layers.install.InstallRow`."""
        fmt = self.alignment.format
        quantized = fmt.is_quantized
        return [
            {
                "name": weight.name,
                "kind": "experts" if ".experts." in weight.name else "attention",
                "shape": f"{len(weight.masters)} x {list(weight.masters[0].shape)}",
                "format": fmt.name,
                "quantized": quantized,
                "reason": "" if quantized else f"format {fmt.name}",
            }
            for weight in aligned_weights([self.model])
        ]

    def save(self, folder: Path) -> None:
        """Write the whole model, and every rank's part of the optimizer, to a folder that all ranks see."""
        layers = self.layers(get_format(BASELINE))
        whole = {parameter_name(name): tensor for layer in layers for name, tensor in layer.items()}
        if dist.get_rank() == 0:
            self._save_model(whole, folder / "model")
        save_state(self.optimizer, folder / f"optimizer_rank{dist.get_rank()}.pt")
        dist.barrier()

    def load_optimizer(self, folder: Path) -> None:
        """Restore what `save` wrote on the same number of ranks."""
        path = folder / f"optimizer_rank{dist.get_rank()}.pt"
        load_state(self.optimizer, path, next(self.model.parameters()).device)


def _causal_mask(positions: Tensor) -> Tensor | None:
    # Transformer-Engine masks by itself; Megatron's local attention needs a mask.
    if positions.is_cuda:
        return None
    length = positions.shape[1]
    return ~torch.ones(1, 1, length, length, dtype=torch.bool, device=positions.device).tril()
