import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bastion_batch.config import InputConfig
from bastion_batch.errors import ModelError
from bastion_batch.io.prompts import PromptRenderer
from bastion_batch.records import RowFault

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(template):
    """A token for each byte, behind <s> by default."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, **{c: i for i, c in enumerate(alphabet, start=1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", chat_template=template
    )


@pytest.fixture(scope="module")
def chat():
    return byte_tokenizer(TEMPLATE)


@pytest.fixture(scope="module")
def plain():
    return byte_tokenizer(None)


def renderer(tokenizer, **fields):
    return PromptRenderer(InputConfig(path="x", **({"prompt": "p"} | fields)), tokenizer)


def rendered(tokenizer, row, **fields):
    ids = renderer(tokenizer, **fields).render(row)
    assert not isinstance(ids, RowFault), ids
    return tokenizer.decode(ids)


def test_a_prompt_is_one_user_message(chat):
    assert rendered(chat, {"p": "héy"}) == "<s><|user|>héy\n<|assistant|>"


def test_a_system_message_comes_first(chat):
    text = rendered(chat, {"p": "hey"}, system="Be brief.")
    assert text == "<s><|system|>Be brief.\n<|user|>hey\n<|assistant|>"


def test_without_a_template_the_tokenizers_special_tokens_are_added(plain, chat):
    assert rendered(plain, {"p": "hey"}) == "<s>hey"
    assert rendered(chat, {"p": "hey"}, chat_template=False) == "<s>hey"


CHAT = [
    {"role": "user", "content": "hi", "name": None},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "\ud800?"},
]


@pytest.mark.parametrize("value", [CHAT, json.dumps(CHAT)])
def test_messages_are_a_list_or_json_text(chat, value):
    text = rendered(chat, {"m": value}, prompt=None, messages="m", system="S")
    assert text == "<s><|system|>S\n<|user|>hi\n<|assistant|>ho\n<|user|>\ufffd?\n<|assistant|>"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "null_prompt"),
        (5, "invalid_prompt"),
        ("", "empty_prompt"),
    ],
)
def test_a_prompt_that_is_none_is_a_fault(chat, plain, value, kind):
    for tokenizer in (chat, plain):
        fault = renderer(tokenizer).render({"p": value})
        assert isinstance(fault, RowFault)
        assert fault.kind == kind


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        (None, "null_prompt", "is null"),
        ("[secret", "invalid_prompt", "is not JSON"),
        ('"secret"', "invalid_prompt", "holds str, not a list"),
        ([], "empty_prompt", "has no messages"),
        (["secret"], "invalid_prompt", "message 0 is str"),
        ([{"role": "user"}], "invalid_prompt", "message 0 has the content NoneType"),
        (
            [CHAT[0], {"role": 1, "content": "secret"}],
            "invalid_prompt",
            "message 1 has the role int",
        ),
        ([{"role": "tool", "content": "secret"}], "invalid_prompt", "refuses the roles ['tool']"),
    ],
)
def test_a_bad_chat_is_a_fault_that_quotes_nothing(chat, value, kind, says):
    fault = renderer(chat, prompt=None, messages="m").render({"m": value})
    assert isinstance(fault, RowFault)
    assert fault.kind == kind
    assert says in fault.message
    assert "secret" not in fault.message


@pytest.mark.parametrize(
    "fields", [{"system": "S"}, {"chat_template": True}, {"prompt": None, "messages": "m"}]
)
def test_a_job_that_needs_a_template_is_refused_without_one(plain, fields):
    with pytest.raises(ModelError, match="no chat template"):
        renderer(plain, **fields)
