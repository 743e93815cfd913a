"""Reading a YAML: `defaults:`, `_override_`, `a.b=c`, and errors a reader can act on."""

import os

import pytest
from pydantic import Field

from qarl_nemo.config import (
    ConfigError,
    QarlConfig,
    StrictModel,
    literal,
    load_config,
    merge_mappings,
    plain,
    read_yaml,
    write_yaml,
)
from qarl_nemo.installation import shipped_configs
from qarl_nemo.train.config import LocalConfig


class Inner(StrictModel):
    size: int = 1
    color: str = "red"


class Whole(StrictModel):
    name: str
    label: str | None = None
    texts: dict[str, str] = Field({})
    inner: Inner = Inner()
    sizes: tuple[int, ...] = ()
    qarl: QarlConfig = QarlConfig()


@pytest.fixture
def write(tmp_path):
    def to_file(text: str, name: str = "run.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return to_file


def test_own_keys_win_over_defaults_and_later_defaults_over_earlier(write):
    write("name: first\ninner: {size: 2, color: blue}\nsizes: [1, 2]", "first.yaml")
    write("name: second\ninner: {size: 3}", "second.yaml")
    path = write("defaults: [first.yaml, second.yaml]\nsizes: [9]")
    # blocks merge key by key, lists are replaced whole
    expected = {"name": "second", "inner": {"size": 3, "color": "blue"}, "sizes": [9]}
    assert read_yaml(path) == expected


def test_defaults_are_relative_to_the_file_that_names_them_and_may_be_shared(write):
    write("inner: {size: 5}", "base/root.yaml")
    write("defaults: root.yaml\nname: left", "base/left.yaml")
    write("defaults: root.yaml\ninner: {color: green}", "base/right.yaml")
    config = load_config(write("defaults: [base/left.yaml, base/right.yaml]"), [], Whole)
    assert (config.name, config.inner) == ("left", Inner(size=5, color="green"))


@pytest.mark.parametrize("name", ["demo", "local_demo"])
def test_defaults_may_be_a_shipped_config_wherever_the_file_is(write, name):
    (write("seed: 9").parent / "demo").mkdir()
    shipped = read_yaml(shipped_configs()["demo"])
    del shipped["run"]
    assert read_yaml(write(f"defaults: {name}\nseed: 9")) == shipped | {"seed": 9}


@pytest.mark.parametrize(
    ("own", "name"), [("", "countdown"), ("run: {arm: ours}", "countdown"), ("run: {name: x}", "x")]
)
def test_a_run_is_called_as_its_file_says_or_as_its_folder_and_never_as_a_file_that_it_builds_on(write, own, name):
    config = load_config(write(f"defaults: demo\nrun_dir: runs/countdown\n{own}"), [], LocalConfig)
    assert config.name == name
    assert load_config(shipped_configs()["demo"], [], LocalConfig).name == "demo"


def test_a_file_of_ones_own_wins_over_a_shipped_config(write):
    write("name: own", "local_demo.yaml")
    assert read_yaml(write("defaults: local_demo.yaml")) == {"name": "own"}


def test_override_marker_replaces_a_block_instead_of_merging(write):
    write("name: base\ninner: {size: 2, color: blue}", "base.yaml")
    config = load_config(write("defaults: base.yaml\ninner: {_override_: true, size: 7}"), [], Whole)
    assert config.inner == Inner(size=7)  # color is back to the model's default
    kept = load_config(write("defaults: base.yaml\ninner: {_override_: false, size: 7}"), [], Whole)
    assert kept.inner == Inner(size=7, color="blue")


def test_merging_leaves_its_inputs_alone():
    below, above = {"a": {"b": 1}}, {"a": {"_override_": True, "c": 2}}
    assert merge_mappings(below, above) == {"a": {"c": 2}}
    assert below == {"a": {"b": 1}}
    assert above == {"a": {"_override_": True, "c": 2}}


def test_overrides_apply_in_order_and_parse_yaml_values(write):
    path = write("name: x\ninner: {size: 2, color: blue}")
    overrides = ["inner.size=3", "inner.size=4", "sizes=[1,2]", "name=a=b"]
    config = load_config(path, overrides, Whole)
    assert (config.inner, config.sizes, config.name) == (Inner(size=4, color="blue"), (1, 2), "a=b")


@pytest.mark.parametrize("plus", ["+", "++"])
def test_nemo_rls_plus_before_an_override_means_nothing(write, plus):
    path = write("name: x\ninner: {size: 2}")
    config = load_config(path, [f"{plus}inner.size=3", f"{plus}name=+y"], Whole)
    assert (config.inner.size, config.name) == (3, "+y")
    with pytest.raises(ConfigError, match=r"unknown key 'inner.sizee': did you mean 'size'"):
        load_config(path, [f"{plus}inner.sizee=3"], Whole)
    with pytest.raises(ConfigError, match=r"unknown key '\+name'"):
        load_config(path, ["+++name=3"], Whole)


def test_an_override_can_replace_a_block(write):
    path = write("name: x\ninner: {size: 2, color: blue}")
    assert load_config(path, ["inner._override_=true", "inner.size=3"], Whole).inner == Inner(size=3)
    assert load_config(path, ["inner={_override_: true, size: 3}"], Whole).inner == Inner(size=3)
    assert load_config(path, ["inner={size: 3}"], Whole).inner == Inner(size=3, color="blue")


def test_interpolation_refers_to_other_keys(write):
    assert load_config(write("name: ${inner.color}"), ["inner.color=teal"], Whole).name == "teal"


@pytest.mark.parametrize("text", ["${x}", r"\${x}", r"$\\${x+1}$ \\", "a${", "$ {x}"])
def test_a_literal_is_read_as_it_was(text, tmp_path):
    values = {"name": text, "texts": {"a": text}}
    write_yaml(tmp_path / "run.yaml", literal(values))
    assert load_config(tmp_path / "run.yaml", [], Whole) == Whole(**values)
    assert plain(read_yaml(tmp_path / "run.yaml")) == values


def test_a_reference_behind_the_end_of_a_list_is_named(write):
    assert load_config(write("name: x\nsizes: [1, 2]\ninner: {size: '${sizes.1}'}"), [], Whole).inner.size == 2
    with pytest.raises(ConfigError, match=r"run\.yaml: .*sizes\.2"):
        load_config(write("name: x\nsizes: [1, 2]\ninner: {size: '${sizes.2}'}"), [], Whole)


def test_every_malformed_override_is_named_at_once(write):
    wrong = ["seed", "--name=x", "=3", "inner..size=3", "sizes={oops"]
    with pytest.raises(ConfigError, match=r"a\.b=c") as raised:
        load_config(write("name: x"), [*wrong, "inner.size=4"], Whole)
    assert all(text in str(raised.value) for text in wrong)
    assert "inner.size=4" not in str(raised.value)


def test_all_problems_are_listed_at_once_each_unknown_key_with_the_nearest_legal_one(write):
    text = "nmae: x\ninner: {colour: blue, size: big}\nqarl: {fromat: w4a16, alignment: almost}"
    with pytest.raises(ConfigError) as raised:
        load_config(write(text), [], Whole)
    message = str(raised.value)
    for expected in (
        "run.yaml: 6 problem(s)",
        "name: Field required",
        "unknown key 'nmae': did you mean 'name'?",
        "unknown key 'inner.colour': did you mean 'color'? legal here: color, size",
        "inner.size: Input should be a valid integer, unable to parse string as an integer (given 'big')",
        "unknown key 'qarl.fromat': did you mean 'format'?",
        "qarl.alignment: Input should be 'aligned', 'rollout_only' or 'none' (given 'almost')",
    ):
        assert expected in message


def test_problems_are_headed_by_the_overrides_that_may_have_caused_them(write):
    with pytest.raises(ConfigError, match=r"run.yaml with inner.size, name from the command line: 1 problem\("):
        load_config(write("name: x"), ["inner.size=big", "name=y", "inner.size=bigger"], Whole)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- 1", "must hold a mapping"),
        ("name: [", "not valid YAML"),
        ("name: x\nname: y", "duplicate key name"),
        ("defaults: absent.yaml", "no config file .*absent.yaml, named in defaults of .*run.yaml, relative to it$"),
        # A file that is not there does not become the shipped one of its name.
        ("defaults: local_demo.yaml", "no config file .*, relative to it; the shipped one is .*local_demo.yaml"),
        ("defaults: examples/configs/local_demo.yaml", "relative to it; the shipped one is .*local_demo.yaml"),
        ("defaults: configs/local_demo.yaml", "relative to it; the shipped one is .*local_demo.yaml"),
        ("defaults: 5", "defaults of .*run.yaml must be one path or a list of paths, not 5"),
        ("defaults: [1]", "must be one path or a list"),
        ("name: ${absent.key}", "run.yaml: Interpolation key 'absent.key' not found"),
        ("5", "run.yaml must hold a mapping"),
        ("defaults: {a: b}", "must be one path or a list"),
        ("defaults: ${oc.env:NOT_SET_HERE}", "run.yaml: defaults: .*Environment variable 'NOT_SET_HERE' not found"),
        ('defaults: "\\0"', "cannot be a config file"),
        ("inner: {_override_: maybe}", "_override_ must be true or false, not 'maybe'"),
        ("name: ${inner.color}\ninner: {color: '${name}'}", "Recursive interpolation"),
        ("name: &x [*x]", "not valid YAML|aliases written out"),
        (f"name: {'9' * 5000}", "not valid YAML"),
        (f"name: {'[' * 5000}", "run.yaml, line 1: a config has at most 20000 values, .* and 40 levels"),
        (f"name: {'x' * 300_000}", "run.yaml has 300006 characters; a config has at most 262144"),
        ("inner: {size: .nan}", "inner.size: Input should be"),
        ("inner: {1: 2, null: 3}", "unknown key 'inner.1'|not valid YAML"),
        ("\n".join(f"key{i}: 1" for i in range(100)), r"101 problem\(s\)(.|\n)*and 61 more"),
    ],
)
def test_unreadable_files_say_why(write, text, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(write(text), [], Whole)


# Ten levels of ten aliases or references each: 10^10 values of a few hundred bytes.
BOMBS = {
    "aliases": "\n".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 10) if i else 1}]" for i in range(10)),
    "interpolations": "k0: text\n" + "\n".join(f"k{i}: '{f'${{k{i - 1}}}' * 10}'" for i in range(1, 10)),
    "relative interpolations": "k0: text\n" + "\n".join(f"k{i}: '{f'${{.k{i - 1}}}' * 10}'" for i in range(1, 10)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_would_grow_without_bound_is_refused(write, bomb):
    with pytest.raises(ConfigError, match=r"run\.yaml.*(aliases written out|filled in)"):
        load_config(write(BOMBS[bomb]), [], Whole)


@pytest.mark.parametrize(
    "below", ["'{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}'", "['{0}'" + ", '{0}'" * 9 + "]"], ids=["text", "list"]
)
def test_what_resolvers_and_lists_refer_to_counts(write, below):
    # 200 * 10^4 characters.
    levels = [f"k{level}: {below.format(f'${{oc.select:k{level - 1}}}')}" for level in range(1, 5)]
    with pytest.raises(ConfigError, match="filled in"):
        load_config(write("\n".join([f"k0: {'x' * 200}", *levels])), [], Whole)


def test_an_override_that_would_grow_without_bound_is_refused_before_it_is_built(write, monkeypatch):
    monkeypatch.setattr("omegaconf.OmegaConf.from_dotlist", lambda texts: pytest.fail("built"))
    bomb = "{" + BOMBS["aliases"].replace("\n", ", ") + "}"
    with pytest.raises(ConfigError, match="the override of inner: line 1: a config has at most"):
        load_config(write("name: x"), [f"inner={bomb}"], Whole)


@pytest.mark.parametrize("number", ["010", "007", "-08", "1:40", "2:00:00"])
def test_a_number_that_yaml_reads_as_another_is_refused_unless_it_is_text(write, number):
    for config, overrides in ((f"name: x\ninner: {{size: {number}}}", []), ("name: x", [f"inner.size={number}"])):
        with pytest.raises(ConfigError, match=f"line [12]: {number} is no decimal number in YAML"):
            load_config(write(config), overrides, Whole)
    assert load_config(write(f"name: '{number}'"), [f"label={number}", "inner.size=0"], Whole).label == number


def test_paths_begin_at_home(write, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    data = "{_override_: true, source: datasets, train: {data_path: ~/problems.jsonl}}"
    path = write(f"defaults: local_gsm8k\nrun_dir: ~/run\ndata: {data}")
    config = load_config(path, ["policy.model_path=~/model"], LocalConfig)
    assert (config.run_dir, config.policy.model_path) == (tmp_path / "run", tmp_path / "model")
    assert config.data.train.data_path == str(tmp_path / "problems.jsonl")


def test_defaults_that_fan_out_are_read_once_each(write):
    for level in range(15):
        write(f"defaults: [{level + 1}.yaml, {level + 1}.yaml]", f"{level}.yaml")
    write("name: deep", "15.yaml")
    assert load_config(write("defaults: 0.yaml"), [], Whole).name == "deep"
    write("defaults: 16.yaml", "15.yaml")
    for level in range(16, 25):
        write(f"defaults: {level + 1}.yaml", f"{level}.yaml")
    with pytest.raises(ConfigError, match="builds on at most 20 files"):
        load_config(write("defaults: 0.yaml"), [], Whole)


def test_a_pipe_is_refused_before_it_blocks(tmp_path, write):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"pipe.yaml: expected a YAML config, but it is not a regular file"):
        load_config(tmp_path / "pipe.yaml", [], Whole)
    with pytest.raises(ConfigError, match=r"not a regular file, named in defaults of .*run.yaml"):
        load_config(write("defaults: pipe.yaml"), [], Whole)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        # What the key holds decides: text stays as it was written.
        ("name=Question: {problem}", "Question: {problem}"),
        ("name=5", "5"),
        ("name=null", "null"),
        ("name=a #b", "a #b"),
        ("name=[x", "[x"),
        ("name='quoted: text'", "quoted: text"),
        ('name="quoted: text"', "quoted: text"),
        ("name=${inner.color}", "red"),
        ("name=", ""),
    ],
)
def test_text_keys_take_text_as_it_is_written(write, override, name):
    assert load_config(write("inner: {color: red}"), [override], Whole).name == name


def test_null_unsets_text_that_may_be_missing(write):
    assert load_config(write("name: x\nlabel: y"), ["label=null"], Whole).label is None
    assert load_config(write("name: x"), ["label=null and void"], Whole).label == "null and void"
    assert load_config(write("name: x"), ["texts.one=1"], Whole).texts == {"one": "1"}


def test_nemo_rls_null_for_no_chunks_is_answered_with_what_holds_here(write):
    own = write("defaults: demo")
    said = r"policy\.logprob_chunk_size: logits are always made in chunks here: set 1 or more positions, not null$"
    with pytest.raises(ConfigError, match=said):
        load_config(own, ["policy.logprob_chunk_size=null"], LocalConfig)
    with pytest.raises(ConfigError, match=r"logprob_chunk_size: Input should be greater than or equal to 1 \(given 0"):
        load_config(own, ["policy.logprob_chunk_size=0"], LocalConfig)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no config file .*nowhere.yaml"):
        load_config(tmp_path / "nowhere.yaml", [], Whole)


def test_circular_defaults_show_the_circle(write):
    write("defaults: run.yaml", "other.yaml")
    with pytest.raises(ConfigError, match=r"circle: .*run.yaml -> .*other.yaml -> .*run.yaml"):
        load_config(write("defaults: other.yaml"), [], Whole)


def test_a_format_of_the_command_line_takes_away_options_it_does_not_have(write):
    path = write("name: x\nqarl: {format: w4a16, group_size: 32, scale_convention: narrow_range}")
    qarl = load_config(path, ["qarl.format=fp8_channel"], Whole).qarl
    assert (qarl.format, qarl.group_size, qarl.scale_convention) == ("fp8_channel", None, None)
    assert load_config(path, ["qarl.format=w8a16"], Whole).qarl.group_size == 32
    staged = write("name: x\nqarl: {format: w8a16, schedule: [{from_step: 2, bits: 4}]}")
    assert load_config(staged, ["qarl.format=fp8_channel"], Whole).qarl.schedule is None
    # What the command line says itself stays, whichever comes first, and is an error where the format is known.
    assert load_config(path, ["qarl.group_size=64", "qarl.format=fp8_channel"], Whole).qarl.group_size == 64
    # So does what a file says beside its own format.
    assert load_config(write("name: x\nqarl: {format: fp8_block, group_size: 32}"), [], Whole).qarl.group_size == 32


@pytest.mark.parametrize(
    ("override", "targets"),
    [("qarl.targets=attention", ("attention",)), ("qarl.targets=experts,attention", ("experts", "attention"))],
)
def test_targets_take_commas(write, override, targets):
    assert load_config(write("name: x"), [override], Whole).qarl.targets == targets


@pytest.mark.parametrize("override", ["qarl.targets=attn", "qarl.targets=5", "qarl.targets={a: 1}"])
def test_wrong_targets_are_answered_with_the_legal_ones(write, override):
    with pytest.raises(ConfigError, match=r"qarl.targets.*experts'?, '?attention'?( or|,) '?mlp"):
        load_config(write("name: x"), [override], Whole)
