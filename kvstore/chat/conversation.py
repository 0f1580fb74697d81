"""A conversation with a model that a store remembers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from kvstore import KVStore
from kvstore.adapters.hf import open_store, use_store_attention
from kvstore.adapters.model_files import LoadedModel
from kvstore.chat.answering import answer_tokens
from kvstore.chat.render import render
from kvstore.chat.rows import ChatRows
from kvstore.chat.sampling import Sampler, Sampling
from kvstore.chat.transcript import ASSISTANT, SYSTEM, USER, Message, Transcript
from kvstore.chat.turn import END, INTERRUPTED, LENGTH, Turn
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, InvalidQueryError
from kvstore.stats import StoreStats


@dataclass(frozen=True)
class ChatSettings:
    """How a conversation is held.

    Attributes:
        name: of the conversation; a store may hold several.
        system: what the model is told first; None leaves what the conversation has.
        max_new_tokens: of an answer.
        sampling: how its tokens are chosen.
    """

    name: str = "chat"
    system: str | None = None
    max_new_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")


@contextmanager
def open_conversation(
    loaded: LoadedModel, path: Path, config: StoreConfig, settings: ChatSettings
) -> Iterator[Conversation]:
    """Open, or begin, a conversation in the store in a directory; see `KVStore.open` and `Transcript` for errors."""
    with open_store(path, loaded.model, config) as store:
        yield Conversation(loaded, store, Transcript(path, settings.name), settings)


class Conversation:
    """Messages, and the rows that the model has read and written of them.

    Each turn writes the whole conversation as tokens and compares them with those of the rows: what is equal from the
    first on is not read again, rows after that are taken back. So nothing but the tokens decides what the model sees,
    whatever a template changes in earlier messages, and wherever a process was stopped.
    """

    def __init__(self, loaded: LoadedModel, store: KVStore, transcript: Transcript, settings: ChatSettings) -> None:
        self._loaded = loaded
        self._store = store
        self._transcript = transcript
        self._settings = settings
        self._rows = ChatRows(store, settings.name, store.config.budget)
        if settings.system is not None:
            spoken = [message for message in transcript.messages if message.role != SYSTEM]
            transcript.messages[:] = [Message(SYSTEM, settings.system), *spoken]

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said, a system message first if there is one."""
        return tuple(self._transcript.messages)

    @property
    def n_turns(self) -> int:
        """Questions asked."""
        return sum(message.role == USER for message in self._transcript.messages)

    @property
    def n_rows(self) -> int:
        """Rows stored."""
        return len(self._rows)

    def stats(self) -> StoreStats:
        """Return sizes and counters of the whole store; see `KVStore.stats`."""
        return self._store.stats()

    def say(
        self,
        text: str,
        on_token: Callable[[int], None] = lambda token: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Turn:
        """Ask, and have messages and rows on disk when this returns.

        `on_token` is given each token of the answer as it comes; `interrupted` is asked after each, and True ends the
        answer there: what was said stays. An exception leaves the conversation as it was before the turn. Raises
        `InvalidQueryError` when the conversation has become too long for the model, or its template refuses it.
        """
        started = perf_counter()
        asked = [*self._transcript.messages, Message(USER, text)]
        prompt = render(self._loaded.tokenizer, asked)
        n_most = self._room(len(prompt))
        n_forgotten = self._rows.agree(prompt[:-1])  # the last token is always read: its logits begin the answer
        n_kept = len(self._rows)
        tokens, times, stopped = self._answer(prompt, n_most, on_token, interrupted)
        self._rows.note([*prompt, *tokens])
        answer = self._decoded(tokens)
        self._transcript.messages[:] = [*asked, Message(ASSISTANT, answer)]
        self._save()
        return Turn(
            text=answer,
            stopped=stopped,
            n_rows=len(self._rows),
            n_kept_rows=n_kept,
            n_prefilled=len(prompt) - n_kept,
            n_forgotten=n_forgotten,
            n_new_tokens=len(tokens),
            first_token_s=times[0] - started,
            tokens_per_s=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0,
        )

    def undo(self) -> str | None:
        """Forget the last turn, messages and rows; return what was asked, or None when there is no turn."""
        messages = self._transcript.messages
        last = max((place for place, message in enumerate(messages) if message.role == USER), default=None)
        if last is None:
            return None
        asked = messages[last].content
        del messages[last:]
        if self.n_turns:
            self._rows.agree(render(self._loaded.tokenizer, messages, answer=False))
        else:  # templates may refuse a conversation in which nobody has asked anything
            self._rows.clear()
        self._save()
        return asked

    def reset(self) -> None:
        """Forget all turns; what the model is told first stays."""
        self._transcript.messages[:] = [message for message in self.messages if message.role == SYSTEM]
        self._rows.clear()
        self._save()

    def _answer(
        self, prompt: list[int], n_most: int, on_token: Callable[[int], None], interrupted: Callable[[], bool]
    ) -> tuple[list[int], list[float], str]:
        """Return the tokens of the answer, the `perf_counter` of each, and why it stopped."""
        model, ends = self._loaded.model, self._loaded.end_tokens
        choose = Sampler(self._settings.sampling, self.n_turns)
        tokens: list[int] = []
        times: list[float] = []
        with use_store_attention(model), closing(self._rows.cache(model)) as cache:
            for token in answer_tokens(model, cache, prompt[len(self._rows) :], choose):
                times.append(perf_counter())
                tokens.append(token)
                on_token(token)
                if token in ends:
                    return tokens, times, END
                if interrupted():
                    return tokens, times, INTERRUPTED
                if len(tokens) == n_most:
                    break
        return tokens, times, LENGTH

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self._loaded.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _room(self, n_prompt: int) -> int:
        """Return how many tokens the answer may have."""
        limit = self._loaded.context_tokens
        if limit is None:
            return self._settings.max_new_tokens
        if n_prompt >= limit:
            raise InvalidQueryError(
                f"the conversation has {n_prompt} tokens, and {self._loaded.name} was trained for {limit}: take turns "
                "back with /undo, begin anew with /reset, or give another --name"
            )
        return min(self._settings.max_new_tokens, limit - n_prompt)

    def _save(self) -> None:
        self._transcript.save()
        self._store.flush()
