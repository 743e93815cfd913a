"""Refits with every fault: the old version serves, the learner is told in time, the next whole push heals.

    python tests/campaign/refit_faults.py [--seed 0] [--short] [--out FOLDER]

Every message is cut, lost, repeated, reordered, replayed and corrupted, a rank is stopped and killed at each of them:
in the built-in sampler, and in ranks as processes over gloo. In the real vLLM the same faults run as
`tests/integration/test_vllm_refit.py -k faults`.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from refit_campaign import Campaign, Counts
from refit_sampler import sampler_faults
from refit_targets import RanksTarget

ROUNDS = 100
# The short form tries one fault in so many, and makes this many rounds there and back.
_EVERY, _FEW_ROUNDS = 10, 5


def run(*, seed: int = 0, short: bool = False) -> dict[str, Any]:
    """Try every fault on the built-in sampler and on ranks over gloo; two minutes, or half a one if it is `short`.

    Args:
        seed: seeds everything random.
        short: try a part of them.

    Returns:
        `faults` tried, `survived`, `failures` as sentences, `aba_rounds` and `aba_identical` rounds of A -> B -> A, and
        the same for each engine under `engines`.
    """
    every, rounds = (_EVERY, _FEW_ROUNDS) if short else (1, ROUNDS)
    engines = {"sampler": sampler_faults(seed, rounds=rounds, every=every), "gloo": _over_gloo(seed, rounds, every)}
    facts = {name: counts.facts() for name, counts in engines.items()}
    return total(facts.values()) | {"engines": facts}


def total(facts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of several engines' counts."""
    facts = list(facts)
    return {name: sum((one[name] for one in facts), type(facts[0][name])()) for name in facts[0]}


def _over_gloo(seed: int, rounds: int, every: int) -> Counts:
    with tempfile.TemporaryDirectory() as folder, RanksTarget() as target:
        campaign = Campaign(target, seed, Path(folder))
        campaign.there_and_back(rounds)
        campaign.scripts(every=every)
        campaign.scripts(rehearsed=True, every=every)
        campaign.pushes(every=every)
    return campaign.counts


def main() -> None:
    """Run, print the counts and end with an error where a fault was not survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="a part of the faults")
    parser.add_argument("--out", type=Path, help="folder for refit_faults.json")
    options = parser.parse_args()
    counts = run(seed=options.seed, short=options.short)
    for failure in counts["failures"]:
        print(failure)
    print(f"{counts['survived']} of {counts['faults']} faults survived")
    print(f"{counts['aba_identical']} of {counts['aba_rounds']} rounds A -> B -> A identical")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "refit_faults.json").write_text(json.dumps(counts, indent=1))
    raise SystemExit(bool(counts["failures"]) or counts["aba_identical"] < counts["aba_rounds"])


if __name__ == "__main__":
    main()
