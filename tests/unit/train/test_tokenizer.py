import pytest
from transformers import AutoTokenizer

from qarl_nemo.train.tokenizer import CHARACTERS, character_tokenizer


@pytest.fixture(params=["made", "saved and loaded"])
def tokenizer(request, tmp_path):
    made = character_tokenizer()
    if request.param == "made":
        return made
    made.save_pretrained(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)


def test_every_character_is_one_token_and_comes_back(tokenizer):
    ids = tokenizer(CHARACTERS, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(CHARACTERS) == len(set(ids))
    assert tokenizer.decode(ids) == CHARACTERS
    assert len(tokenizer) == len(CHARACTERS) + 4


def test_special_tokens_are_distinct_known_and_left_out_of_text(tokenizer):
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert special == [0, 1, 2, 3]
    (nine,) = tokenizer("9", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode([nine, tokenizer.eos_token_id, 0, 0], skip_special_tokens=True) == "9"


def test_no_token_is_added_on_its_own(tokenizer):
    assert len(tokenizer("12")["input_ids"]) == 2


def test_a_foreign_character_is_unknown(tokenizer):
    assert tokenizer("1x2", add_special_tokens=False)["input_ids"][1] == tokenizer.unk_token_id
