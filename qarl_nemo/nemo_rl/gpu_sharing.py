"""How a policy worker leaves its GPU to the engine beside it, and takes it back."""

import gc
from typing import Any

import torch
from nemo_rl.models.policy.workers import megatron_policy_worker

from qarl_nemo.megatron.alignment import release
from qarl_nemo.megatron.offload import (
    Offload,
    leaving_bytes,
    optimizer_tensors,
    parameter_buffers,
    reload_for_update,
    reserve_parameters,
)
from qarl_nemo.memory import GIB
from qarl_nemo.nemo_rl.memory_metrics import others_bytes
from qarl_nemo.nemo_rl.residency import short_of_room
from qarl_nemo.refit.exchange import gather_plain, waiting_group

# What a refit may take beyond the largest one so far.
_SPARE_BYTES = 4 * GIB


class SharesGpu(megatron_policy_worker.MegatronPolicyWorkerImpl):
    """NeMo-RL's worker, whose optimizer travels through pinned memory, where it travels at all.

    NeMo-RL copies it tensor by tensor into pageable memory. Here the copies to the host run beside the refit, if
    earlier refits have shown that there is room for both, and the copies back run beside the first gradients.

    Args:
        arguments: passed to NeMo-RL's worker.
        named: passed likewise.

    Attributes:
        refitted: whether engines have been refitted since they were last left alone on the GPU.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.refitted = False
        self._carrier = Offload()
        self._optimizer_moves = self.optimizer is not None and not self.optimizer_cpu_offload
        self._optimizer_leaves = self._optimizer_moves and self.offload_optimizer_for_refit
        # NeMo-RL would move it, too.
        self.offload_optimizer_for_refit = False
        if self._optimizer_moves:
            reload_for_update(self.optimizer, self._carrier)
        self._parameters_stay: bool | None = None
        self._beside_refit: bool | None = None
        # What the largest refit took of the GPU, the engine's weights included; None before the first.
        self._refit_bytes: int | None = None
        self._free_before_refit = self._others_before_refit = 0
        self._heap_frozen = self._gathered = False

    def offload_before_refit(self) -> None:
        """Make room for the engine; an optimizer that was meant to stay but leaves too little room is offloaded."""
        # In the step after a validation NeMo-RL's loop has sent parameters away already, and would wake engines without
        # a refit; those that forgot their weights need one.
        self.model = self.move_model(self.model, "cuda", move_grads=False)
        self._make_room()

    def _make_room(self) -> None:
        # Quantized weights are those of the version before the update, and a refit makes them anew.
        release([self.model])
        super().offload_before_refit()
        if self._optimizer_moves and not self._optimizer_leaves:
            self._gather_optimizer()
            reason = short_of_room(self._engine_share(), self._leaving_bytes())
            # Ranks wait for each other, so one whose optimizer leaves would cost all of them its time.
            reason = next(filter(None, gather_plain(reason, waiting_group())), None)
            if reason is not None:
                self._say(f"{reason}; from now on it goes to the host")
                self._optimizer_leaves = True
        if self._optimizer_leaves:
            self._start_offload()
            beside = self._refit_fits(torch.cuda.mem_get_info()[0])
            if beside != self._beside_refit:
                self._say(f"the optimizer leaves {'beside' if beside else 'before'} the refit")
            self._beside_refit = beside
            if not beside:
                self._finish_offload()
        self._free_before_refit, self._others_before_refit = torch.cuda.mem_get_info()[0], others_bytes()

    def offload_after_refit(self) -> None:
        """Leave the GPU to the engine; where both have room beside an optimizer that stays, parameters stay as well.

        Quantized weights are dropped either way, and made again from the masters. NeMo-RL calls this without a refit
        where engines serve the newest weights already.
        """
        refitted, self.refitted = self.refitted, False
        if refitted:
            taken = self._free_before_refit - torch.cuda.mem_get_info()[0]
            self._refit_bytes = max(taken, self._refit_bytes or 0)
        else:
            self._make_room()
        self.finalize_async_save()
        release([self.model])
        # Free the memory that engines have read through CUDA IPC.
        torch.cuda.ipc_collect()
        self._carrier.finish_offload()
        torch.cuda.empty_cache()
        # A refitted engine holds its weights, which are part of its share.
        held = max(0, others_bytes() - self._others_before_refit) if refitted else 0
        stay = not self._optimizer_leaves and short_of_room(self._engine_share(), held) is None
        # Ranks wait for each other, so one whose parameters leave would cost all of them its time.
        stay = all(gather_plain(stay, waiting_group()))
        if stay != self._parameters_stay:
            self._say(f"parameters {'stay' if stay else _how_they_leave(self.model)} while the engine runs")
        self._parameters_stay = stay
        if not stay:
            if isinstance(self.model, megatron_policy_worker.DistributedDataParallel):
                reserve_parameters(self.model)
            self.model = self.move_model(self.model, "cpu")
            torch.cuda.empty_cache()
        self.model.eval()

    def prepare_for_training(self, *arguments: Any, **named: Any) -> None:
        """Make room for gradients; the first time, also exempt what lives by now from garbage collections.

        NeMo-RL collects in each phase, which takes long with the objects of a whole model, its libraries and compiler.

        Args:
            arguments: passed to NeMo-RL's worker.
            named: passed likewise.
        """
        super().prepare_for_training(*arguments, **named)
        if not self._heap_frozen:
            # Not after a backward, whose graph would be exempt as well where layers keep it in a cycle.
            gc.collect()
            gc.freeze()
        self._heap_frozen = True

    def move_optimizer(self, device: str) -> None:
        """Move the optimizer to the host at once; it comes back by itself, in `train` or `save_checkpoint`.

        Args:
            device: NeMo-RL's word: "cpu" or "cuda".
        """
        if device == "cpu":
            self._start_offload()
            self._finish_offload()

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None = None, **named: Any) -> None:
        """Save as NeMo-RL does, with the optimizer back on the GPU.

        Args:
            weights_path: the checkpoint's folder.
            optimizer_path: None leaves the optimizer out.
            named: passed to NeMo-RL's worker.
        """
        if optimizer_path is not None:
            self._carrier.finish_reload()
        super().save_checkpoint(weights_path, optimizer_path, **named)

    def _refit_fits(self, free: int) -> bool:
        return self._refit_bytes is not None and self._refit_bytes + _SPARE_BYTES <= free

    def _gather_optimizer(self) -> None:
        """Gather the state that an update has made; the engine may need what the allocator holds around it."""
        if self._gathered or not any(state for _, state in self.optimizer.state.items()):
            return
        before = torch.cuda.memory_reserved()
        self._carrier.gather(optimizer_tensors(self.optimizer, self.model))
        torch.cuda.empty_cache()
        self._gathered = True
        now = torch.cuda.memory_reserved()
        self._say(
            f"gathered the optimizer's state; PyTorch's reserve went from {before / GIB:.1f} to {now / GIB:.1f} GiB"
        )

    def _start_offload(self) -> None:
        tensors = optimizer_tensors(self.optimizer, self.model)
        for tensor in tensors:
            # Megatron keeps FP32 gradients at its masters until the next step's first one.
            tensor.grad = None
        before = self._carrier.pageable_bytes
        self._carrier.start_offload(tensors)
        pageable = self._carrier.pageable_bytes
        if pageable > before:
            self._say(f"no more memory of the host can be pinned: {pageable / GIB:.1f} GiB will be copied slowly")

    def _finish_offload(self) -> None:
        self._carrier.finish_offload()
        torch.cuda.empty_cache()

    def _say(self, text: str) -> None:
        print(f"qarl: rank {self.rank}: {text}", flush=True)

    def _engine_share(self) -> float:
        return self.cfg["generation"]["vllm_cfg"]["gpu_memory_utilization"]

    def _leaving_bytes(self) -> int:
        if isinstance(self.model, megatron_policy_worker.DistributedDataParallel):
            return leaving_bytes(self.model)
        here = (parameter for parameter in self.model.parameters() if parameter.untyped_storage().nbytes())
        return sum(parameter.nbytes for parameter in here)


def _how_they_leave(model: Any) -> str:
    if isinstance(model, megatron_policy_worker.DistributedDataParallel) and not parameter_buffers(model):
        return "have to stay (only those of a distributed optimizer can leave)"
    return "leave"
