"""A Megatron learner's two ranks behind the process that launches them, as `qarl train`: `... CONFIG.yaml`."""

import sys

from qarl_nemo.train.megatron.ranks import launch_ranks

if __name__ == "__main__":
    raise SystemExit(launch_ranks(2, ["-m", "support.megatron.run_rank", sys.argv[1]]))
