"""Loss on the assistant's tokens only: what is marked, what is refused, and that nothing of it depends on how it was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.data.chat import Encoder
from shardwise.errors import OnDisk, ShardwiseError, UsageError

from . import data_kit as kit


def trained(tokenizer: Any, document: Any) -> list[str]:
    """The texts of the trained stretches."""
    out, last = [], False
    for token, mark in zip(document.tokens.tolist(), document.marks.tolist(), strict=True):
        if mark and not last:
            out.append([])
        if mark:
            out[-1].append(token)
        last = mark
    return [tokenizer.decode(ids) for ids in out]


def encode(template: str, *texts: str) -> tuple[Any, Any]:
    tokenizer = kit.tokenizer(template)
    return tokenizer, Encoder(tokenizer).chats([(kit.chat(*texts)["messages"], "chats.jsonl:3")])[0]


def test_answers_and_their_end_tokens_are_trained_and_nothing_else() -> None:
    tokenizer, document = encode(kit.CHATML, "Who calls?", "Your brother Orlando.", "Why?", "He will wrestle.")
    assert trained(tokenizer, document) == ["Your brother Orlando.<|im_end|>", "He will wrestle.<|im_end|>"]


def test_the_tokens_are_those_of_the_whole_conversation() -> None:
    tokenizer, document = encode(kit.CHATML, "Who calls?", "Your brother Orlando.", "Why?", "He will wrestle.")
    whole = kit.chat("Who calls?", "Your brother Orlando.", "Why?", "He will wrestle.")["messages"]
    assert document.tokens.tolist() == tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)


def test_what_precedes_an_answer_is_what_the_model_is_given_when_asked() -> None:
    tokenizer, document = encode(kit.CHATML, "Who calls?", "Your brother Orlando.")
    asked = tokenizer.apply_chat_template(
        kit.chat("Who calls?")["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    first = document.marks.tolist().index(True)
    assert document.tokens.tolist()[:first] == asked


def test_an_answer_that_begins_with_a_line_break_keeps_its_own_tokens() -> None:
    # The prompt ends in a line break: with this tokenizer two of them may become one token.
    try:
        tokenizer, document = encode(kit.CHATML, "Sing.", "\n\nBlow, blow, thou winter wind.")
    except UsageError as error:
        assert error.what.startswith("the chat template is not prefix-stable")
    else:
        assert trained(tokenizer, document) == ["\n\nBlow, blow, thou winter wind.<|im_end|>"]


def test_a_conversation_without_an_answer_has_no_mark() -> None:
    _, document = encode(kit.CHATML, "Who calls?")
    assert not document.marks.any()


def test_a_template_that_rewrites_earlier_answers_is_refused_with_turn_and_both_tails() -> None:
    with pytest.raises(UsageError) as caught:
        encode(kit.FORGETS_THOUGHTS, "Who?", "<think>hm</think>Orlando.", "Why?", "<think>so</think>To wrestle.")
    assert caught.value.text() == (
        "error: the chat template is not prefix-stable: it writes earlier tokens\n"
        "       differently once later turns are there\n"
        "  turn: turn 2, where the answer ends\n"
        "  prefix: ... 't' 'ant' '\\n' '<' 'th' 'in' 'k'\n"
        "  whole: ... 't' 'ant' '\\n' 'Or' 'land' 'o' '.'\n"
        "  where: chats.jsonl:3\n"
        "  why: which tokens are the assistant's cannot be told, and the model would be\n"
        "       trained on text that it is never given\n"
        "\n"
        "hint: put a `chat_template.jinja` that renders every turn alike into the\n"
        "      tokenizer's folder\n"
        "hint: cut the data into conversations with one answer each"
    )


def test_the_same_template_is_accepted_where_it_rewrites_nothing() -> None:
    tokenizer, document = encode(kit.FORGETS_THOUGHTS, "Who?", "<think>hm</think>Orlando.")
    assert trained(tokenizer, document) == ["<think>hm</think>Orlando.<|im_end|>"]


def test_a_border_inside_a_token_is_refused_though_the_text_is_stable() -> None:
    with pytest.raises(UsageError) as caught:
        encode(kit.NO_BORDERS, "Who calls?", "the wrestler.")
    assert caught.value.lines[0] == ("turn", "turn 2, where the answer begins")


def test_texts_whose_pieces_alone_have_other_ids_are_still_marked_by_whole_prefixes() -> None:
    """A tokenizer that puts a space before each text (Llama 2's): pieces alone differ, prefixes do not."""
    from tokenizers import pre_tokenizers

    tokenizer = kit.tokenizer(
        "{% for m in messages %}{{ m['role'] + ':' if m['role'] == 'user' else '' }}{{ m['content'] + '\n' }}{% endfor %}"
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    document = Encoder(tokenizer).chats([(kit.chat("Who?", "Orlando.", "Why?", "To wrestle.")["messages"], "here")])[0]
    assert trained(tokenizer, document) == ["Orlando.\n", "To wrestle.\n"]


def test_a_template_that_raises_is_reported_with_its_words_and_the_roles() -> None:
    with pytest.raises(OnDisk) as caught:
        encode("{{ raise_exception('Conversation roles must alternate') }}", "Who?", "Orlando.")
    assert caught.value.text() == (
        "error: the chat template refuses a conversation\n"
        "  roles: user, assistant\n"
        "  where: chats.jsonl:3\n"
        "  why: Conversation roles must alternate"
    )


def test_prompts_keep_the_ids_they_have_alone_and_only_the_completion_is_trained() -> None:
    tokenizer = kit.tokenizer()
    encoder = Encoder(tokenizer)
    for prompt, completion in (("Who calls? ", "Orlando."), ("Who calls?", " Orlando."), ("Or", "lando")):
        document = encoder.prompts([(prompt, completion)])[0]
        begin = document.marks.tolist().index(True)
        assert document.tokens.tolist()[:begin] == encoder.ids([prompt])[0]
        assert tokenizer.decode(document.tokens.tolist()) == prompt + completion + "<|endoftext|>"
        assert trained(tokenizer, document) == [completion + "<|endoftext|>"]


def test_a_text_ends_with_the_end_token_once() -> None:
    encoder = Encoder(kit.tokenizer())
    plain, ended = encoder.texts(["Exeunt.", "Exeunt.<|endoftext|>"])
    assert plain.tokens.tolist() == ended.tokens.tolist()
    assert plain.tokens[-1] == encoder.eos and plain.marks is None


def test_the_begin_token_stands_before_texts_and_prompts_if_the_tokenizer_adds_one() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = kit.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    encoder = Encoder(tokenizer)
    assert encoder.bos == [1]
    assert encoder.texts(["Exeunt."])[0].tokens[0] == 1
    prompt = encoder.prompts([("Who?", " I.")])[0]
    assert prompt.tokens[0] == 1 and not prompt.marks[0]


def test_a_long_text_is_tokenised_in_parts_as_the_whole_is() -> None:
    encoder = Encoder(kit.tokenizer())
    text = kit.PLAY.read_text("utf-8") * 22  # 1.1 million characters: two parts
    assert encoder.texts([text])[0].tokens.tolist() == [*encoder.ids([text])[0], encoder.eos]


def test_every_error_fits_80_columns(tmp_path: Path) -> None:
    long_answers = ["<think>" + "hm " * 40 + "</think>Orlando."] * 3
    with pytest.raises(ShardwiseError) as caught:
        encode(kit.FORGETS_THOUGHTS, *(text for answer in long_answers for text in ("Who calls me at this hour?", answer)))
    assert max(map(len, caught.value.text().splitlines())) <= 80
