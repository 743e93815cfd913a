"""NeMo-RL's Megatron policy worker with an aligned forward and packed refits.

Everything is in undecorated classes, because Ray pickles the methods of a decorated class by value.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import ray
import torch
from megatron.core import parallel_state
from nemo_rl.models.megatron import setup as megatron_setup
from nemo_rl.models.megatron import train as megatron_train
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers import megatron_policy_worker

from qarl_formats import BASELINE, QuantFormat, get_format
from qarl_nemo.megatron.alignment import Alignment, bump_on_step
from qarl_nemo.megatron.param_groups import inner_optimizers
from qarl_nemo.megatron.publish import publish_layers, publish_update
from qarl_nemo.megatron.stacked_muon import stack_muon
from qarl_nemo.megatron.step_guard import StepGuard
from qarl_nemo.moments import reset_moments
from qarl_nemo.nemo_rl.aligned_model import aligned_provider, executing, require_aligned
from qarl_nemo.nemo_rl.block import NemoQarlConfig
from qarl_nemo.nemo_rl.engines import TIMEOUT_S, RayEngines
from qarl_nemo.nemo_rl.entropy import entropy_of_logits
from qarl_nemo.nemo_rl.gpu_sharing import SharesGpu
from qarl_nemo.nemo_rl.loss import PREFIX
from qarl_nemo.nemo_rl.memory_metrics import PhaseMemory, fullest
from qarl_nemo.nemo_rl.optimizer_dtypes import with_torch_dtypes
from qarl_nemo.nemo_rl.stages import Stages
from qarl_nemo.nemo_rl.start_together import wait_for_engines
from qarl_nemo.nemo_rl.update_aware import update_aware_optimizer
from qarl_nemo.refit.colocated import ColocatedSender, push_from_all
from qarl_nemo.refit.exchange import gather_plain, waiting_group
from qarl_nemo.refit.flips import FlippedCodes
from qarl_nemo.refit.ipc import in_one_piece
from qarl_nemo.refit.publish import Layer, RefitUpdate, StreamedUpdate, Update
from qarl_nemo.refit.send import CollectiveSender, Sender

# The share of a GPU's free memory that a refit may take if it is sent as a whole.
_WHOLE_SHARE = 0.5


class _Published(NamedTuple):
    version: int
    update: Update
    sender: Sender
    seconds: dict[str, float]


class QarlMegatronPolicyWorkerImpl(SharesGpu):
    """A policy worker whose training and log-probability forwards execute what its rollout engine executes.

    Args:
        config: NeMo-RL's policy block, which contains the `qarl:` block.
        arguments: passed to NeMo-RL's worker.
    """

    def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
        wait_for_engines()
        qarl = NemoQarlConfig.model_validate(config["qarl"])
        self.alignment = Alignment(
            qarl.executed_format, qarl.targets, qarl.backward, qarl.keep_operand, engine_rounding=qarl.engine_rounding
        )
        self._stages, self._logs_grid = Stages(qarl, self.alignment), qarl.schedule is not None
        self._collective_sender: CollectiveSender | None = None
        self._flips = FlippedCodes(self.served)
        self._always_layerwise = qarl.layerwise_refit
        self._layerwise: bool | None = None
        self._published_bytes = 0
        self._published: _Published | None = None
        self._memory = PhaseMemory()
        update_aware = update_aware_optimizer(megatron_setup, qarl.update_aware_scale, qarl.targets)
        with aligned_provider(megatron_policy_worker, self.alignment), update_aware:
            super().__init__(with_torch_dtypes(config), *arguments, **named)
        aligned = require_aligned([self.model], self.alignment)
        print(f"qarl: rank {self.rank} executes {aligned}; rollouts are {self.served.name}", flush=True)
        if self.optimizer is not None:
            if stacked := stack_muon(self.optimizer):
                print(f"qarl: rank {self.rank} steps {stacked} matrices in stacks", flush=True)
            self._guard = StepGuard([self.model], self.optimizer, qarl.max_skipped_steps)
            # Outside of the guard, which makes FP32 copies of gradients.
            bump_on_step(self.optimizer, self.alignment.changes, [self.model])

    @property
    def served(self) -> QuantFormat:
        """What the engines are sent."""
        return self._stages.served

    def train(self, data: Any, loss_fn: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Train as NeMo-RL does, but skip and count steps that are not finite.

        Args:
            data: this rank's responses.
            loss_fn: our loss, or one of NeMo-RL's, which does not say which response was at fault.
            arguments: passed to NeMo-RL's worker.
            named: passed likewise.

        Returns:
            NeMo-RL's results, with the count and what each phase of the step held as further metrics.

        Raises:
            RuntimeError: `qarl.max_skipped_steps` steps in a row were skipped.
        """
        before, self._guard.nonfinite = self._guard.num_skipped, getattr(loss_fn, "nonfinite", [])
        self._guard.seconds = 0.0
        recording = getattr(loss_fn, "recording", None)
        # All ranks take part in it.
        with_entropy = nullcontext() if recording is None else entropy_of_logits(megatron_train)
        if recording is not None and not _records():
            loss_fn.recording = recording = None
        if self._stages.reset_is_due:
            # Only now, because moments that are on their way to the host may not change.
            self._carrier.finish_reload()
            reset_moments(inner_optimizers(self.optimizer))
            self._stages.reset_is_due = False
        with self._memory.phase("update"), with_entropy:
            results = super().train(data, loss_fn, *arguments, **named)
        if recording is not None:
            recording.write()
        metrics = {"skipped_steps": float(self._guard.num_skipped - before), "optimizer_s": self._guard.seconds}
        metrics |= fullest(gather_plain(self._memory.take(), waiting_group()))
        # NeMo-RL adds up what the data-parallel ranks return, so only the first one returns them.
        first = parallel_state.get_data_parallel_rank() == 0
        results["all_mb_metrics"] |= {PREFIX + key: [value if first else 0.0] for key, value in metrics.items()}
        return results

    def prepare_for_lp_inference(self, *arguments: Any, **named: Any) -> None:
        """Prepare as NeMo-RL does, and note what was held during the rollouts before."""
        with self._memory.phase("rollout"):
            pass  # A learner allocates nothing while engines generate.
        super().prepare_for_lp_inference(*arguments, **named)

    def get_logprobs(self, *arguments: Any, **named: Any) -> Any:
        """Compute log-probabilities as NeMo-RL does, and note what that takes."""
        with self._memory.phase("prev_logprobs"):
            return super().get_logprobs(*arguments, **named)

    @torch.no_grad()
    def qarl_publish(self, version: int, step: int) -> None:
        """Publish this policy's weights while engines wake up, if there is room; called on every rank.

        Args:
            version: the version number of these weights.
            step: the step that samples with them.

        Raises:
            ValueError: weights hold NaN or Inf.
        """
        self._published = None
        # What earlier refits took is what engines and published weights take together.
        whole = self._layerwise is False and self._refit_fits(self._free_before_refit)
        if all(gather_plain(whole, waiting_group())):
            with self._memory.phase("refit"):
                self._enter_stage(step)
                self._published = self._publish_whole(version)

    @torch.no_grad()
    def qarl_refit(self, engines: list[Any], num_ranks: int, version: int, step: int) -> dict[str, float]:
        """Make all engines serve this policy's weights; called on every rank, when colocated engines are awake.

        Args:
            engines: handles of the vLLM workers that own an engine.
            num_ranks: ranks of all engines together.
            version: the version number of these weights.
            step: the step that samples with them.

        Returns:
            Seconds of each phase as `<phase>_s`, of `qarl_publish` too, `total_s` and `num_bytes`; with a schedule
            `grid_bits`; the first rank adds its `FlippedCodes`.

        Raises:
            ValueError: weights hold NaN or Inf.
            RuntimeError: the engines refused the update, or one broke off.
        """
        published, self._published = self._published, None
        with self._memory.phase("refit"):
            if published is None or published.version != version:
                self._enter_stage(step)
                published = self._publish(version, num_ranks)
            figures = push_from_all(published.update, RayEngines(engines), published.sender)
            self.refitted = True
            figures |= published.seconds | {"total_s": figures["total_s"] + published.seconds["publish_s"]}
            figures |= {"grid_bits": float(self.served.grid_bits)} if self._logs_grid else {}
            return figures | self._flips.figures()

    def prepare_refit_info(self) -> dict[str, Any]:
        """Give NeMo-RL's own refit no information: the engines know what they take."""
        return {}

    def init_collective(self, *_: Any, **__: Any) -> None:
        """Open no connection for NeMo-RL's own refit; packed refits bring theirs."""

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Swap the reference model in, unquantized."""
        with executing([self.model], get_format(BASELINE)), super().use_reference_model():
            yield

    def _enter_stage(self, step: int) -> None:
        entered = self._stages.enter([self.model], step)
        if entered is not None:
            self._flips.enter(self.served)
            print(f"qarl: rank {self.rank}: {entered}", flush=True)

    def _publish(self, version: int, num_ranks: int) -> _Published:
        if self.is_generation_colocated and not self._is_layerwise():
            return self._publish_whole(version)
        started = time.perf_counter()
        if self.is_generation_colocated:
            lender = ColocatedSender(timeout_s=TIMEOUT_S)
            update, sender = self._streamed(version, rehearsed=True, lend=lender.lend), lender
        else:
            update, sender = self._streamed(version), self._collective(num_ranks)
        return _Published(version, update, sender, {"publish_s": time.perf_counter() - started})

    def _publish_whole(self, version: int) -> _Published:
        # Engines convert from the learner's memory, which must therefore hold everything until they are done.
        started = time.perf_counter()
        sender = ColocatedSender(timeout_s=TIMEOUT_S)
        # Copied, because Megatron frees its own memory to offload parameters, and exported memory must stay.
        layers = map(in_one_piece, self._watch(self._layers()))
        update = RefitUpdate.of(layers, self.served, version=version)
        made = time.perf_counter()
        sender.share(update.layers)
        ended = time.perf_counter()
        return _Published(version, update, sender, {"publish_s": ended - started, "share_s": ended - made})

    def _streamed(self, version: int, **options: Any) -> StreamedUpdate:
        return publish_update(
            [self.model],
            self.served,
            vocab_size=self._hf_vocab_size(),
            version=version,
            watch=self._watch,
            **options,
        )

    def _watch(self, layers: Iterable[Layer]) -> Iterator[Layer]:
        # Every rank sees every layer; the first one reports.
        step = self._stages.step
        return iter(layers) if self.rank or step is None else self._flips.watch_step(step, layers)

    def _is_layerwise(self) -> bool:
        if self._always_layerwise is not None:
            self._layerwise = self._always_layerwise
            return self._layerwise
        if not self._published_bytes:
            self._published_bytes = sum(tensor.nbytes for layer in self._layers() for tensor in layer.values())
        # Asked anew each time: before the first update there is no optimizer yet, and later it may stay.
        free = min(gather_plain(torch.cuda.mem_get_info()[0], waiting_group()))
        layerwise = self._published_bytes > _WHOLE_SHARE * free
        if layerwise != self._layerwise:
            print(f"qarl: rank {self.rank} refits {'layer by layer' if layerwise else 'as a whole'}", flush=True)
        self._layerwise = layerwise
        return layerwise

    def _collective(self, num_ranks: int) -> CollectiveSender:
        if self._collective_sender is None:
            device, host = torch.device("cuda", torch.cuda.current_device()), ray.util.get_node_ip_address()
            self._collective_sender = CollectiveSender(num_ranks, device, host=host, timeout_s=TIMEOUT_S)
        return self._collective_sender

    def _layers(self) -> Iterator[Layer]:
        return publish_layers([self.model], vocab_size=self._hf_vocab_size(), fmt=self.served)

    def _hf_vocab_size(self) -> int:
        return self.megatron_bridge.hf_pretrained.config.vocab_size


def _records() -> bool:
    # Of the ranks that compute the loss, one.
    return (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class QarlMegatronPolicyWorker(QarlMegatronPolicyWorkerImpl):
    """The worker that `plugin.policy_factory` puts in place of NeMo-RL's `MegatronPolicyWorker`."""
