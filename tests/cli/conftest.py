"""A tiny random model in a directory, and a way to run the command line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.tiny_llama import tiny_llama

CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def transformers():
    return pytest.importorskip("transformers", reason="the adapter needs the extra hf")


@pytest.fixture(scope="session")
def tokenizer(transformers):
    """Byte-level BPE with a small vocabulary: every text has tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<end>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the text of a book that tells a magic number, and then the other text"], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<end>")


@pytest.fixture(scope="session")
def model(transformers, tokenizer):
    return tiny_llama(len(tokenizer), positions=1024, seed=0)


@pytest.fixture(scope="session")
def model_dir(model, tokenizer, tmp_path_factory) -> Path:
    """Directory of a model without a chat template."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def chat_dir(model, tokenizer, tmp_path_factory) -> Path:
    """Directory of the same model with a chat template."""
    directory = tmp_path_factory.mktemp("models") / "tiny-chat"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(CHAT)
    return directory


@pytest.fixture
def run() -> Callable[..., Result]:
    from kvstore.cli.app import build_app

    def invoke(*arguments: object, stdin: str | None = None) -> Result:
        return CliRunner().invoke(build_app(), [str(a) for a in arguments], input=stdin, catch_exceptions=False)

    return invoke


@pytest.fixture
def refused(run) -> Callable[..., str]:
    """Run a command that must be refused; returns its one line on stderr."""

    def invoke(*arguments: object, stdin: str | None = None) -> str:
        result = run(*arguments, stdin=stdin)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        lines = [line for line in result.stderr.splitlines() if not line.endswith(" ...")]
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("kvstore: ")
        return lines[0]

    return invoke
