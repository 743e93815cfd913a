import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from qarl_nemo.metrics.report import write_report, write_summary_figure
from qarl_nemo.metrics.report.arms import group_by_arm
from qarl_nemo.metrics.report.curves import curve_figure, reward_figure
from qarl_nemo.metrics.report.examples import mark_errors
from qarl_nemo.metrics.report.style import format_duration, format_number
from qarl_nemo.metrics.report.tables import module_groups
from qarl_nemo.metrics.report.timings import phase_figure
from qarl_nemo.metrics.runs import load_runs

SECTIONS = ["learning", "mismatch", "bands", "errors", "time", "optimizer", "modules", "config"]
PANELS = [
    "Reward",
    "KL of the updates",
    "Entropy",
    "Response length",
    "Truncated responses",
    "Logprob gap",
    "KL sampler to learner",
    "Mismatch weight",
    "Rollout engine against learner",
    "Prox ratio",
    "Old against new token probability",
    "Share in the band",
    "Error-token rate",
    "Error tokens by position",
    "Phases",
    "Tokens per second",
    "Gradient norm",
    "Learning rate",
    "Flipped codes",
]


def report(run_dirs, folder):
    return write_report(run_dirs, folder / "out" / "report.html").read_text()


def figures(page):
    return re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^."]+)', page)


def cell_rows(page, heading):
    table = page[page.index(f"<h3>{heading}</h3>") :].split("</table>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    return [[re.sub(r"<[^>]+>", "", cell) for cell in row] for row in rows]


@pytest.fixture(scope="module")
def single_page(tmp_path_factory, write_synthetic_run):
    folder = tmp_path_factory.mktemp("single")
    run_dir = write_synthetic_run(folder / "demo", num_steps=10, noise=True)
    return report([run_dir], folder)


def test_the_page_has_every_section_and_figure(single_page):
    assert re.findall(r'<h2 id="(\w+)"', single_page) == [*SECTIONS[:2], "noise", *SECTIONS[2:]]
    extra = ["Noise", "Noise that was served"]
    assert sorted(title for _, title in figures(single_page)) == sorted([*PANELS, *extra])
    assert "absent" not in single_page.split("</style>")[1]
    assert "Note on" not in single_page


def test_the_entropy_says_that_it_is_exact(single_page):
    assert "Of the learner&#39;s distribution: exact, over the whole vocabulary." in single_page
    assert "Approximate entropy" not in single_page


def test_figures_are_drawings(single_page):
    for content, _ in figures(single_page):
        assert b"<path" in base64.b64decode(content)


def test_the_page_stands_alone_and_is_small(single_page):
    assert not re.search(r'(src|href)="(?!data:|#)', single_page)
    assert "<script" not in single_page
    assert "@import" not in single_page
    assert len(single_page) < 3_000_000


def test_the_headline_tells_what_ran(single_page):
    cards = dict(re.findall(r'class="label">(.*?)</div><div class="value">(.*?)</div>', single_page))
    assert cards["Arm"] == "aligned w4a16 tbpo"
    assert cards["Format"] == "w4a16"
    assert cards["Alignment"] == "aligned"
    assert cards["Objective"] == "tbpo"
    assert re.fullmatch(r"0\.\d+ to 0\.\d+", cards["Reward"])
    assert cards["Total time"] == "3.5 s"  # 10 steps of 0.35 s


def test_stages_of_noise_have_a_row_each(single_page):
    rows = cell_rows(single_page, "By stage of noise")
    # stage, sigma, steps, the sampler's entropy
    assert [[*row[1:4], row[6]] for row in rows] == [["0", "0", "1 to 5", "0.500"], ["1", "0.0100", "6 to 10", "0.500"]]


def test_error_tokens_of_examples_are_marked_and_text_is_escaped(single_page):
    marks = re.findall(r'<mark title="([^"]+)">(.*?)</mark>', single_page)
    assert [text for _, text in marks] == ["&lt;b&gt;", "+", "+", "9"]
    # exp(-8) = 3.4e-4, exp(-8.2) = 2.7e-4
    assert marks[0][0] == "p = 0.00034 under the learner, 0.00027 under the rollout engine"


def test_modules_are_grouped_and_the_config_is_folded_in(single_page):
    modules = single_page[single_page.index('id="modules"') :]
    assert modules.index("model.layers.1.mlp.experts") < modules.index("lm_head stays BF16")
    assert "<pre>seed: 0" in modules


def test_rollouts_that_alone_are_quantized_are_named_beside_the_learners_modules(make_run, tmp_path):
    runs = [make_run(alignment, alignment=alignment, num_steps=1) for alignment in ("aligned", "rollout_only")]
    modules = report(runs, tmp_path).split('id="modules"')[1]
    assert "What the learner executes in low bits" in modules
    assert modules.count("Rollouts alone are in") == 1
    assert "Rollouts alone are in w4a16" in modules[modules.index("rollout only") :]


def test_arms_are_compared_by_seed(tmp_path, make_run):
    runs = [
        make_run(f"{alignment}-{seed}", alignment=alignment, seed=seed, num_steps=10)
        for alignment in ("none", "rollout_only", "aligned")
        for seed in (1, 2)
    ]
    page = report(runs, tmp_path)
    assert "<h1>6 runs, 3 arms</h1>" in page
    arms = cell_rows(page, "Arms")
    assert [row[:2] for row in arms] == [
        ["BF16 gspo", "2"],
        ["rollout only w4a16 grpo_tis", "2"],
        ["aligned w4a16 tbpo", "2"],
    ]
    gaps = [float(row[5]) for row in arms]
    assert gaps[1] > 100 * max(gaps[0], gaps[2])
    seeds = cell_rows(page, "Final reward by arm and seed")
    assert all(re.fullmatch(r"0\.\d{3}", cell) for row in seeds for cell in row[1:])
    # the mean over seeds stands in the arms' table
    for arm, by_seed in zip(arms, seeds, strict=True):
        assert float(arm[3]) == pytest.approx(np.mean([float(cell) for cell in by_seed[1:]]), abs=1e-3)
    assert ["qarl.alignment", "none", "rollout_only", "aligned"] in cell_rows(page, "Settings that differ")
    assert sorted(title for _, title in figures(page)) == sorted(PANELS)


def test_runs_of_other_settings_are_no_seeds_of_one_arm(tmp_path, make_run):
    runs = [make_run(f"lr{lr:g}", seed=seed, optimizer={"lr": lr}) for seed, lr in ((1, 1e-6), (2, 1e-4))]
    page = report(runs, tmp_path)
    assert "<h1>2 runs, 2 arms</h1>" in page
    assert [row[:2] for row in cell_rows(page, "Arms")] == [["lr1e-06", "1"], ["lr0.0001", "1"]]
    assert "optimizer.lr" in [row[0] for row in cell_rows(page, "Settings that differ")]
    # What divides a step's work, and how long it goes on, makes no other arm; neither does what somebody named alike.
    longer = [make_run(f"s{seed}", seed=seed, grpo={"max_num_steps": 10 * seed}, num_threads=seed) for seed in (3, 4)]
    named = [make_run(f"n{seed}", seed=seed, arm="mine", optimizer={"lr": 1e-6 * seed}) for seed in (5, 6)]
    assert [len(arm.runs) for arm in group_by_arm(load_runs([*longer, *named]))] == [2, 2]
    page = report([*longer, *named], tmp_path)
    assert "<b>Note on mine</b>" in page
    assert "its 2 runs are averaged, and differ in optimizer.lr<" in page
    assert page.count("are averaged") == 1
    shorter = make_run("short", seed=7, arm="mine", num_steps=2, optimizer={"lr": 5e-6})
    assert re.search(r"its runs end at steps 2, \d+: final values", report([named[0], shorter], tmp_path))


def test_each_validation_set_is_drawn_for_itself(tmp_path, make_run):
    one, two = tmp_path / "one", tmp_path / "two"
    make_run(one)
    make_run(two, alignment="none")
    records = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    for record in records[::25]:
        record |= {"validation/reward": 0.5, "validation/reward_gsm8k": 0.75, "validation/reward_MATH-500": 0.25}
    (two / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "Points: validation." in report([one], tmp_path)
    page = report([two], tmp_path)
    assert "Points: validation on gsm8k." in page
    assert "Validation on MATH-500" in page
    assert "Validation on gsm8k<" not in page
    (axes,) = reward_figure(group_by_arm(load_runs([two])), 6, 4).axes
    points = next(line for line in axes.lines if line.get_marker() == "o")
    assert set(points.get_ydata()) == {0.75}


def test_seeds_and_arms_may_be_incomplete(tmp_path, make_run):
    runs = [
        make_run("a1", alignment="aligned", seed=1, num_steps=8),
        make_run("a2", alignment="aligned", seed=2, num_steps=3, diagnostics=False),
        make_run("b1", alignment="none", seed=1, num_steps=8, diagnostics=False),
    ]
    page = report(runs, tmp_path)
    assert [row[-1] for row in cell_rows(page, "Final reward by arm and seed")][1] == ""
    assert page.count("<b>Note on a2</b>") == page.count("<b>Note on b1</b>") == 1


def test_a_run_killed_at_step_three_says_what_is_missing(tmp_path, make_run):
    killed = make_run("killed", num_steps=3, diagnostics=False)
    (killed / "quantized.json").unlink()
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    page = report([killed], tmp_path)
    assert "diagnostics/: none written yet" in page
    assert "No quantized.json" in page
    assert page.count("Not recorded, or not yet, in diagnostics/") == 5
    shown = {title for _, title in figures(page)}
    assert {"Reward", "Phases"} <= shown
    assert "Prox ratio" not in shown


def test_a_run_before_its_first_step_gives_a_page(tmp_path, make_run):
    started = make_run("started", num_steps=0, diagnostics=False)
    page = report([started], tmp_path)
    assert "no training step has finished yet" in page
    assert "Not recorded: reward/mean" in page
    assert figures(page) == []


def test_a_run_after_its_first_step_shows_whole_steps_and_its_phases(make_run):
    arms = group_by_arm(load_runs([make_run("run", num_steps=1, diagnostics=False)]))
    figure = reward_figure(arms, 6.0, 3.0)
    figure.draw_without_rendering()
    low, high = figure.axes[0].get_xlim()
    assert [tick for tick in figure.axes[0].get_xticks() if low <= tick <= high] == [1.0]
    bars = phase_figure(arms).axes[0].patches
    assert sum(bar.get_width() for bar in bars) > 0


def test_unknown_objectives_and_skipped_updates_are_pointed_out(tmp_path, make_run):
    run_dir = make_run("other", num_steps=2, diagnostics=False, loss_fn={"objective": "new"})
    text = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text(text.replace('"optim/skipped_steps": 0', '"optim/skipped_steps": 1'))
    page = report([run_dir], tmp_path)
    assert "loss_fn is not an objective this version knows" in page
    assert "2 updates skipped, whose causes the log names" in page
    (run_dir / "metrics.jsonl").write_text(text.replace('"optim/skipped_steps": 0', '"optim/skipped_steps": 1', 1))
    assert "optim/skipped_steps: 1 update skipped" in report([run_dir], tmp_path)


@pytest.mark.parametrize(
    ("run", "drifts"),
    [
        ("local_gsm8k_arms/BF16-seed2", False),
        ("local_gsm8k_arms/QaRL-w4a16-seed2", False),
        ("local_gsm8k_narrow/QaRL-w3a16-seed1", False),
        ("local_gsm8k_arms/rollout-only-w4a16-TBPO-seed2", False),
        ("local_gsm8k_arms/rollout-only-w4a16-seed2", True),
        ("local_gsm8k_narrow/rollout-only-w3a16-seed1", True),
    ],
)
def test_a_learner_that_moves_away_from_its_engine_is_pointed_out(run, drifts, tmp_path):
    page = report([Path(__file__).parents[3] / "docs" / "results" / "runs" / run], tmp_path)
    assert ("the learner moves away from its engine" in page) == drifts


def gap_figure(make_run, **gaps):
    folders = [make_run(name, num_steps=3, diagnostics=False) for name in gaps]
    for run_dir, value in zip(folders, gaps.values(), strict=True):
        text = (run_dir / "metrics.jsonl").read_text()
        text = re.sub(r'("mismatch/abs_gap_mean"): [^,]+', rf"\1: {value}", text)
        (run_dir / "metrics.jsonl").write_text(text)
    return curve_figure(group_by_arm(load_runs(folders)), "mismatch/abs_gap_mean", "gap", log=True).axes[0]


def test_a_gap_of_exactly_zero_is_drawn_on_a_line_that_says_so(make_run):
    axes = gap_figure(make_run, exact="0.0", other="3e-6")
    zero, faint, bold, _, _ = axes.lines
    # a third of the smallest value above zero
    assert set(zero.get_ydata()) == {1e-6}
    assert faint.get_ydata() == pytest.approx([1e-6] * 3)
    assert bold.get_ydata() == pytest.approx([1e-6] * 3)
    assert [text.get_text() for text in axes.texts] == ["zero"]


def test_a_gap_that_is_always_zero_is_drawn_at_zero(make_run):
    axes = gap_figure(make_run, exact="0.0")
    assert (axes.get_yscale(), set(axes.lines[-1].get_ydata())) == ("linear", {0.0})
    axes = gap_figure(make_run, coarse="5.0")
    assert (axes.get_yscale(), len(axes.lines), list(axes.texts)) == ("log", 2, [])


def test_no_page_is_written_for_what_is_not_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"looked for config\.yaml or metrics\.jsonl"):
        write_report([tmp_path / "absent"], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_the_summary_figure_is_readable_at_1200_pixels(tmp_path, make_run):
    runs = [make_run(name, alignment=name, num_steps=6, seed=1) for name in ("none", "aligned")]
    for name, chosen in (("compare.png", runs), ("one.png", runs[:1])):
        image = imread(write_summary_figure(chosen, tmp_path / "images" / name))
        assert image.shape[1] == 2400
        assert 0.02 < (image[..., :3].min(axis=-1) < 0.8).mean() < 0.5


def test_a_variant_is_dashed_in_the_colour_of_its_arm_and_after_it(make_run):
    names = ("int4, noise", "BF16", "BF16, noise", "int4")
    paths = [make_run(name, arm=name, alignment="none" if "BF16" in name else "aligned") for name in names]
    arms = group_by_arm(load_runs(paths), "noise")
    assert [(arm.name, arm.dashed) for arm in arms] == [
        ("int4", False), ("int4, noise", True), ("BF16", False), ("BF16, noise", True)
    ]  # fmt: skip
    alone = {arm.name: arm.color for arm in group_by_arm(load_runs(paths[1::2]))}
    assert [arm.color for arm in arms] == [alone[arm.name.removesuffix(", noise")] for arm in arms]
    lines = curve_figure(arms[:2], "reward/mean", "reward").axes[0].lines
    assert [line.get_linestyle() for line in lines if line.get_alpha() is None] == ["-", "--"]
    assert not any(arm.dashed for arm in group_by_arm(load_runs(paths)))


def test_a_report_needs_no_torch():
    code = "import sys, qarl_nemo.metrics.report; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_errors_without_a_position_are_searched_for_in_order():
    segments = mark_errors("a-b-c", [{"text": "-", "prev_prob": 0.1}, {"text": "-", "prev_prob": 0.1}])
    assert [segment["text"] for segment in segments if segment["note"]] == ["-", "-"]
    assert "".join(segment["text"] for segment in segments) == "a-b-c"


def test_long_responses_are_cut_around_the_first_error():
    response = "x" * 5000 + "#" + "y" * 5000
    segments = mark_errors(response, [{"text": "#", "start": 5000, "prev_prob": 1e-4, "generation_prob": 1e-4}])
    texts = [segment["text"] for segment in segments]
    assert texts[0] == "[...] "
    assert texts[1] == "x" * 160
    assert texts[2] == "#"
    assert texts[3].endswith("y [...]")
    assert sum(map(len, texts)) < 720


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.12345, "0.123"), (12.345, "12.3"), (1234.5, "1,234"), (3.2e-5, "3.2e-05"), (np.nan, "-")],
)
def test_numbers_have_three_digits(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.5, "3.5 s"), (41, "41 s"), (125, "2 min 05 s"), (11520, "3 h 12 min"), (np.nan, "-")]
)
def test_durations_are_for_people(seconds, text):
    assert format_duration(seconds) == text


def test_shapes_are_shown_as_the_trainer_writes_them():
    row = {"name": "a", "kind": "experts", "format": "w4a16", "quantized": True, "reason": ""}
    groups = module_groups([row | {"shape": "[8, 256, 128] [8, 128, 128]"}, row | {"shape": [8, 64]}])
    assert groups[0]["shapes"] == "[8, 256, 128] [8, 128, 128], 8 x 64"


def test_half_a_character_in_a_run_is_no_obstacle(make_run, tmp_path):
    run = make_run("run", num_steps=0, diagnostics=False)
    rows = json.loads((run / "quantized.json").read_text())
    rows[0]["shape"] = "\ud800"
    (run / "quantized.json").write_text(json.dumps(rows))
    assert write_report([run], tmp_path / "report.html").read_text().rstrip().endswith("</html>")
