"""The extension of each rank of an engine that NeMo-RL starts: NeMo-RL's own, with packed refits."""

from typing import Any

from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension

from qarl_nemo.nemo_rl.block import NemoQarlConfig
from qarl_nemo.nemo_rl.checks.engine import served_problems
from qarl_nemo.refit.answers import answering
from qarl_nemo.refit.engine_methods import chosen_methods, method_problems
from qarl_nemo.refit.engine_settings import kernel_options
from qarl_nemo.refit.ipc import gpu_id
from qarl_nemo.refit.load import PackedRefit


@answering
class QarlWorkerExtension(PackedRefit, VllmInternalWorkerExtension):
    """RPC methods of a rank. Ranks are numbered consecutively over all of NeMo-RL's engines."""

    def qarl_place(self, first_rank: int) -> None:
        """Number this rank among the ranks of all engines; its own engine's ranks begin at `first_rank`."""
        self._qarl_session().arrivals.rank = first_rank + self.rank

    def qarl_gpu(self) -> str:
        """Return the GPU that this rank runs on."""
        return gpu_id(self.device.index)

    def qarl_problems(self, qarl: dict[str, Any]) -> list[str]:
        """Say where this rank runs a layer with another method, or vLLM with other settings, than `qarl:` requires."""
        asked = NemoQarlConfig.model_validate(qarl)
        fmt, targets = asked.served_format, asked.targets
        methods = method_problems(chosen_methods(self.model_runner.get_model()), fmt, targets)
        return methods + served_problems(self.vllm_config, kernel_options(fmt, targets))

    def update_weights_via_ipc_zmq(self) -> bool:
        """Refuse NeMo-RL's own refit, which would load BF16 weights."""
        raise RuntimeError(_OWN_REFIT)

    def update_weights_from_collective(self) -> bool:
        """Refuse NeMo-RL's own refit, which would load BF16 weights."""
        raise RuntimeError(_OWN_REFIT)

    def init_collective(self, *_: Any, **__: Any) -> None:
        """Open no connection for NeMo-RL's own refit; packed refits bring theirs."""


_OWN_REFIT = (
    "NeMo-RL's own refit was called on an engine that serves packed weights: call "
    "qarl_nemo.nemo_rl.plugin.install_refit(policy, policy_generation) after setup()"
)
