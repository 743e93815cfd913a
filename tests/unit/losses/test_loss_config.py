import dataclasses
import pickle
from typing import get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from qarl_nemo.losses.build import build_loss
from qarl_nemo.losses.config import Bands, GSPOConfig, LossConfig, TBPOConfig, _Objective
from support.loss_batches import CONFIGS, NAMES, random_batch

ADAPTER = TypeAdapter(LossConfig)
MODELS = get_args(get_args(LossConfig)[0])


def test_every_objective_of_the_union_can_be_built_from_its_defaults():
    assert sorted(model.model_fields["objective"].default for model in MODELS) == NAMES
    curr, data = random_batch(0)
    for model in MODELS:
        config = ADAPTER.validate_python({"objective": model.model_fields["objective"].default})
        assert type(config) is model
        loss_fn = pickle.loads(pickle.dumps(build_loss(config)))
        assert loss_fn(curr, data).loss.isfinite()


# As the sources that the objectives' files name have them.
DEFAULTS = {
    "tbpo": {
        "positive_clip_high": 4e-4,
        "negative_clip_low": 3e-4,
        "negative_clip_high": 7e-4,
        "mismatch_cap": 2.0,
    },
    "grpo_tis": {"clip_low": 0.2, "clip_high": 0.28, "mismatch_cap": 2.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "mis_gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "mismatch_low": 0.999, "mismatch_high": 1.002},
    "positive_grpo": {"clip_high": 0.28, "mismatch_cap": 2.0},
    "on_policy_grpo": {"mismatch_cap": 2.0},
    "dual_clip_grpo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "mismatch_cap": 2.0},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "qurl_acr": {"clip_low": 0.2, "clip_high": 0.2, "mismatch_cap": 2.0},
}


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_are_left_out_are_the_published_ones(name):
    assert ADAPTER.validate_python({"objective": name}).model_dump() == {"objective": name} | DEFAULTS[name]


@pytest.mark.parametrize("model", MODELS)
def test_every_setting_has_a_description_and_a_bound(model):
    for name, field in model.model_fields.items():
        if name != "objective":
            assert field.description, name
            assert field.metadata, name


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"mismatch_cap": 2.0}, "objective"),
        ({"objective": "tbpo", "mismatch_cap": 1.0}, "greater than 1"),
        ({"objective": "tbpo", "negative_clip_low": 1.0}, "less than 1"),
        ({"objective": "tbpo", "positive_clip_high": 0.0}, "greater than 0"),
        ({"objective": "tbpo", "positive_clip_high": float("nan")}, "finite number"),
        ({"objective": "tbpo", "mismatch_cap": "2"}, "valid number"),
        ({"objective": "mis_gspo", "mismatch_low": 1.1}, "less than 1"),
        ({"objective": "mis_gspo", "mismatch_high": 0.9}, "greater than 1"),
        ({"objective": "dual_clip_grpo", "dual_clip": 1.0}, "greater than 1"),
        ({"objective": "sapo", "tau_neg": -1.0}, "greater than 0"),
    ],
)
def test_a_wrong_setting_is_refused(settings, complaint):
    with pytest.raises(ValidationError, match=complaint):
        ADAPTER.validate_python(settings)


def test_a_config_cannot_be_changed_after_it_was_checked():
    with pytest.raises(ValidationError, match="frozen"):
        TBPOConfig().mismatch_cap = 0.5


def false_claims(config) -> list[str]:
    """What an objective says of itself and its loss does not do."""
    loss_fn, (curr, data) = build_loss(config), random_batch(0, num_seqs=6)
    loss = loss_fn(curr, data).loss.item()
    assert loss
    more = {name: getattr(data, name) * 2 for name in ("global_valid_seqs", "global_valid_toks")}
    more["generation_logprobs"] = data.generation_logprobs + 0.01
    changed = {name: loss_fn(curr, dataclasses.replace(data, **{name: value})).loss for name, value in more.items()}
    halved = {name for name, value in changed.items() if value.item() == pytest.approx(loss / 2)}
    claims = {
        "averages": halved == {"global_valid_seqs" if config.averages == "response" else "global_valid_toks"},
        "corrects_mismatch": config.corrects_mismatch == (changed["generation_logprobs"].item() != loss),
    }
    return [name for name, holds in claims.items() if not holds]


WIDE = {"mis_gspo": {"mismatch_low": 0.1, "mismatch_high": 10.0}}


@pytest.mark.parametrize("name", NAMES)
def test_an_objective_says_of_itself_what_its_loss_does(name):
    assert false_claims(CONFIGS[name].model_copy(update=WIDE.get(name))) == []


def test_weights_without_a_cap_correct_nothing():
    uncapped = CONFIGS["grpo_tis"].model_copy(update={"mismatch_cap": None})
    assert not uncapped.corrects_mismatch
    assert false_claims(uncapped) == []


def test_false_claims_are_found_and_missing_ones_are_not_guessed():
    class Claiming(GSPOConfig):
        averages = "token"

        @property
        def bands(self) -> Bands:
            return Bands(mismatch=(0.0, 2.0))

    assert false_claims(Claiming()) == ["averages", "corrects_mismatch"]

    class Silent(_Objective):
        pass

    for name in ("averages", "band_unit"):
        with pytest.raises(AttributeError, match=name):
            getattr(Silent(), name)
    assert not Silent().corrects_mismatch
