"""Which keys a data set of ours has on NeMo-RL, which drops any other in silence. Does not import NeMo-RL."""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.config.problems import hint
from qarl_nemo.nemo_rl.data_sets import BENCHMARK, OUR_CLASSES, READ, data_sets

_SHARED = ("dataset_name", "prompt_file", "system_prompt_file", "env_name", "processor")
PROBLEM_KEYS = (*READ, *_SHARED, "split_validation_size", "seed")
BENCHMARK_KEYS = ("benchmark", "data_path", "repeat", "reward_function", *_SHARED)
# NeMo-RL's for images, sound and downloads: they change nothing here, but a default may hold them for other sets.
UNUSED_KEYS = (
    "download_dir",
    "num_frames",
    "video_sampling_style",
    "video_target_num_patches",
    "video_temporal_patch_size",
    "video_maintain_aspect_ratio",
    "min_generation_tokens",
)
_OF_BENCHMARKS = f"a key of {BENCHMARK}; set dataset_name to that, or remove the key"
# Keys of `qarl train`, and keys of the other class: where they go.
_ELSEWHERE = {
    "prompt_template": "a key of `qarl train`; set prompt_file to a text file, in which {} stands for the problem",
    "system_prompt": "a key of `qarl train`; set system_prompt_file to a text file",
    "benchmark": _OF_BENCHMARKS,
    "repeat": _OF_BENCHMARKS,
    "_override_": "NeMo-RL replaces only top-level blocks; set data._override_=true and repeat the block",
}


def key_problems(data: Mapping[str, Any]) -> list[str]:
    """Say which keys of our data sets, and of the default where all sets are ours, nothing would read.

    Args:
        data: the `data:` block.

    Returns:
        One line for each key: its place, the nearest legal one or where it belongs, and what is legal.
    """
    found = list(data_sets(data))
    lines = []
    for place, dataset, whole in found:
        if whole.get("dataset_name") in OUR_CLASSES:
            legal = BENCHMARK_KEYS if whole["dataset_name"] == BENCHMARK else PROBLEM_KEYS
            lines += _unread(place, dataset, legal)
    if found and all(whole.get("dataset_name") in OUR_CLASSES for _, _, whole in found):
        lines += _unread("data.default", data.get("default") or {}, {*PROBLEM_KEYS, *BENCHMARK_KEYS})
    return lines


def _unread(place: str, dataset: Mapping[str, Any], legal: tuple[str, ...] | set[str]) -> list[str]:
    # Every start names data sets anew; the config that a run saves holds their names.
    known = {*legal, *UNUSED_KEYS, "task_name"}
    # What is null or 0 asks for nothing; so a recipe takes back a key of the one that it builds on.
    unread = [key for key, value in dataset.items() if value not in (None, 0) and key not in known]
    return [
        f"{place}.{key}: {_ELSEWHERE.get(key) or f'this data set does not read it; {hint(key, sorted(legal))}'}"
        for key in unread
    ]
