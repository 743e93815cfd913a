"""NeMo-RL's Megatron policy worker with an aligned forward and packed refits.

Everything is in an undecorated class: Ray pickles the methods of a decorated class by value.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers import megatron_policy_worker
from torch import Tensor

from qarl_kernels import get_format
from qarl_nemo.nemo.alignment import Alignment, bump_on_step, release
from qarl_nemo.nemo.publish import publish_shards
from qarl_nemo.nemo.rl.aligned_model import aligned_provider, executing, require_aligned
from qarl_nemo.nemo.rl.engines import RayEngines
from qarl_nemo.nemo.rl.formats import executed_format, served_format
from qarl_nemo.nemo.rl.learner_push import ColocatedSender, push_from_all
from qarl_nemo.refit.manifest import Manifest
from qarl_nemo.refit.publish import RefitUpdate
from qarl_nemo.refit.send import CollectiveSender, Sender


class QarlMegatronPolicyWorkerImpl(megatron_policy_worker.MegatronPolicyWorkerImpl):
    """A policy worker whose training and log-probability forwards execute what its rollout engine executes.

    Args:
        config: NeMo-RL's policy block, with the `qarl:` block in it.
        arguments: of NeMo-RL's worker.
    """

    def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
        qarl = config["qarl"]
        self.served = served_format(qarl)
        self.alignment = Alignment(
            executed_format(qarl), tuple(qarl["targets"]), qarl["backward"], qarl["keep_operand"]
        )
        self._collective_sender: CollectiveSender | None = None
        with aligned_provider(megatron_policy_worker, self.alignment):
            super().__init__(config, *arguments, **named)
        aligned = require_aligned([self.model], self.alignment)
        print(f"qarl: rank {self.rank} executes {aligned}; rollouts are {self.served.name}", flush=True)
        if self.optimizer is not None:
            bump_on_step(self.optimizer, self.alignment.version)

    @torch.no_grad()
    def qarl_refit(self, engines: list[Any], num_ranks: int, version: int) -> dict[str, float]:
        """Let all engines serve this policy's weights; called on every rank.

        Args:
            engines: handles of the vLLM workers that own an engine.
            num_ranks: of all engines.
            version: the number the engines will know these weights by.

        Returns:
            Seconds of each phase as `<phase>_s`, `total_s` and `num_bytes`.

        Raises:
            ValueError: weights hold NaN or Inf.
            RuntimeError: the engines refused the update, or one broke off.
        """
        started = time.perf_counter()
        with self._serving():
            tensors = dict(publish_shards([self.model], vocab_size=self._vocab_size()))
            update = RefitUpdate(Manifest.of(tensors, version=version, fmt=self.served.name), tensors)
            publish_s = time.perf_counter() - started
            figures = push_from_all(update, RayEngines(engines), self._sender(tensors, num_ranks))
        return figures | {"publish_s": publish_s, "total_s": figures["total_s"] + publish_s}

    def prepare_refit_info(self) -> dict[str, Any]:
        """Tell NeMo-RL's own refit nothing: the engines know what they take."""
        return {}

    def init_collective(self, *_: Any, **__: Any) -> None:
        """Open no connection for NeMo-RL's own refit; packed refits bring theirs."""

    def offload_after_refit(self) -> None:
        """Drop the quantized weights as well: they are made anew from the masters that come back."""
        release([self.model])
        # What engines have read is free now; it was lent to them.
        torch.cuda.ipc_collect()
        super().offload_after_refit()

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Swap the reference model in, unquantized."""
        with executing([self.model], get_format("bf16")), super().use_reference_model():
            yield

    @contextmanager
    def _serving(self) -> Iterator[None]:
        if self.alignment.format == self.served:
            yield
            return
        with executing([self.model], self.served):
            yield

    def _sender(self, tensors: dict[str, Tensor], num_ranks: int) -> Sender:
        if self.is_generation_colocated:
            return ColocatedSender(tensors)
        if self._collective_sender is None:
            self._collective_sender = CollectiveSender(
                num_ranks,
                torch.device("cuda", torch.cuda.current_device()),
                host=ray.util.get_node_ip_address(),
                timeout_s=600.0,
            )
        return self._collective_sender

    def _vocab_size(self) -> int:
        return self.megatron_bridge.hf_pretrained.config.vocab_size


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class QarlMegatronPolicyWorker(QarlMegatronPolicyWorkerImpl):
    """What `plugin.policy_factory` puts in the place of NeMo-RL's `MegatronPolicyWorker`."""
