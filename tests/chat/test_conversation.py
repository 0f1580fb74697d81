"""A conversation goes on as if nobody had ever left, and reads nothing twice."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the adapter needs the extra hf")

from kvstore.adapters.hf import open_store
from kvstore.chat.conversation import ChatSettings
from kvstore.chat.render import render
from kvstore.chat.transcript import ASSISTANT, SYSTEM, USER, Message
from kvstore.errors import InvalidQueryError, UnsupportedModelError
from tests.chat.tiny import CONFIGS, DENSE, QUESTIONS, SELECTIVE, SETTINGS, loaded, talk, tokens_of

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.hf


def answers(path, config=DENSE, questions=QUESTIONS, settings=SETTINGS):
    """What is answered by one process that stays, and the tokens of all rows."""
    with talk(path, config, settings) as conversation:
        return [conversation.say(question).text for question in questions], tokens_of(conversation)


def plain_answer(messages, n_new=12):
    """What transformers answers to a conversation, reading all of it."""
    model, tokenizer = loaded().model, loaded().tokenizer
    ids = torch.tensor([render(tokenizer, messages)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_new, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_leaving_after_each_turn_makes_no_difference(tmp_path, name):
    expected, tokens = answers(tmp_path / "whole", CONFIGS[name])
    assert len(set(expected)) > 1
    found = []
    for question in QUESTIONS:
        with talk(tmp_path / "parts", CONFIGS[name]) as conversation:
            turn = conversation.say(question)
            found.append(turn.text)
            assert turn.n_forgotten == 0
            assert turn.n_rows == conversation.n_rows == len(tokens_of(conversation))
    assert found == expected
    with talk(tmp_path / "parts", CONFIGS[name]) as conversation:
        assert tokens_of(conversation) == tokens
        assert [m.content for m in conversation.messages[::2]] == QUESTIONS
        assert [m.content for m in conversation.messages[1::2]] == found


def test_selective_attention_is_used(tmp_path):
    with talk(tmp_path, SELECTIVE) as conversation:
        conversation.say(QUESTIONS[0])
        conversation.say(QUESTIONS[1])
        assert conversation.stats().counters.attends["index"] > 0


def test_all_rows_is_what_transformers_answers(tmp_path):
    messages = []
    for question in QUESTIONS:
        with talk(tmp_path) as conversation:
            assert conversation.say(question).text == plain_answer([*messages, Message(USER, question)])
            messages = list(conversation.messages)


def test_only_new_tokens_are_read(tmp_path):
    lengths = [len(render(loaded().tokenizer, [Message(USER, QUESTIONS[0])]))]
    with talk(tmp_path) as conversation:
        first = conversation.say(QUESTIONS[0])
        lengths.append(len(render(loaded().tokenizer, [*conversation.messages, Message(USER, QUESTIONS[1])])))
    with talk(tmp_path) as conversation:
        second = conversation.say(QUESTIONS[1])
    assert (first.n_kept_rows, first.n_prefilled) == (0, lengths[0])
    assert first.n_rows == lengths[0] + first.n_new_tokens - 1  # the last token has no row
    assert second.n_kept_rows == first.n_rows
    assert second.n_prefilled == lengths[1] - first.n_rows
    assert second.n_prefilled <= 2 + len(f"<user> {QUESTIONS[1]} <end> <assistant>".split())


def test_undo_takes_a_turn_back(tmp_path):
    expected, tokens = answers(tmp_path / "never", questions=[QUESTIONS[0], QUESTIONS[2]])
    with talk(tmp_path / "undone") as conversation:
        conversation.say(QUESTIONS[0])
        n_rows, messages = conversation.n_rows, conversation.messages
        conversation.say(QUESTIONS[1])
        assert conversation.undo() == QUESTIONS[1]
        assert n_rows <= conversation.n_rows <= n_rows + 2  # the end of the answer had no rows before
        assert conversation.messages == messages
    with talk(tmp_path / "undone") as conversation:
        assert conversation.say(QUESTIONS[2]).text == expected[1]
        assert tokens_of(conversation) == tokens
        assert conversation.undo() == QUESTIONS[2]
        assert conversation.undo() == QUESTIONS[0]
        assert conversation.undo() is None
        assert (conversation.n_rows, conversation.messages) == (0, ())


def test_reset_forgets_turns_and_keeps_the_system_message(tmp_path):
    settings = replace(SETTINGS, system="w50 w51")
    expected, _ = answers(tmp_path / "fresh", SELECTIVE, QUESTIONS[1:3], settings)
    with talk(tmp_path / "reset", SELECTIVE, settings) as conversation:
        conversation.say(QUESTIONS[0])
        conversation.reset()
        assert conversation.messages == (Message(SYSTEM, "w50 w51"),)
        assert conversation.n_rows == 0
    with talk(tmp_path / "reset", SELECTIVE) as conversation:
        assert [conversation.say(question).text for question in QUESTIONS[1:3]] == expected


def test_another_system_message_reads_everything_again_and_says_so(tmp_path):
    with talk(tmp_path) as conversation:
        before = conversation.say(QUESTIONS[0])
    with talk(tmp_path, settings=replace(SETTINGS, system="w50 w51")) as conversation:
        turn = conversation.say(QUESTIONS[1])
        assert turn.n_forgotten == before.n_rows
        assert f"({before.n_rows} stored rows did not fit any more)" in str(turn)
        assert turn.text == plain_answer(conversation.messages[:-1])


def test_an_interrupted_answer_stays_as_far_as_it_was_said(tmp_path):
    whole, _ = answers(tmp_path / "whole", questions=QUESTIONS[:1])
    with talk(tmp_path / "cut") as conversation:
        said = []
        turn = conversation.say(QUESTIONS[0], said.append, lambda: len(said) == 3)
        assert (turn.stopped, turn.n_new_tokens, len(said)) == ("interrupted", 3, 3)
        assert whole[0].split()[:3] == turn.text.split()
        assert turn.n_rows == turn.n_prefilled + 2
        assert "interrupted" in str(turn)
        messages = [*conversation.messages, Message(USER, QUESTIONS[1])]
        assert conversation.say(QUESTIONS[1]).text == plain_answer(messages)


def test_an_exception_leaves_the_conversation_as_it_was(tmp_path):
    expected, tokens = answers(tmp_path / "whole", questions=QUESTIONS[:2])

    def fail(token):
        raise BrokenPipeError

    with talk(tmp_path / "failed") as conversation:
        conversation.say(QUESTIONS[0])
        messages = conversation.messages
        with pytest.raises(BrokenPipeError):
            conversation.say(QUESTIONS[2], fail)
        assert conversation.messages == messages
        assert conversation.say(QUESTIONS[1]).text == expected[1]
        assert tokens_of(conversation) == tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_a_killed_process_loses_its_open_turn_only(tmp_path, name):
    expected, tokens = answers(tmp_path / "whole", CONFIGS[name], QUESTIONS[:3])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.chat.killed", str(tmp_path / "killed"), name],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    with talk(tmp_path / "killed", CONFIGS[name]) as conversation:
        assert conversation.n_turns == 1
        assert [conversation.messages[1].content, *(conversation.say(q).text for q in QUESTIONS[1:3])] == expected
        assert tokens_of(conversation) == tokens


def test_without_its_words_a_conversation_begins_anew_whatever_rows_there_are(tmp_path):
    expected, _ = answers(tmp_path / "fresh", questions=QUESTIONS[2:])
    answers(tmp_path / "lost", questions=QUESTIONS[:2])
    (tmp_path / "lost" / "chat-chat.json").unlink()
    assert answers(tmp_path / "lost", questions=QUESTIONS[2:])[0] == expected


def test_changed_words_are_what_the_model_reads(tmp_path):
    answers(tmp_path, questions=QUESTIONS[:2])
    file = tmp_path / "chat-chat.json"
    plain = json.loads(file.read_text())
    plain["messages"][1]["content"] = "w5 w6"
    file.write_text(json.dumps(plain))
    with talk(tmp_path) as conversation:
        turn = conversation.say(QUESTIONS[2])
        assert turn.n_forgotten > 0
        assert conversation.messages[1] == Message(ASSISTANT, "w5 w6")
        assert turn.text == plain_answer(conversation.messages[:-1])


def test_rows_without_words_and_words_without_rows(tmp_path):
    expected, tokens = answers(tmp_path / "whole", questions=QUESTIONS[:3])
    answers(tmp_path / "parts", questions=QUESTIONS[:2])
    with open_store(tmp_path / "parts", loaded().model, DENSE) as store:
        store.drop("chat-chat")
    with talk(tmp_path / "parts") as conversation:
        turn = conversation.say(QUESTIONS[2])
        assert (turn.n_kept_rows, turn.text) == (0, expected[2])
        assert tokens_of(conversation) == tokens


def test_conversations_of_one_store_do_not_meet_and_are_no_prefixes_of_texts(tmp_path):
    expected, tokens = answers(tmp_path / "alone")
    for question in QUESTIONS:
        for name in ("one", "two"):
            with talk(tmp_path / "both", settings=replace(SETTINGS, name=name)) as conversation:
                conversation.say(question)
                assert tokens_of(conversation) == tokens[: conversation.n_rows]
    assert conversation.messages[-1].content == expected[-1]
    with open_store(tmp_path / "both", loaded().model, DENSE) as store:
        assert sorted(store) == ["chat-one", "chat-two"]
        store._prefixes._block_tokens = 1
        assert store.match_prefix(tokens) is None


def test_a_conversation_that_is_too_long_is_named_with_its_numbers(tmp_path):
    with talk(tmp_path, settings=ChatSettings(max_new_tokens=300)) as conversation:
        turn = conversation.say("w1 " * 200)
        assert turn.stopped == "end" or turn.n_rows == 255  # rows for every token but the last of 256
        messages = conversation.messages
        with pytest.raises(InvalidQueryError, match=r"was trained for 256.*/undo"):
            conversation.say("w2 " * 60)
        assert conversation.messages == messages


def test_a_template_that_refuses_is_quoted(tmp_path):
    refusing = loaded("{{ raise_exception('no system here') }}")
    with talk(tmp_path, model=refusing) as conversation:
        with pytest.raises(InvalidQueryError, match="refuses the conversation: no system here"):
            conversation.say("w1")
        assert conversation.messages == ()


def test_a_model_without_a_template_goes_on_from_the_text(tmp_path):
    with talk(tmp_path, model=loaded(None)) as conversation:
        first = conversation.say("w1 w2")
        second = conversation.say("w3")
    assert first.n_prefilled == 2
    assert second.n_kept_rows == first.n_rows


def test_a_model_that_cannot_go_on_from_rows_is_refused_at_once(tmp_path):
    from kvstore.adapters.model_files import LoadedModel
    from tests.adapters.conftest import _model

    model = LoadedModel(_model("gemma3"), loaded().tokenizer, "gemma3")
    with talk(tmp_path, model=model) as conversation, pytest.raises(UnsupportedModelError, match="sliding window"):
        conversation.say("w1 w2")
