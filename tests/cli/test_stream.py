"""Streamed text equals the text decoded at once, whatever the tokens cut through."""

import torch

from kvstore.cli.stream import TextStream

TEXT = "one line\nüber café — naïve 🙂\n\nlast\n  indented 🙂"


def test_pieces_add_up(tokenizer):
    pieces = []
    stream = TextStream(tokenizer, pieces.append)
    tokens = tokenizer(TEXT)["input_ids"]
    stream.put(torch.tensor([[5, 6, 7]]))  # the prompt
    for token in tokens:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert stream.tokens == tokens
    assert len(stream.times) == len(tokens)


def test_a_cut_character_comes_at_the_end(tokenizer):
    pieces = []
    stream = TextStream(tokenizer, pieces.append)
    stream.put(torch.tensor([[5]]))
    for token in tokenizer("é")["input_ids"][:1]:
        stream.put(torch.tensor([token]))
    assert "".join(pieces) == ""
    stream.end()
    assert "".join(pieces) == "\ufffd"
