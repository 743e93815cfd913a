"""Reading a YAML: `defaults:`, `_override_`, `a.b=c`, and errors a reader can act on."""

import pytest
from omegaconf import OmegaConf

from qarl_nemo.config import ConfigError, QarlConfig, StrictModel, load_config, merge_mappings, read_yaml, validate


class Inner(StrictModel):
    size: int = 1
    color: str = "red"


class Whole(StrictModel):
    name: str
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
    assert OmegaConf.to_container(read_yaml(path)) == expected


def test_defaults_are_relative_to_the_file_that_names_them_and_may_be_shared(write):
    write("inner: {size: 5}", "base/root.yaml")
    write("defaults: root.yaml\nname: left", "base/left.yaml")
    write("defaults: root.yaml\ninner: {color: green}", "base/right.yaml")
    config = load_config(write("defaults: [base/left.yaml, base/right.yaml]"), [], Whole)
    assert (config.name, config.inner) == ("left", Inner(size=5, color="green"))


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


def test_an_override_can_replace_a_block(write):
    path = write("name: x\ninner: {size: 2, color: blue}")
    assert load_config(path, ["inner._override_=true", "inner.size=3"], Whole).inner == Inner(size=3)
    assert load_config(path, ["inner={_override_: true, size: 3}"], Whole).inner == Inner(size=3)
    assert load_config(path, ["inner={size: 3}"], Whole).inner == Inner(size=3, color="blue")


def test_interpolation_refers_to_other_keys(write):
    assert load_config(write("name: ${inner.color}"), ["inner.color=teal"], Whole).name == "teal"


def test_every_malformed_override_is_named_at_once(write):
    wrong = ["seed", "--name=x", "=3", "inner..size=3", "name={oops"]
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
        "inner.size: Input should be a valid integer",
        "unknown key 'qarl.fromat': did you mean 'format'?",
        "qarl.alignment: Input should be 'aligned', 'rollout_only' or 'none'",
    ):
        assert expected in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- 1", "must hold a mapping"),
        ("name: [", "not valid YAML"),
        ("name: x\nname: y", "duplicate key name"),
        ("defaults: absent.yaml", "no config file .*absent.yaml, named in defaults of .*run.yaml"),
        ("defaults: 5", "defaults of .*run.yaml must be one path or a list of paths, not 5"),
        ("defaults: [1]", "must be one path or a list"),
        ("name: ${absent.key}", "run.yaml: Interpolation key 'absent.key' not found"),
    ],
)
def test_unreadable_files_say_why(write, text, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(write(text), [], Whole)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no config file .*nowhere.yaml"):
        load_config(tmp_path / "nowhere.yaml", [], Whole)


def test_circular_defaults_show_the_circle(write):
    write("defaults: run.yaml", "other.yaml")
    with pytest.raises(ConfigError, match=r"circle: .*run.yaml -> .*other.yaml -> .*run.yaml"):
        load_config(write("defaults: other.yaml"), [], Whole)


@pytest.mark.parametrize(
    ("alignment", "number_format"), [("none", "w4a16"), ("aligned", "bf16"), ("rollout_only", "bf16")]
)
def test_alignment_none_and_bf16_go_together(alignment, number_format):
    with pytest.raises(ConfigError, match="alignment=none and format=bf16 go together"):
        validate({"alignment": alignment, "format": number_format}, QarlConfig, source="test")


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "fp8_block", "fp8_channel", "w2a16", "w8a16"])
def test_every_format_is_legal_with_both_quantized_alignments(name):
    for alignment in ("aligned", "rollout_only"):
        assert validate({"alignment": alignment, "format": name}, QarlConfig, source="test").format == name


@pytest.mark.parametrize("name", ["w9a16", "w4a16x", "int4", "fp8"])
def test_unknown_formats_are_refused(name):
    with pytest.raises(ConfigError, match="format: String should match"):
        validate({"format": name}, QarlConfig, source="test")


def test_a_config_cannot_be_changed_after_it_was_checked():
    with pytest.raises(ValueError, match="frozen"):
        QarlConfig().format = "bf16"
