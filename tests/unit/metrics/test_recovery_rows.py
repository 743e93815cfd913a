"""What quantized rollouts cost and what is won back, computed from recorded accuracies alone."""

import numpy as np
import pytest

from qarl_nemo.metrics.results import append_results, read_results

PREFIX = "real_m_d"
FACTS = {"unit": "", "op": ">=", "goal": None, "versions": {}, "command": "qarl train", "date": "2026-11-24"}


@pytest.fixture
def recovered(record, tmp_path):
    """Return the rows that come of accuracies by seed, and of rows that are recorded beside them."""

    def run(bf16, rollout_only, qarl, **beside):
        accuracies = {"bf16": bf16, "rollout_only_w4a16": rollout_only, "qarl_w4a16": qarl}
        values = {
            f"{arm}_seed{seed}_test_accuracy": value
            for arm, of_seeds in accuracies.items()
            for seed, value in enumerate(of_seeds, start=1)
        }
        rows = [
            FACTS | {"name": f"{PREFIX}_{name}", "value": value, "hardware": "first"} for name, value in values.items()
        ]
        rows += [
            FACTS | {"name": f"{PREFIX}_{name}", "value": value, "hardware": "first"} for name, value in beside.items()
        ]
        append_results(tmp_path / "rows.json", rows)
        return {
            name.removeprefix(f"{PREFIX}_"): row
            for name, row in record("recovery", "--model", "m", "--data", "d").items()
        }

    return run


def test_a_recovery_has_the_error_of_a_ratio_whose_parts_share_an_arm(recovered):
    bf16, rollout_only, qarl = np.array([[0.39, 0.38, 0.37, 0.40], [0.19, 0.20, 0.22, 0.17], [0.23, 0.24, 0.225, 0.21]])
    rows = recovered(bf16, rollout_only, qarl)
    lost, gained = bf16 - rollout_only, qarl - rollout_only
    ratio = gained.mean() / lost.mean()
    (of_lost, shared), (_, of_gained) = np.cov(lost, gained)
    # Textbook form, whose last term the two separate errors would lack.
    variance = (of_gained + ratio**2 * of_lost - 2 * ratio * shared) / lost.mean() ** 2 / 4
    assert rows["recovery_w4a16"].value == pytest.approx(ratio, rel=1e-4)
    assert rows["recovery_w4a16_error"].value == pytest.approx(np.sqrt(variance), rel=1e-4)


def test_where_every_seed_wins_back_the_same_share_the_error_is_nothing(recovered):
    rows = recovered([0.40, 0.50, 0.45], [0.20, 0.20, 0.20], [0.30, 0.35, 0.325])
    assert (rows["recovery_w4a16"].value, rows["gained_w4a16_error"].value > 0.01) == (0.5, True)
    assert rows["recovery_w4a16_error"].value == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("lost", "given"),
    [
        # 3.9 and 4.8 errors of three seeds, 11 and 15 of two; t is 4.3 and 12.7.
        ([0.025, 0.045, 0.065], False),
        ([0.035, 0.055, 0.075], True),
        ([0.10, 0.12], False),
        ([0.14, 0.16], True),
        ([0.10], False),
    ],
)
def test_few_seeds_must_show_a_loss_by_students_t(lost, given, recovered, capsys):
    rollout_only = [0.2] * len(lost)
    rows = recovered([0.2 + one for one in lost], rollout_only, [0.25] * len(lost))
    assert ("recovery_w4a16" in rows, "recovery_w4a16_error" in rows) == (given, given)
    assert (f"{PREFIX}_recovery_w4a16: not given, {len(lost)} seeds" in capsys.readouterr().out) == (
        not given and len(lost) > 1
    )


def test_seeds_that_agree_by_chance_do_not_outdo_what_the_problems_allow(recovered, tmp_path):
    arms = [0.30, 0.30], [0.20, 0.20], [0.25, 0.25]
    assert "recovery_w4a16" in recovered(*arms)
    # 12.7 * 0.013 / sqrt(2) is 0.117; one seed kept no answers.
    error = {"bf16_seed1_ahead_of_rollout_only_w4a16_error": 0.013}
    (tmp_path / "rows.json").unlink()
    assert "recovery_w4a16" not in recovered(*arms, **error)


def test_a_recovery_that_another_seed_takes_back_is_removed(recovered, capsys, tmp_path):
    two = recovered([0.34, 0.36], [0.20, 0.20], [0.25, 0.25])
    assert "recovery_w4a16" in two
    # Of the same machine, and of another run of this model.
    others = [f"{PREFIX}_mlp_recovery_w4a16", f"{PREFIX}_recovery_w3a16"]
    append_results(
        tmp_path / "rows.json", [FACTS | {"name": name, "value": 0.5, "hardware": "first"} for name in others]
    )
    capsys.readouterr()
    rows = recovered([0.34, 0.36, 0.20], [0.20, 0.20, 0.20], [0.25, 0.25, 0.25])
    assert not {"recovery_w4a16", "recovery_w4a16_error"} & rows.keys()
    assert {"mlp_recovery_w4a16", "recovery_w3a16", "lost_w4a16_mean"} <= rows.keys()
    said = capsys.readouterr().out
    assert f"{PREFIX}_recovery_w4a16: removed, it was {two['recovery_w4a16'].value:g} on 2026-11-24" in said
    assert f"{PREFIX}_recovery_w4a16_error: removed" in said


def test_rows_are_computed_again_with_the_machine_and_day_of_the_newest_accuracy(recovered, record, tmp_path):
    path, name = tmp_path / "rows.json", f"{PREFIX}_qarl_w4a16_seed2_test_accuracy"
    others = {
        "name": "real_m_other_qarl_w4a16_seed1_test_accuracy",
        "value": 0.3,
        "hardware": "third",
        "date": "2026-11-28",
    }
    append_results(path, [FACTS | {"name": name, "value": 0.25, "hardware": "second", "date": "2026-11-27"}])
    append_results(path, [FACTS | others])
    rows = recovered([0.40, 0.41, 0.42], [0.20, 0.21, 0.22], [0.24])
    assert {rows[f"lost_w4a16_{kind}"].hardware for kind in ("mean", "error")} == {"second"}
    assert rows["gained_w4a16_error"].date == "2026-11-27"
    before = read_results(path)
    record("recovery", "--model", "m", "--data", "d")
    assert read_results(path) == before
