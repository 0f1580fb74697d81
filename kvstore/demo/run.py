"""The demo: one prompt, full attention, and one store at several budgets."""

from __future__ import annotations

from collections.abc import Callable

from kvstore import KVStore
from kvstore.adapters.hf import StoreCache, use_store_attention
from kvstore.adapters.model_files import LoadedModel
from kvstore.budget import Budget
from kvstore.config import StoreConfig
from kvstore.demo.asking import Answer, ask
from kvstore.demo.decoder import Decoder
from kvstore.demo.mass import attention_mass
from kvstore.demo.needle import Needle, hide_needle
from kvstore.demo.passage import SOURCE, read_passage
from kvstore.demo.report import FULL, STORE, DemoReport, Outcome
from kvstore.demo.settings import DemoSettings
from kvstore.errors import InvalidQueryError, UnsupportedModelError

MASS_STEPS = 8
WARM_UP_TOKENS = 400

Progress = Callable[[str, int, int], None]
"""Called with the stage, steps done and steps in all (0: not known)."""


class Demo:
    """Asks one model for a hidden number; `run` gives the report."""

    def __init__(self, loaded: LoadedModel, settings: DemoSettings, progress: Progress) -> None:
        """Make the prompt; raises `InvalidQueryError` when the model or the text is too short for it."""
        limit = loaded.context_tokens
        if limit is not None and settings.n_tokens > limit:
            raise InvalidQueryError(
                f"a context of {settings.n_tokens} tokens is too long: {loaded.name} was trained for {limit}"
            )
        self.loaded = loaded
        self.settings = settings
        self.needle: Needle = hide_needle(
            loaded.tokenizer, read_passage(), settings.n_tokens, settings.depth, settings.seed
        )
        self._progress = progress

    def run(self) -> DemoReport:
        """Run full attention, then the store at each budget."""
        self._progress("Warming up; the first run compiles the kernels", 0, 0)
        self._warm_up()
        full = self._full_attention()
        with use_store_attention(self.loaded.model):
            cache, store = self._open_store()
            try:
                return self._with_store(full, cache, store)
            finally:
                cache.close()

    def _full_attention(self) -> Outcome:
        self._progress(f"Full attention: reading {len(self.needle.context)} tokens", 0, 0)
        decoder = Decoder(self.loaded.model)
        decoder.read(self.needle.context)
        answer = self._ask(decoder, "Full attention")
        rows = len(self.needle.context) + (answer.n_steps + 1) / 2
        return self._outcome(FULL, None, answer, decoder.read_s, rows, 1.0)

    def _with_store(self, full: Outcome, cache: StoreCache, store: KVStore) -> DemoReport:
        self._progress(f"kvstore: reading {len(self.needle.context)} tokens", 0, 0)
        decoder = Decoder(self.loaded.model, cache)
        decoder.read(self.needle.context)
        [sequence] = cache.sequences
        stats, outcomes, explanation = store.stats(), [full], ""
        for budget in self.settings.budgets:
            outcome, explanation = self._at_budget(budget, decoder, cache, store)
            outcomes.append(outcome)
        return DemoReport(
            model=self.loaded.name,
            text=SOURCE,
            n_context_tokens=len(sequence),
            n_question_tokens=len(self.needle.question),
            sentence=self.needle.sentence,
            place=self.needle.place,
            outcomes=outcomes,
            index_bytes_per_key=stats.index_bytes_per_key,
            key_bytes=store.schema.key_bytes,
            index_bytes=stats.index_bytes,
            rows_bytes=stats.heap_used_bytes,
            explanation=explanation,
        )

    def _at_budget(self, budget: Budget, decoder: Decoder, cache: StoreCache, store: KVStore) -> tuple[Outcome, str]:
        cache.set_budget(budget)
        before = store.stats().counters
        n_rows, n_queries = before.rows_attended, sum(before.attends.values())
        stage = f"kvstore, budget {budget}"
        answer = self._ask(decoder, stage)
        after = store.stats().counters
        rows = (after.rows_attended - n_rows) / (sum(after.attends.values()) - n_queries)
        self._progress(f"{stage}: measuring attention mass", 0, 0)
        mass, explanation = attention_mass(decoder, cache, [*self.needle.question, *answer.tokens][-MASS_STEPS:])
        decoder.rewind(cache.get_seq_length() - len(self.needle.context))
        return self._outcome(STORE, budget, answer, decoder.read_s, rows, mass), explanation

    def _ask(self, decoder: Decoder, stage: str) -> Answer:
        return ask(decoder, self.needle, lambda done, n: self._progress(f"{stage}: question and answer", done, n))

    def _outcome(self, engine: str, budget: Budget, answer: Answer, read_s: float, rows: float, mass: float) -> Outcome:
        text = self.loaded.tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()
        return Outcome(
            engine=engine,
            budget=budget,
            answer=text,
            right=self.needle.is_right(text),
            read_s=read_s,
            first_token_s=read_s + answer.question_s,
            tokens_per_s=answer.n_steps / answer.steps_s,
            rows_a_step=rows,
            mass=mass,
        )

    def _open_store(self) -> tuple[StoreCache, KVStore]:
        # no length is dense by itself here: a short context is to show selection too
        cache = StoreCache(self.loaded.model, config=StoreConfig(budget=self.settings.budgets[0], dense_rows=0))
        if cache.store is None:
            raise UnsupportedModelError(f"{self.loaded.name} has no layer of full attention, so nothing to select from")
        return cache, cache.store

    def _warm_up(self) -> None:
        """Compile the kernels and fill the allocators, so that neither is timed."""
        tokens = self.needle.context[:WARM_UP_TOKENS]
        Decoder(self.loaded.model).read(tokens)
        with use_store_attention(self.loaded.model):
            cache, _ = self._open_store()
            try:
                decoder = Decoder(self.loaded.model, cache)
                decoder.read(tokens)
                for token in tokens[:2]:
                    decoder.step(token)
            finally:
                cache.close()
