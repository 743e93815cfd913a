"""What a user may tell `sbatch`: not how many nodes or jobs there are, and no other script."""

import re
from collections.abc import Iterator, Sequence

# Minutes, or with seconds, hours and days, as `man sbatch` has them.
_TIME = re.compile(r"\d+(:[0-5]?\d){0,2}|\d+-\d+(:[0-5]?\d){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_COUNTS = ("--nodes", "-N", "--ntasks", "-n")
# Option -> what it would do; getopt also takes the long ones' beginnings that are no other option's.
_REFUSED = {
    "--array": "would start many jobs, which overwrite each other's checkpoints",
    "--wrap": "would run its command in the place of command",
}
_SHORTEST = len("--ar")
# Options of which the next word is no value.
_FLAGS = (
    *("--contiguous", "--exclusive", "--hold", "-H", "--no-requeue", "--overcommit", "-O", "--oversubscribe", "-s"),
    *("--parsable", "--quiet", "-Q", "--reboot", "--requeue", "--spread-job", "--test-only", "--use-min-nodes"),
    *("--verbose", "-v", "--wait", "-W"),
)


def time_problem(time: str) -> str | None:
    """Say why Slurm would not take a time limit; None if it would.

    Args:
        time: e.g. `4:00:00`.
    """
    if _TIME.fullmatch(time):
        return None
    return (
        f"{time!r} is no time limit of Slurm's; write minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
        "days-hours:minutes or days-hours:minutes:seconds, such as '24:00:00', or UNLIMITED"
    )


def argument_problems(given: Sequence[str]) -> list[str]:
    """Say which arguments of `sbatch` would change what the job is.

    Args:
        given: its options, each `--name=value`, or name and value one after the other.

    Returns:
        One line for each, without values, which may be secrets.
    """
    counts = [each for each in given if each.startswith(_COUNTS)]
    problems = [f"{', '.join(counts)}: nodes says how many there are, each with one task"] if counts else []
    for each in given:
        name = each.partition("=")[0].split()[0] if each.strip() else each
        full = next((long for long in _REFUSED if _is_meant(name, long)), None)
        problems += [f"{name} {_REFUSED[full]}; leave it out"] if full else []
        if each.startswith("-") and re.search(r"^[^=]*\s|\s-", each):
            problems.append(
                f"{name} ...: Slurm takes this as one option; make an entry of each, as [--qos=high, --mem=0]"
            )
    bare = [str(place) for place in _bare(given)]
    if bare:
        problems.append(
            f"entry {', '.join(bare)} begins with no - and follows no option that takes it, so that sbatch would run "
            "it in the place of our script; leave it out, or write an option's value as --name=value"
        )
    return problems


def _is_meant(name: str, long: str) -> bool:
    if not name.startswith("--"):
        return long == "--array" and name.startswith("-a")
    return long.startswith(name) and len(name) >= _SHORTEST


def _bare(given: Sequence[str]) -> Iterator[int]:
    """Yield the places, from 1, of words that are neither options nor an option's value."""
    takes_a_word = False
    for place, each in enumerate(given, 1):
        is_option = each.startswith("-")
        if not is_option and not takes_a_word:
            yield place
        # -p takes the next word, -pgpu holds its own.
        alone = "=" not in each if each.startswith("--") else len(each) == len("-p")
        takes_a_word = is_option and alone and each not in _FLAGS
