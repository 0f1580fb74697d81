"""`kvstore chat`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.errors import one_line_errors
from kvstore.cli.options import BUDGET_HELP, MODEL_HELP, Dtype, DtypeOption, ThreadsOption, Turns, parse_budget, threads
from kvstore.config import IndexConfig, StoreConfig

if TYPE_CHECKING:
    from kvstore.chat.conversation import ChatSettings

EXAMPLES = (
    "Examples:\n\nkvstore chat --store talk.kv\n\n"
    'kvstore chat ./qwen3 --store talk.kv --name trip --system "You are a guide." --temperature 0.7 --seed 1\n\n'
    'kvstore chat --store talk.kv --once "And in winter?" --json'
)


def chat(
    store: Annotated[Path, typer.Option("--store", metavar="DIR", help="Directory that keeps the conversation.")],
    model: Annotated[Path | None, typer.Argument(metavar="[MODEL]", help=MODEL_HELP, show_default=False)] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the conversation; a store may hold several.")] = "chat",
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="What the model is told first; kept with the conversation."),
    ] = None,
    budget: Annotated[str, typer.Option("--budget", metavar="ROWS", help=BUDGET_HELP)] = "0.1",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Tokens of an answer at most.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", help="Of the choice of tokens; 0 takes the likeliest.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", help="Choose among the likeliest that have this probability.")
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="The same one, the same answers.", show_default=False),
    ] = None,
    once: Annotated[
        str | None, typer.Option("--once", metavar="TEXT", help="Say this, print the answer, and end.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON a turn instead of text.")] = False,
    turns: Annotated[
        Turns,
        typer.Option("--turns", help="How the index takes what is new: see IndexConfig.turns."),
    ] = Turns.extend,
    dtype: DtypeOption = Dtype.float32,
    threads_: ThreadsOption = None,
) -> None:
    """Talk with a model, and go on later: rows and words stay in a directory, and only new words are read.

    Answers go to stdout as they come, figures to stderr. Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands.
    Without a terminal each line of stdin is a turn. What is said is on disk after each turn.
    """
    with one_line_errors(), threads(threads_):
        from kvstore.chat.conversation import ChatSettings
        from kvstore.chat.sampling import Sampling

        sampling = Sampling(temperature, top_p, seed)
        settings = ChatSettings(name, system, max_new_tokens, sampling)
        config = StoreConfig(budget=parse_budget(budget), index=IndexConfig(turns=str(turns)))
        _run(model, str(dtype), store, config, settings, once, as_json)


def _run(
    model: Path | None,
    dtype: str,
    path: Path,
    config: StoreConfig,
    settings: ChatSettings,
    once: str | None,
    as_json: bool,
) -> None:
    from kvstore.adapters.model_files import load_model
    from kvstore.chat.conversation import open_conversation
    from kvstore.cli.chat_loop import ChatLoop, keyboard, lines_of
    from kvstore.cli.progress import Stages

    with Stages() as stages:
        loaded = load_model(model, dtype, stages)
    with open_conversation(loaded, path, config, settings) as conversation:
        loop = ChatLoop(conversation, loaded.tokenizer, as_json=as_json)
        if once is not None:
            loop.say(once)
            return
        typed = keyboard()
        if typed is not None:
            loop.greet()
        loop.run(lines_of(typed), forgiving=typed is not None)
