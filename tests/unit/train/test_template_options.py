"""Options of chat templates: a misspelt one, which a template would pass over in silence, is refused."""

import pytest

from qarl_nemo.config import validate
from qarl_nemo.train.config import LocalConfig, TokenizerConfig
from qarl_nemo.train.preflight import prepare
from qarl_nemo.train.prompts import PromptEncoder
from qarl_nemo.train.template_options import require_options
from qarl_nemo.train.tokenizer import character_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
    "{% if not date is defined %}{% set date = strftime_now('%d') %}{% endif %}{{ date }}"
    "{% if add_generation_prompt and enable_thinking is false %}{{ raise_exception('no') }}{% endif %}"
)


def encoder(template: str | None, options: dict, **settings) -> PromptEncoder:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return PromptEncoder(tokenizer, TokenizerConfig(chat_template_kwargs=options, **settings))


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"date": "1", "enable_thinking": True}])
def test_what_a_template_reads_is_legal(options):
    require_options([encoder(TEMPLATE, options)])


@pytest.mark.parametrize("option", ["enable_thinkng", "add_generation_prompt", "tokenize"])
def test_an_option_that_no_template_reads_names_the_legal_ones(option):
    with pytest.raises(ValueError, match=rf"{option}: the chat template does not read it; ") as error:
        require_options([encoder(TEMPLATE, {option: False})])
    assert str(error.value).endswith("legal here: date, enable_thinking")


def test_the_nearest_option_is_guessed():
    with pytest.raises(ValueError, match="did you mean 'enable_thinking'"):
        require_options([encoder(TEMPLATE, {"enable_thinkng": False})])


@pytest.mark.parametrize(("template", "settings"), [(None, {}), (TEMPLATE, {"chat_template": None})])
def test_options_without_a_template_are_refused(template, settings):
    with pytest.raises(ValueError, match=r"kwargs\.enable_thinking: there is no chat template to read it"):
        require_options([encoder(template, {"enable_thinking": False}, **settings)])


def test_an_option_of_one_model_is_none_of_another():
    options = {"enable_thinking": False}
    require_options([encoder(None, options), encoder(TEMPLATE, options)])


def test_a_run_with_a_misspelt_option_does_not_start(tmp_path):
    values = {
        "run_dir": str(tmp_path / "run"),
        "device": "cpu",
        "policy": {
            "model_init": {"max_position_embeddings": 32},
            "tokenizer": {"chat_template": TEMPLATE, "chat_template_kwargs": {"enable_thinkng": False}},
        },
        "rollout": {"max_new_tokens": 8},
        "loss_fn": {"objective": "tbpo"},
        "data": {"source": "arithmetic"},
    }
    with pytest.raises(ValueError, match=r"chat_template_kwargs\.enable_thinkng: the chat template does not read it"):
        prepare(validate(values, LocalConfig, source="test"))
