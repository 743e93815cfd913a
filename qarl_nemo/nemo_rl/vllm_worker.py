"""NeMo-RL's vLLM workers, serving packed weights of one whole version at a time.

Everything is in undecorated classes, because Ray pickles the methods of a decorated class by value.
"""

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import BaseVllmGenerationWorker, VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from qarl_nemo.nemo_rl.block import NemoQarlConfig
from qarl_nemo.nemo_rl.checks.engine import environment_problems
from qarl_nemo.nemo_rl.engine_arguments import engine_arguments
from qarl_nemo.nemo_rl.token_logprobs import logprobs_apart, write_logprobs
from qarl_nemo.refit.answers import ask, require_answers
from qarl_nemo.refit.engine_settings import ENVIRONMENT

# After these calls an engine may serve another version; the second one ends a refit that was rehearsed.
_REPLACING = ("qarl_replace", "qarl_replaced")


class _ServesPacked(BaseVllmGenerationWorker):
    _served_version: int | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        os.environ.update(ENVIRONMENT)
        problems = environment_problems(os.environ, "environment: ")
        if problems:
            raise ValueError("this worker's vLLM would not compute as the learner does:\n  " + "\n  ".join(problems))
        # vLLM's own worker processes see these, too.
        named["extra_env_vars"] = [*(named.get("extra_env_vars") or []), "PYTHONPATH", *ENVIRONMENT]
        super().__init__(*arguments, **named)

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine(engine_arguments(llm_kwargs, NemoQarlConfig.model_validate(self.cfg["qarl"])))

    def _require_served(self, problems_by_rank: list[list[str]]) -> None:
        problems = list(dict.fromkeys(problem for problems in problems_by_rank for problem in problems))
        if problems:
            raise ValueError(
                f"vLLM does not serve this model as {self.cfg['qarl']['format']} with targets "
                f"{list(self.cfg['qarl']['targets'])}:\n  " + "\n  ".join(problems)
            )

    def _require_version(self) -> None:
        if self._served_version is None:
            raise RuntimeError(
                "this engine serves no weight version: no refit has reached it, or its last one broke off; "
                "install_refit() comes before the first rollout"
            )

    def _forget_version(self, method: str) -> None:
        if method in _REPLACING:
            self._served_version = None

    def _note_forgotten(self, forgotten: list[int]) -> None:
        if any(forgotten):
            self._served_version = None

    def _note_version(self, states: list[dict[str, Any]]) -> None:
        whole = all(state == states[0] and state["whole"] for state in states)
        self._served_version = states[0]["version"] if whole else None


class QarlGenerationWorkerImpl(_ServesPacked, VllmGenerationWorkerImpl):
    """The synchronous engine."""

    def post_init(self) -> None:
        """Refuse an engine that runs a layer by another method than its format's."""
        super().post_init()
        self._require_served(ask(self.llm, "qarl_problems", self.cfg["qarl"]))

    def qarl_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of every rank; the results are in the order of ranks."""
        self._forget_version(method)
        results = self.llm.collective_rpc(method, args=args)
        if method in _REPLACING:
            self._note_version(ask(self.llm, "qarl_version"))
        return results

    def qarl_busy(self) -> bool:
        """Say whether requests are unfinished."""
        return self.llm.llm_engine.has_unfinished_requests()

    def sleep(self) -> None:
        """Fall asleep without a copy of what the next refit brings."""
        self._note_forgotten(ask(self.llm, "qarl_forget"))
        super().sleep()
        ask(self.llm, "qarl_asleep")

    def qarl_reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; false while a request holds some."""
        return self.llm.reset_prefix_cache()

    def generate(self, data: Any, *arguments: Any, **named: Any) -> Any:
        """Answer as NeMo-RL's worker does, from weights of one whole version or not at all."""
        self._require_version()
        with logprobs_apart(self.llm) as taken:
            answers = super().generate(data, *arguments, **named)
        write_logprobs(answers["logprobs"], taken, data["input_lengths"])
        return answers


class QarlAsyncGenerationWorkerImpl(_ServesPacked, VllmAsyncGenerationWorkerImpl):
    """The asynchronous engine."""

    async def post_init_async(self) -> None:
        """Refuse an engine that runs a layer by another method than its format's."""
        await super().post_init_async()
        answers = await self.llm.collective_rpc("qarl_problems", args=(self.cfg["qarl"],))
        self._require_served(require_answers("qarl_problems", answers))

    async def qarl_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of every rank; the results are in the order of ranks."""
        self._forget_version(method)
        results = await self.llm.collective_rpc(method, args=args)
        if method in _REPLACING:
            self._note_version(require_answers("qarl_version", await self.llm.collective_rpc("qarl_version")))
        return results

    async def qarl_busy(self) -> bool:
        """Say whether requests are unfinished."""
        return self.llm.output_processor.has_unfinished_requests()

    async def sleep_async(self) -> None:
        """Fall asleep without a copy of what the next refit brings."""
        self._note_forgotten(require_answers("qarl_forget", await self.llm.collective_rpc("qarl_forget")))
        await super().sleep_async()
        require_answers("qarl_asleep", await self.llm.collective_rpc("qarl_asleep"))

    async def qarl_reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; false while a request holds some."""
        return await self.llm.reset_prefix_cache()

    async def generate_async(self, *arguments: Any, **named: Any) -> AsyncGenerator[Any, None]:
        """Answer as NeMo-RL's worker does, from weights of one whole version or not at all."""
        self._require_version()
        async with aclosing(super().generate_async(*arguments, **named)) as answers:
            async for answer in answers:
                yield answer


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})
class QarlGenerationWorker(QarlGenerationWorkerImpl):
    """What `plugin.register` puts in the place of NeMo-RL's `VllmGenerationWorker`."""


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_async_generation_worker")})
class QarlAsyncGenerationWorker(QarlAsyncGenerationWorkerImpl):
    """What `plugin.register` puts in the place of NeMo-RL's `VllmAsyncGenerationWorker`."""
