"""The parts of a conversation: its file, the choice of tokens, Ctrl-C, settings."""

import json
import os
import signal
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the adapter needs the extra hf")

from kvstore.chat.conversation import ChatSettings
from kvstore.chat.interrupts import interrupts
from kvstore.chat.rows import common_prefix
from kvstore.chat.sampling import Sampler, Sampling
from kvstore.chat.transcript import ASSISTANT, SYSTEM, USER, Message, Transcript
from kvstore.errors import ConfigError, CorruptStoreError, UnsupportedFormatError
from tests.chat.tiny import QUESTIONS, talk

pytestmark = pytest.mark.hf

# ---- the file ----


def test_messages_come_back_as_they_were_and_nothing_else_is_left(tmp_path):
    transcript = Transcript(tmp_path, "trip")
    transcript.messages += [
        Message(SYSTEM, ""),
        Message(USER, 'ü "\n\u2028 🙂\x00\udc80'),
        Message(ASSISTANT, "\ufffd"),
    ]
    (tmp_path / "chat-trip.json.old.part").write_text("what a killed process left")
    transcript.save()
    transcript.save()
    assert Transcript(tmp_path, "trip").messages == transcript.messages
    assert os.listdir(tmp_path) == ["chat-trip.json"]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000),
        *(b'{"messages": []}', b'{"format": "1", "messages": []}', b'{"format": 1, "messages": 5}'),
        b'{"format": 1, "messages": [{"role": "user"}]}',
        b'{"format": 1, "messages": [{"role": "cook", "content": ""}]}',
        b'{"format": 1, "messages": [{"role": "user", "content": 5}]}',
        b'{"format": 1, "messages": [{"role": "user", "content": ""}, {"role": "system", "content": ""}]}',
    ],
    ids=range(13),
)
def test_a_damaged_file_is_named_with_the_remedy(tmp_path, content):
    file = tmp_path / "chat-chat.json"
    file.write_bytes(content)
    with pytest.raises(CorruptStoreError, match=r"chat-chat.json is damaged .*remove it to begin"):
        Transcript(tmp_path, "chat")
    assert file.read_bytes() == content


def test_a_file_of_a_newer_version_and_a_link_are_refused(tmp_path):
    (tmp_path / "chat-new.json").write_text(json.dumps({"format": 2, "messages": {"as": "it may be then"}}))
    with pytest.raises(UnsupportedFormatError, match="use a newer version"):
        Transcript(tmp_path, "new")
    (tmp_path / "chat-link.json").symlink_to(tmp_path / "chat-new.json")
    with pytest.raises(CorruptStoreError, match="is a link"):
        Transcript(tmp_path, "link")


@pytest.mark.parametrize("name", ["", "a/b", "..//x", "a b", "é", "x" * 65, "a\n"])
def test_names_are_parts_of_file_names(tmp_path, name):
    with pytest.raises(ConfigError, match="1 to 64 letters"):
        Transcript(tmp_path, name)


# ---- choosing tokens ----

LOGITS = torch.randn(40, generator=torch.Generator().manual_seed(2))


def test_no_temperature_takes_the_likeliest_and_so_does_a_small_top_p():
    assert Sampler(Sampling(), 0)(LOGITS) == int(LOGITS.argmax())
    assert {Sampler(Sampling(5.0, 1e-6, seed), 0)(LOGITS) for seed in range(30)} == {int(LOGITS.argmax())}


@given(st.floats(0.05, 1.0), st.integers(0, 2**32 - 1))
def test_a_token_is_one_of_the_likeliest_that_have_the_probability(top_p, seed):
    token = Sampler(Sampling(1.0, top_p, seed), 3)(LOGITS)
    probabilities = LOGITS.double().softmax(-1)
    likelier = probabilities[probabilities > probabilities[token]].sum()
    assert likelier < top_p


def test_tokens_come_as_often_as_they_are_likely():
    sampler = Sampler(Sampling(0.5, seed=4), 0)
    drawn = torch.tensor([sampler(LOGITS[:5]) for _ in range(4000)]).bincount(minlength=5) / 4000
    torch.testing.assert_close(drawn, (LOGITS[:5] / 0.5).softmax(-1), atol=0.03, rtol=0)


def test_the_same_seed_gives_the_same_conversation_also_after_leaving(tmp_path):
    found = {}
    for seed in (1, 1, 2, None):
        settings = ChatSettings(max_new_tokens=12, sampling=Sampling(1.5, seed=seed))
        path = tmp_path / str(len(found)) if seed != 1 or 1 not in found else tmp_path / "again"
        texts = []
        for question in QUESTIONS[:2]:
            with talk(path, settings=settings) as conversation:
                texts.append(conversation.say(question).text)
        assert found.setdefault(seed, texts) == texts
    assert len({tuple(texts) for texts in found.values()}) == 3


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (lambda: Sampling(-0.1), "temperature"),
        (lambda: Sampling(float("nan")), "temperature"),
        (lambda: Sampling(float("inf")), "temperature"),
        (lambda: Sampling(1.0, 0.0), "top_p"),
        (lambda: Sampling(1.0, 1.1), "top_p"),
        (lambda: Sampling(seed=-1), "seed"),
        (lambda: ChatSettings(max_new_tokens=0), "max_new_tokens"),
    ],
)
def test_settings_out_of_their_range_are_named(make, fragment):
    with pytest.raises(ConfigError, match=fragment):
        make()


# ---- the rest ----


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_prefix(a, b):
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_ctrl_c_is_a_wish_inside_and_an_exception_outside():
    before = signal.getsignal(signal.SIGINT)
    with interrupts() as pressed:
        assert not pressed()
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed()
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_other_threads_are_not_asked():
    answers = []

    def run():
        with interrupts() as pressed:
            answers.append(pressed())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert answers == [False]
