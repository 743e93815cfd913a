"""Prompts as the model sees them: chat templates, plain text, and those that are too long."""

import pytest

from qarl_nemo.config import validate
from qarl_nemo.data.config import DatasetsData
from qarl_nemo.data.problems import Task
from qarl_nemo.train.banner import banner_lines
from qarl_nemo.train.config import ArithmeticData, LocalConfig, TokenizerConfig
from qarl_nemo.train.preflight import prepare
from qarl_nemo.train.prompts import PromptEncoder, limit_prompts, require_room_for_answers
from qarl_nemo.train.tasks import TaskSource
from qarl_nemo.train.tokenizer import character_tokenizer
from support.files import write_jsonl

TEMPLATE = (
    "{% if messages[1:] and no_system is defined %}{{ raise_exception('no system messages here') }}{% endif %}"
    "{% for message in messages %}{{ '*' if message.role == 'user' else '-' }}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ends_with or '=' }}{% endif %}"
)
CHAT = ({"role": "system", "content": "12"}, {"role": "user", "content": "3+4"})


def encoder(template=TEMPLATE, **settings) -> PromptEncoder:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return PromptEncoder(tokenizer, TokenizerConfig(**settings))


def test_text_is_a_users_message_where_there_is_a_template():
    assert encoder().text("1+2") == "*1+2="
    assert encoder().text(CHAT) == "-12*3+4="
    assert encoder(template=None).text("1+2") == "1+2"


def test_tokens_are_those_of_the_text_and_no_others():
    encode = encoder()
    tasks = [Task(CHAT, "7"), Task("5", "5")]
    assert [encode.tokenizer.decode(ids) for ids in encode(tasks)] == ["-12*3+4=", "*5="]
    (ids,) = encoder(template=None)([Task("1+2=", "3")])
    assert encode.tokenizer.convert_ids_to_tokens(ids) == ["1", "+", "2", "="]
    assert encode([]) == []


def test_a_prompt_without_a_token_is_refused():
    with pytest.raises(ValueError, match="makes no token of 1 of 2 prompts, such as ''; leave them out, or use the"):
        encoder(template=None)([Task("1+2=", "3"), Task("", "5")])


def test_null_turns_the_template_off_and_keeps_it_for_the_checkpoint():
    encode = encoder(chat_template=None)
    assert encode.text("1+2") == "1+2"
    assert encode.text(CHAT) == "123+4"
    assert encode.tokenizer.chat_template == TEMPLATE


def test_a_template_of_ones_own_is_saved_with_the_tokenizer(tmp_path):
    own = "{% for message in messages %}+{{ message.content }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(own)
    for chat_template in (own, str(tmp_path / "own.jinja")):
        encode = encoder(chat_template=chat_template)
        assert encode.text("1") == "+1"
        assert encode.tokenizer.chat_template == own
    (tmp_path / "own.jinja").write_text("\ufeff" + own)
    assert encoder(chat_template=str(tmp_path / "own.jinja")).text("1") == "+1"
    with pytest.raises(ValueError, match=r"nowhere.jinja: expected a chat template"):
        encoder(chat_template=str(tmp_path / "nowhere.jinja"))
    (tmp_path / "own.jinja").write_text(" \n")
    with pytest.raises(ValueError, match=r"own.jinja: expected a chat template, but it is empty"):
        encoder(chat_template=str(tmp_path / "own.jinja"))


def test_a_templates_options_reach_it():
    assert encoder(chat_template_kwargs={"ends_with": "+"}).text("1") == "*1+"


def test_messages_that_cannot_be_written_are_refused_with_the_fix():
    with pytest.raises(ValueError, match=r"no chat_template; set policy.tokenizer.chat_template to one, or to null"):
        encoder(template=None).text(CHAT)
    with pytest.raises(ValueError, match=r"refuses the messages .*: no system messages here; policy.tokenizer"):
        encoder(chat_template_kwargs={"no_system": True}).text(CHAT)
    with pytest.raises(ValueError, match=r"refuses the messages .*: ZeroDivisionError: division by zero; policy.token"):
        encoder(template="{{ messages[0].content }}{{ 1 / 0 }}").text("1+2")
    with pytest.raises(ValueError, match=r"writes nothing of the messages .*; policy.tokenizer"):
        encoder(template="{% for message in messages %}{% endfor %}").text("1+2")


@pytest.mark.parametrize("role", ["System", "human"])
def test_a_message_that_the_template_leaves_out_is_refused(role):
    knows_two = (
        "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.content | trim }};"
        "{% elif m.role == 'assistant' %}{{ m.content.split('=')[1] }};{% endif %}{% endfor %}"
    )
    turns = ({"role": "assistant", "content": "1+1=2"}, {"role": "user", "content": " 3+4 "})
    assert encoder(template=knows_two).text((CHAT[0], *turns)) == "12;2;3+4;"
    with pytest.raises(ValueError, match=rf"leaves out the message of the role '{role}': '12'; give it a role that"):
        encoder(template=knows_two).text(({"role": role, "content": "12"}, *turns))


@pytest.fixture
def data(tmp_path):
    """Prompts of 1, 2, 3 and 9 tokens."""
    problems = [{"problem": "1" * length, "answer": length} for length in (1, 2, 9, 3)]
    return {"source": "datasets", "train": {"data_path": write_jsonl(tmp_path / "a.jsonl", problems)}}


def test_long_prompts_are_an_error_that_counts_them(data):
    source = TaskSource(DatasetsData(**data), seed=0)
    with pytest.raises(
        ValueError, match=r"2 of the 4 prompts of data.train have more than 2 tokens, the longest 9 .*1"
    ):
        limit_prompts(source, encoder(template=None), 2, skip=False)
    assert limit_prompts(source, encoder(template=None), 9, skip=False) == {"train": 0, "validation": 0}


def test_long_prompts_of_both_keys_are_told_at_once(data):
    source = TaskSource(DatasetsData(**data, validation=data["train"]), seed=0)
    with pytest.raises(
        ValueError, match=r"^2 of the 4 prompts of data.train .*\n  2 of the 4 prompts of data.validation"
    ):
        limit_prompts(source, encoder(template=None), 2, skip=False)
    with pytest.raises(ValueError, match=r"^the chat template writes nothing .* none$"):
        limit_prompts(source, encoder(template="{% if 0 %}{% endif %}"), 2, skip=False)


def test_long_prompts_are_skipped_and_counted_when_told(data):
    source = TaskSource(DatasetsData(**data, validation=data["train"]), seed=0)
    assert limit_prompts(source, encoder(template=None), 2, skip=True) == {"train": 2, "validation": 2}
    assert sorted(task.answer for task in source.train(1, 2)) == ["1", "2"]
    # The template's tokens count: none of those that are left has room.
    with pytest.raises(ValueError, match=r"2 of the 2 prompts .* the longest 4 .*lengths$"):
        limit_prompts(source, encoder(), 2, skip=True)


def test_arithmetic_that_leaves_no_room_for_the_response_is_an_error():
    source = TaskSource(ArithmeticData(digits=2), seed=0)
    assert limit_prompts(source, encoder(template=None), 6, skip=False) == {"train": 0, "validation": 0}
    with pytest.raises(ValueError, match=r"data\.source=arithmetic have 6 tokens \('\d\d.\d\d='\), .* room for 5"):
        limit_prompts(source, encoder(template=None), 5, skip=False)


@pytest.mark.parametrize(
    ("settings", "num_tokens", "answer"),
    [
        ({"digits": 5}, 4, r"'\d{5,6}' with [56], .*; set rollout.max_new_tokens=7"),
        ({"digits": 3, "operators": "*"}, 4, r"'\d{6}' with 6, .*; set rollout.max_new_tokens=7"),
        ({"digits": 1, "running_totals": True, "num_terms": 4}, 4, r"'\d+ \d+ \d+' with [5-8], .*; set rollout"),
        ({"digits": 1}, 0, r"'\d\d' with 2, .*; set rollout.max_new_tokens=3"),
    ],
)
def test_arithmetic_whose_answers_are_cut_off_is_an_error(settings, num_tokens, answer):
    source = TaskSource(ArithmeticData(**settings), seed=0)
    with pytest.raises(ValueError, match=rf"rollout.max_new_tokens={num_tokens} tokens, such as {answer}"):
        require_room_for_answers(source, encoder(template=None), num_tokens)
    require_room_for_answers(source, encoder(template=None), 12)


def test_the_longest_arithmetic_answers_may_be_cut_off():
    # Signs make some of them longer.
    source = TaskSource(ArithmeticData(digits=2, operators="+-", answer_digits=3), seed=0)
    require_room_for_answers(source, encoder(template=None), 3)


def config(tmp_path, data, **blocks) -> LocalConfig:
    values = {
        "run_dir": str(tmp_path / "run"),
        "device": "cpu",
        "policy": {"model_init": {"max_position_embeddings": 16}},
        "rollout": {"max_new_tokens": 8},
        "loss_fn": {"objective": "tbpo"},
        "data": data,
    }
    return validate(values | blocks, LocalConfig, source="test")


def test_a_run_leaves_room_for_the_response(data, tmp_path):
    with pytest.raises(ValueError, match=r"1 of the 4 prompts of data.train have more than 8 tokens, the longest 9"):
        prepare(config(tmp_path, data))
    with pytest.raises(ValueError, match=r"max_new_tokens=16 exceed the model's positions, 16 tokens"):
        prepare(config(tmp_path, data, rollout={"max_new_tokens": 16}))
    with pytest.raises(ValueError, match=r"max_new_tokens=8 and data.max_input_seq_length=9 exceed"):
        prepare(config(tmp_path, data | {"max_input_seq_length": 9}))


def test_data_and_tokenizer_and_lengths_are_looked_at_whatever_is_wrong_with_the_others(tmp_path):
    blocks = {"model_init": {"max_position_embeddings": 16}, "tokenizer": {"chat_template": "nowhere.jinja"}}
    data = {"source": "datasets", "train": {"data_path": str(tmp_path / "no.jsonl")}}
    with pytest.raises(ValueError, match=r"3 problem\(s\), nothing was started") as error:
        prepare(config(tmp_path, data, policy=blocks, rollout={"max_new_tokens": 16}))
    for text in ("no.jsonl does not exist", "nowhere.jinja: expected a chat template", "max_new_tokens=16 exceed"):
        assert text in str(error.value)


def test_the_start_tells_what_is_trained_on_and_shows_the_first_prompt(data, tmp_path):
    made = config(tmp_path, data | {"max_input_seq_length": 2, "overlong_prompts": "skip"})
    prepared = prepare(made)
    assert prepared.skipped == {"train": 2, "validation": 0}
    lines = banner_lines(made, prepared, None)
    path = data["train"]["data_path"]
    assert lines["data"] == f"train: 2 problems of {path}, 2 overlong ones skipped; validation: the first of these"
    assert (lines["a prompt"], lines["its answer"]) in [("1", "1"), ("11", "2")]
    made = config(tmp_path, {"source": "arithmetic"})
    lines = banner_lines(made, prepare(made), None)
    assert lines["data"] == "arithmetic, made as it is needed"
    assert lines["a prompt"].endswith("=")
