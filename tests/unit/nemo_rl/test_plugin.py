"""NeMo-RL, unchanged, starts our workers once the plug-in is registered and the sentinel is set."""

from types import SimpleNamespace

import pytest
import torch

from qarl_nemo.losses.config import TBPOConfig
from qarl_nemo.nemo_rl import plugin
from support.nemo_batches import Replaced
from support.nemo_rl import installed  # noqa: F401 skips where NeMo-RL is not

registry = pytest.importorskip("nemo_rl.distributed.ray_actor_environment_registry")
utils = pytest.importorskip("nemo_rl.models.generation.vllm.utils")


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(registry, "ACTOR_ENVIRONMENT_REGISTRY", dict(registry.ACTOR_ENVIRONMENT_REGISTRY))
    monkeypatch.setattr(utils, "GENERATION_WORKER_OVERRIDES", dict(utils.GENERATION_WORKER_OVERRIDES))


def test_registering_twice_is_registering_once():
    plugin.register()
    environments, workers = dict(registry.ACTOR_ENVIRONMENT_REGISTRY), dict(utils.GENERATION_WORKER_OVERRIDES)
    plugin.register()
    assert environments == registry.ACTOR_ENVIRONMENT_REGISTRY
    assert workers == utils.GENERATION_WORKER_OVERRIDES


@pytest.mark.parametrize("own", sorted(plugin.GENERATION_WORKERS))
def test_only_the_sentinel_selects_our_engine(own):
    plugin.register()
    assert utils.resolve_generation_worker_cls(own, {"quant_cfg": plugin.SENTINEL}) == plugin.GENERATION_WORKERS[own]
    assert utils.resolve_generation_worker_cls(own, {}) == own


def test_every_worker_has_the_environment_of_the_one_it_replaces():
    plugin.register()
    environment = registry.get_actor_python_env
    for own, ours in plugin.GENERATION_WORKERS.items():
        assert environment(ours) == environment(own)
    theirs = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
    assert environment(plugin.POLICY_WORKER) == environment(theirs)


def test_engines_that_serve_bf16_are_refused():
    generation = SimpleNamespace(cfg={"quant_cfg": None, "colocated": {"enabled": True}})
    with pytest.raises(TypeError, match="serve BF16"):
        plugin.install_refit(None, generation)


@pytest.mark.parametrize("named", [{}, {"tags": ["weights"]}])
def test_a_failed_wake_is_an_error_also_where_nothing_is_refitted(named):
    pytest.importorskip("ray")
    wakes = [True, False]
    generation = SimpleNamespace(
        cfg={"quant_cfg": plugin.SENTINEL, "colocated": {"enabled": True}},
        worker_group=SimpleNamespace(workers=[], dp_leader_worker_indices=[]),
        # NeMo-RL's own answers; after a validation its loop wakes engines without a refit, and ignores them.
        prepare_for_generation=lambda **_: wakes.pop(0),
        finish_generation=lambda: True,
    )
    plugin.install_refit(None, generation)
    assert generation.prepare_for_generation(**named)
    with pytest.raises(RuntimeError, match="vLLM did not wake up its weights"):
        generation.prepare_for_generation(**named)


def test_a_policy_counts_steps_once_it_has_its_loss_and_trains_with_no_other(monkeypatch, tmp_path):
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.policy.lm_policy import Policy

    from qarl_nemo.nemo_rl.policy import QarlPolicy

    monkeypatch.setattr(Policy, "train", lambda *_, **__: {})
    policy, batch = object.__new__(QarlPolicy), BatchedDataDict(sample_mask=torch.ones(6))
    with pytest.raises(RuntimeError, match=r"call plugin\.install_loss before the first refit"):
        assert policy.next_step
    qarl = SimpleNamespace(objective=TBPOConfig(), diagnostics_period=5)
    loss_fn = plugin.install_loss(policy, Replaced(), qarl, log_dir=tmp_path, done=3)
    assert policy.next_step == 4
    policy.train(batch, loss_fn)
    assert policy.next_step == 5
    assert loss_fn.recording.folder == tmp_path
    with pytest.raises(TypeError, match="trained with str, which knows no"):
        policy.train(batch, "loss")


def test_the_policy_numbers_the_responses_it_trains_on_and_leaves_the_batch_as_it_was(monkeypatch):
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.policy.lm_policy import Policy

    from qarl_nemo.nemo_rl.loss import RESPONSE_KEY
    from qarl_nemo.nemo_rl.policy import QarlPolicy

    seen = []
    monkeypatch.setattr(Policy, "train", lambda self, data, loss_fn, timer=None: seen.append((data, loss_fn, timer)))
    batch = BatchedDataDict(sample_mask=torch.ones(6))
    QarlPolicy.train(object.__new__(QarlPolicy), batch, "loss", timer="timer")
    ((data, *rest),) = seen
    assert rest == ["loss", "timer"]
    shards = data.shard_by_batch_size(2, batch_size=3 * 2)
    assert [shard[RESPONSE_KEY].tolist() for shard in shards] == [[0, 1, 2], [3, 4, 5]]
    assert RESPONSE_KEY not in batch
