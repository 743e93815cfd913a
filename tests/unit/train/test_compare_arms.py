"""Arms and seeds of one comparison become whole configs; what is wrong in any arm is said before the first run."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from qarl_nemo.config import ConfigError, literal, load_config, write_yaml
from qarl_nemo.data.config import DatasetConfig, DatasetsData
from qarl_nemo.files import FileError
from qarl_nemo.losses.config import GRPOTISConfig, GSPOConfig, TBPOConfig
from qarl_nemo.train.arms import RunsFailedError, expand_arms, require_effect, require_reach, select_arms
from qarl_nemo.train.config import AdamWConfig, ArithmeticData, CompareConfig, LocalConfig
from qarl_nemo.train.gpu_pool import SHARE, GpuPool, num_gpus, visible_gpus
from qarl_nemo.train.run import keep_to_share

BASE = {
    "run_dir": "runs/c",
    "policy": {"model_init": {}},
    "loss_fn": {"objective": "tbpo", "mismatch_cap": 3.0},
    "compare": {
        "seeds": [4, 5],
        "arms": {
            "QaRL, ours": {},
            "BF16": {
                "qarl": {"alignment": "none", "format": "bf16"},
                "loss_fn": {"_override_": True, "objective": "gspo"},
            },
        },
    },
}


@pytest.fixture
def expand(tmp_path):
    def from_values(values):
        path = tmp_path / "compare.yaml"
        OmegaConf.save(OmegaConf.create(values), path)
        return expand_arms(load_config(path, [], LocalConfig), "compare.yaml")

    return from_values


def test_every_arm_runs_with_every_seed_in_a_folder_of_its_own(expand):
    runs = expand(BASE)
    assert [(run.run.name, run.run.arm, run.seed, run.run_dir) for run in runs] == [
        ("QaRL, ours-seed4", "QaRL, ours", 4, Path("runs/c/QaRL-ours-seed4")),
        ("BF16-seed4", "BF16", 4, Path("runs/c/BF16-seed4")),
        ("QaRL, ours-seed5", "QaRL, ours", 5, Path("runs/c/QaRL-ours-seed5")),
        ("BF16-seed5", "BF16", 5, Path("runs/c/BF16-seed5")),
    ]
    assert all(run.compare is None for run in runs)


def test_an_arm_merges_over_the_rest_and_may_replace_a_block(expand):
    ours, plain = expand(BASE)[:2]
    assert ours.loss_fn == TBPOConfig(mismatch_cap=3.0)
    assert plain.loss_fn == GSPOConfig()
    assert (plain.qarl.alignment, plain.qarl.targets) == ("none", ours.qarl.targets)


def test_every_problem_of_every_arm_is_listed_once(expand):
    arms = {
        "typo": {"loss_fn": {"mismatch_kap": 2.0}},
        "clash": {"qarl": {"alignment": "none"}},
        "good": {},
    }
    with pytest.raises(ConfigError) as raised:
        expand(BASE | {"compare": {"seeds": [1, 2], "arms": arms}})
    message = str(raised.value)
    assert message.count("compare.yaml, arm 'typo'") == message.count("compare.yaml, arm 'clash'") == 1
    assert "unknown key 'loss_fn.mismatch_kap': did you mean 'mismatch_cap'?" in message
    assert "alignment=none and format=bf16 go together" in message
    assert "'good'" not in message


def test_an_arm_whose_format_does_not_take_the_other_options_is_refused_before_any_run(expand):
    qarl = {"alignment": "none", "format": "bf16"}
    compare = {"seeds": [1], "arms": {"ours": {}, "BF16": {"qarl": qarl | {"group_size": 64}}}}
    with pytest.raises(ConfigError, match=r"arm 'BF16': format 'bf16' takes no group_size=64: .* qarl.group_size=null"):
        expand(BASE | {"compare": compare})
    # What the config says for the other arms' format is theirs.
    compare["arms"]["BF16"]["qarl"] = qarl
    ours, plain = expand(BASE | {"qarl": {"group_size": 64}, "compare": compare})
    assert (ours.qarl.group_size, plain.qarl.group_size) == (64, None)


def test_an_arm_may_have_another_kind_of_block_and_takes_none_of_its_defaults(expand):
    data = {"source": "datasets", "train": {"data_path": "a.jsonl"}}
    policy = {"model_init": {}, "optimizer": {"name": "muon", "momentum": 0.9, "warmup_steps": 3}}
    arms = {"gspo": {"loss_fn": {"objective": "gspo"}}, "problems": {"data": data}, "longer": {"data": {"digits": 3}}}
    arms |= {"adamw": {"policy": {"optimizer": {"name": "adamw"}}}}
    base = BASE | {"policy": policy, "compare": {"seeds": [1], "arms": arms}}
    gspo, problems, longer, adamw = expand(base)
    assert gspo.loss_fn == GSPOConfig()
    assert problems.data == DatasetsData(source="datasets", train=DatasetConfig(data_path="a.jsonl"))
    assert longer.data == ArithmeticData(digits=3)
    assert adamw.policy.optimizer == AdamWConfig()
    arms["gspo"]["loss_fn"]["mismatch_cap"] = 3.0
    with pytest.raises(ConfigError, match=r"arm 'gspo': 1 problem.*\n  unknown key 'loss_fn.mismatch_cap'"):
        expand(base)


def test_an_arm_of_another_objective_takes_no_clip_lines_that_mean_something_else_there(expand):
    tokens = {"objective": "grpo_tis", "clip_low": 0.1, "clip_high": 0.2, "mismatch_cap": 3.0}
    arms = {"gspo": {"loss_fn": {"objective": "gspo"}}, "wider": {"loss_fn": {"objective": "gspo", "clip_low": 0.01}}}
    arms |= {"ours": {"loss_fn": {"objective": "grpo_tis"}}}
    gspo, wider, ours = expand(BASE | {"loss_fn": tokens, "compare": {"seeds": [1], "arms": arms}})
    assert (gspo.loss_fn, wider.loss_fn) == (GSPOConfig(), GSPOConfig(clip_low=0.01))
    assert ours.loss_fn == GRPOTISConfig(clip_low=0.1, clip_high=0.2, mismatch_cap=3.0)


def test_runs_that_would_share_a_folder_are_refused(expand):
    compare = {"seeds": [1, 2, 1], "arms": {"a b": {}, "a-b": {}, "c": {}}}
    with pytest.raises(ConfigError) as raised:
        expand(BASE | {"compare": compare})
    assert "arms 'a b' and 'a-b' would share the folder a-b-seed1; rename one" in str(raised.value)
    assert "compare.seeds holds 1 2 times" in str(raised.value)
    assert "'c'" not in str(raised.value)


def test_an_arm_cannot_have_what_is_not_its_own(expand):
    arms = {"x": {"seed": 7, "run": {"name": "x"}}, "y": {"run_dir": "other"}, "z": {"compare": None}, "good": {}}
    with pytest.raises(ConfigError) as raised:
        expand(BASE | {"compare": {"seeds": [1], "arms": arms}})
    for problem in ("arm 'x' sets seed, run:", "arm 'y' sets run_dir:", "arm 'z' sets compare:"):
        assert problem in str(raised.value)
    assert "'good'" not in str(raised.value)


def test_an_override_of_one_arm_keeps_the_rest_of_all(tmp_path):
    path = tmp_path / "compare.yaml"
    OmegaConf.save(OmegaConf.create(BASE), path)
    load = partial(load_config, path, model=LocalConfig)
    arms = load(["compare.arms.BF16.loss_fn.clip_low=0.1", "compare.arms.new.grpo.max_num_steps=3"]).compare.arms
    plain = {**BASE["compare"]["arms"]["BF16"]["loss_fn"], "clip_low": 0.1}
    assert arms["BF16"] == {"qarl": {"alignment": "none", "format": "bf16"}, "loss_fn": plain}
    assert (arms["QaRL, ours"], arms["new"]) == ({}, {"grpo": {"max_num_steps": 3}})
    assert load(["compare.arms={only: {}}"]).compare.arms == {"only": {}}


def test_an_arm_with_a_dot_in_its_name_can_be_overridden(tmp_path):
    arms = {"lr 1": {"seed": 1}, "lr 1.5": {"policy": {"optimizer": {"lr": 1.5e-6}}}, "lr 1.5.2": {}}
    OmegaConf.save(OmegaConf.create(BASE | {"compare": {"seeds": [4], "arms": arms}}), tmp_path / "c.yaml")
    changes = ["policy.optimizer.lr=2.0e-6", "grpo={max_num_steps: 3}", "qarl.format=w8a16"]
    overrides = [f"compare.arms.lr 1.5.{changes[0]}", f"compare.arms.lr 1.5.{changes[1]}"]
    overrides += [f"compare.arms.lr 1.5.2.{changes[2]}", "compare.arms.lr 1={seed: 2}"]
    assert load_config(tmp_path / "c.yaml", overrides, LocalConfig).compare.arms == {
        "lr 1": {"seed": 2},
        "lr 1.5": {"policy": {"optimizer": {"lr": 2e-6}}, "grpo": {"max_num_steps": 3}},
        "lr 1.5.2": {"qarl": {"format": "w8a16"}},
    }


def test_an_arm_has_a_name_and_a_block(tmp_path):
    path = tmp_path / "compare.yaml"
    path.write_text("compare: {seeds: [1], arms: {on: {}, 4: {}, empty: }}\nrun_dir: x\nloss_fn: {objective: tbpo}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(path, ["policy.model_init={}"], LocalConfig)
    for said in ("True is no text; put the arm's name in quotes", "4 is no text", "arm 'empty' is null; write {}"):
        assert said in str(refused.value)


def test_overrides_that_no_run_would_follow_are_refused():
    compare = CompareConfig(seeds=[1], arms={"a": {"qarl": {"format": "w4a16"}}, "b": {"qarl": {"format": "w8a16"}}})
    require_effect(compare, ["grpo.max_num_steps=2", "compare.seeds=[5]", "run_dir=runs/x", "qarl.targets=[mlp]"])
    with pytest.raises(ConfigError) as refused:
        require_effect(compare, ["seed=5", "++run.name=foo", "qarl.format=fp8_block", "policy.precision=float32"])
    lines = str(refused.value).splitlines()
    assert lines[0] == "3 override(s) that would change nothing"
    assert [line.split()[0] for line in lines[1:]] == ["seed", "run.name", "qarl.format"]
    one = CompareConfig(seeds=[1], arms={"a": {"qarl": {"format": "w4a16"}}, "b": {}})
    require_effect(one, ["qarl.format=fp8_block"])


def test_overrides_that_an_arm_of_another_kind_would_not_follow_are_refused(tmp_path):
    path = tmp_path / "compare.yaml"
    arms = {
        "tbpo": {},
        "gspo": {"loss_fn": {"objective": "gspo"}},
        "adam": {"policy": {"optimizer": {"name": "adamw", "betas": [0.8, 0.9]}}},
        "fp8": {"qarl": {"format": "fp8_block"}},
        "marked": {"rollout": {"_override_": True, "batch_size": 8}},
    }
    muon = {"optimizer": {"name": "muon"}, "model_init": {}}
    OmegaConf.save(OmegaConf.create(BASE | {"policy": muon, "compare": {"seeds": [1], "arms": arms}}), path)

    def reach(*overrides):
        config = load_config(path, overrides, LocalConfig)
        require_reach(config, expand_arms(config, "compare.yaml"), overrides)

    reach("grpo.max_num_steps=7", "loss_fn.mismatch_cap=2.5", "policy.optimizer.momentum=0.9", "qarl.group_size=64")
    reach("run_dir=runs/other", "compare.seeds=[2]")
    with pytest.raises(ConfigError, match=r"rollout\.temperature does not reach arm 'marked'"):
        reach("rollout.temperature=0.5", "rollout.batch_size=4")
    with pytest.raises(ConfigError) as refused:
        reach("++policy.optimizer.lr=0.02", "loss_fn.positive_clip_high=0.3", "policy.optimizer.name=muon")
    said = str(refused.value)
    assert "policy.optimizer.lr does not reach arm 'adam'" in said
    assert "compare.arms.ARM.policy.optimizer.lr=0.02" in said
    reach("policy.optimizer.lr=0.02", "compare.arms.adam.policy.optimizer.lr=0.02")


def test_no_run_at_a_time_is_refused(qarl):
    code, said = qarl("train", "compare", "--parallel", "0")
    assert (code, "--parallel" in said) == (2, True)


def test_arms_are_selected_by_name_and_unknown_ones_listed(expand):
    runs = expand(BASE)
    assert [run.run.name for run in select_arms(runs, ["BF16"])] == ["BF16-seed4", "BF16-seed5"]
    assert select_arms(runs, []) == runs
    with pytest.raises(ValueError, match="no arm is called 'bf16', 'x'; legal: 'QaRL, ours', 'BF16'"):
        select_arms(runs, ["bf16", "BF16", "x"])


def test_runs_spread_over_gpus(expand, monkeypatch):
    on_gpu, on_cpu = (expand(BASE | {"device": device})[0] for device in ("cuda", "cpu"))
    pool = GpuPool(["3", "5"])
    assert [pool.take(on_gpu) for _ in range(3)] == [["3"], ["5"], ["3"]]
    assert pool.take(on_cpu) == []
    pool.give_back(["3"])
    pool.give_back(["3"])
    assert pool.take(on_gpu) == ["3"]
    assert GpuPool([]).take(on_gpu) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-8f")
    assert visible_gpus() == ["3", "GPU-8f"]
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert visible_gpus() == []


def test_each_run_has_an_equal_share_of_the_fullest_gpu(expand):
    (on_gpu, *_), (on_cpu, *_) = (expand(BASE | {"device": device}) for device in ("cuda", "cpu"))
    cases = [(["0", "1"], 6, 6, 3), (["0", "1"], 5, 5, 3), (["0", "1"], 6, 2, 1), (["0"], 3, 8, 3), ([], 2, 2, 2)]
    for gpus, num_runs, parallel, on_fullest in cases:
        assert GpuPool(gpus).share([on_gpu] * num_runs, parallel) == 1 / on_fullest
    assert GpuPool(["0"]).share([on_cpu] * 4, 4) == 1


@pytest.mark.gpu
def test_a_run_that_shares_its_gpu_keeps_to_its_share(monkeypatch):
    device = torch.device("cuda", torch.cuda.current_device())
    half = torch.cuda.get_device_properties(device).total_memory // 2
    try:
        monkeypatch.setenv(SHARE, "0.25")
        keep_to_share(device)
        with pytest.raises(torch.OutOfMemoryError, match="memory"):
            torch.empty(half, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_a_learner_of_several_ranks_and_an_engine_of_its_own_take_that_many_gpus(expand):
    values = BASE | {
        "device": "cuda",
        "policy": {"model_init": {}, "precision": "bfloat16", "megatron_cfg": {"num_gpus": 2}},
        "rollout": {"_override_": True, "engine": "vllm", "own_gpu": True},
    }
    run = expand(values)[0]
    assert num_gpus(run) == 3
    assert GpuPool(["0", "1", "2", "3"]).take(run) == ["0", "1", "2"]


def test_the_report_of_one_seed_has_those_of_other_commands_too(qarl, tmp_path, monkeypatch):
    """As in a Slurm array with a seed in each task: the report that the last one writes is of all runs."""
    arms = {"ours": {}, "a/b": {"qarl": {"format": "w8a16"}}}
    path = tmp_path / "compare.yaml"
    OmegaConf.save(OmegaConf.create(BASE | {"run_dir": str(tmp_path), "compare": {"seeds": [4], "arms": arms}}), path)
    reported = []
    monkeypatch.setattr(
        "qarl_nemo.train.arms.run_arms", lambda runs, _: [run.run_dir.mkdir() or run.run_dir for run in runs]
    )
    monkeypatch.setattr("qarl_nemo.train.run_dir.is_complete", lambda run: run.run_dir.is_dir())
    monkeypatch.setattr(
        "qarl_nemo.cli.train._write_report", lambda runs, _: reported.append([run.name for run in runs])
    )
    for name in ("other-seed7", "ours-seed", "ours-seed02", f"ours-seed{2**32}", f"ours-seed{2**32 - 1}"):
        (tmp_path / name).mkdir()
    assert qarl("train", path)[0] == 0
    assert qarl("train", path, "--arm", "a/b", "compare.seeds=[2]")[0] == 0
    ours = ["ours-seed4", f"ours-seed{2**32 - 1}"]
    assert reported == [[*ours, "a-b-seed4"], [*ours, "a-b-seed2", "a-b-seed4"]]


def test_what_is_left_out_of_a_report_is_said_and_a_failed_arm_does_not_take_the_others(qarl, tmp_path, monkeypatch):
    path, reported = tmp_path / "compare.yaml", []
    arms = {"ours": {}, "bad": {}, "short": {}}
    values = {"run_dir": str(tmp_path), "grpo": {"max_num_steps": 2}, "compare": {"seeds": [4], "arms": arms}}
    OmegaConf.save(OmegaConf.create(BASE | values | {"checkpointing": {"enabled": False}}), path)

    def run(runs, _):
        for each, steps in zip(runs, (2, 0, 1), strict=True):
            each.run_dir.mkdir()
            write_yaml(each.run_dir / "config.yaml", literal(each.model_dump(mode="json", exclude={"compare"})))
            (each.run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {step + 1}}}\n' for step in range(steps)))
        raise RunsFailedError("bad-seed4 ended with code 2")

    monkeypatch.setattr("qarl_nemo.train.arms.run_arms", run)
    monkeypatch.setattr("qarl_nemo.cli.train._write_report", lambda runs, _: reported.extend(run.name for run in runs))
    code, said = qarl("train", path)
    assert (code != 0, "bad-seed4 ended with code 2" in said) == (True, True)
    assert reported == ["ours-seed4"]
    assert "short-seed4 is not in the report: it has 1 of 2 steps" in said
    assert "bad-seed4 is not" not in said
    monkeypatch.setattr("qarl_nemo.cli.train._write_report", lambda *_: (_ for _ in ()).throw(FileError("disk full")))
    for folder in tmp_path.glob("*-seed4"):
        shutil.rmtree(folder)
    assert "bad-seed4 ended with code 2" in qarl("train", path)[1]


def test_seeds_of_one_arm_have_the_same_settings_and_nothing_starts_where_they_would_not(qarl, tmp_path, monkeypatch):
    """One mean over them would be nothing's."""
    path = tmp_path / "compare.yaml"
    OmegaConf.save(OmegaConf.create(BASE | {"run_dir": str(tmp_path)}), path)
    for run in expand_arms(load_config(path, [], LocalConfig), "compare.yaml"):
        run.run_dir.mkdir()
        write_yaml(run.run_dir / "config.yaml", literal(run.model_dump(mode="json", exclude={"compare"})))
        (run.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "BF16-seed4" / "config.yaml").unlink()
    monkeypatch.setattr("qarl_nemo.train.arms.run_arms", lambda *_: pytest.fail("it started"))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    cap = "loss_fn.mismatch_cap=2.5"
    code, said = qarl("train", path, "--arm", "QaRL, ours", "compare.seeds=[5,6]", cap)
    assert (code, "2 run(s) of other settings, nothing was started" in said) == (2, True)
    assert "QaRL, ours-seed4: " in said
    assert "loss_fn.mismatch_cap: there 3.0, now 2.5" in said
    assert "BF16" not in said
    code, said = qarl("train", path, "--arm", "QaRL, ours", "compare.seeds=[6]", cap, "--check", "device=cpu")
    assert (code, "of other settings" in said) == (2, True), said
    # Damage is said of the runs that would start.
    code, said = qarl("train", path, "--arm", "BF16", "compare.seeds=[4]")
    assert (code, "config.yaml is missing" in said) == (2, True)
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}


def test_arms_that_a_config_does_not_have_are_refused_before_anything_is_made(qarl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = qarl("train", "demo", "--arm", "BF16", "--parallel", "2")
    assert (code, "--arm and --parallel: " in said, "has no compare: block" in said) == (2, True, True)
    code, said = qarl("train", "compare", "--arm", "bf16")
    assert (code, "no arm is called 'bf16'; legal: 'BF16', " in said) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_reference_to_what_an_arm_or_a_seed_changes_is_refused(expand):
    # Each is filled in once, before arms and seeds are; every run would have the value of the rest of the file.
    arms = {
        "as it is": {},
        "larger": {"grpo": {"num_prompts_per_step": 8}},
        "with its own": {"grpo": {"num_prompts_per_step": 16, "train_global_batch_size": 16}},
        "own": {"grpo": {"num_prompts_per_step": 4, "train_global_batch_size": "${grpo.num_prompts_per_step}"}},
        "another block": {"qarl": {"_override_": True, "format": "w8a16"}},
    }
    rest = {
        "grpo": {"num_prompts_per_step": 2, "train_global_batch_size": "${.num_prompts_per_step}"},
        "policy": {"model_init": {}, "warm_start": {"steps": "${seed}"}},
        "logger": {"wandb": {"project": "g${qarl.group_size}"}},
    }
    with pytest.raises(ConfigError) as raised:
        expand(BASE | rest | {"compare": {"seeds": [0, 1], "arms": arms}})
    batch, prompts = "grpo.train_global_batch_size refers to", "grpo.num_prompts_per_step, which arm"
    filled = "sets, but is filled in before arms are: set a value in that arm"
    once = "but is filled in once, with 0, for all of compare.seeds: set a value"
    assert str(raised.value).splitlines()[1:] == [
        f"  policy.warm_start.steps refers to seed, {once}",
        f"  {batch} {prompts} 'larger' {filled}",
        f"  logger.wandb.project refers to qarl.group_size, which arm 'another block' {filled}",
        f"  arm 'own': {batch} {prompts} 'own' {filled}",
    ]


def test_a_reference_that_means_the_same_in_every_run_is_filled_in(expand):
    arms = {"a": {"grpo": {"train_global_batch_size": 8, "num_generations_per_prompt": 4}}, "b": {"device": "cpu"}}
    arms["b"]["grpo"] = {"val_num_prompts": "${.val_period}", "val_period": 7}
    rest = {
        "run_dir": "runs/${qarl.format}",
        "grpo": {"num_prompts_per_step": 4, "train_global_batch_size": "${grpo.num_generations_per_prompt}"},
        "policy": {"model_init": {}, "warm_start": {"steps": "${seed}"}},
        "qarl": {"format": "w8a16"},
        "seed": 3,
    }
    rest["grpo"]["num_generations_per_prompt"] = 2
    a, b = expand(BASE | rest | {"compare": {"seeds": [3], "arms": arms}})
    assert (a.grpo.train_global_batch_size, b.grpo.train_global_batch_size) == (8, 2)
    assert (b.grpo.val_num_prompts, a.policy.warm_start.steps, str(a.run_dir)) == (7, 3, "runs/w8a16/a-seed3")
