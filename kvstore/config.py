"""Settings of a store; frozen, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.budget import Budget, check_budget
from kvstore.buffer_pool import make_policy
from kvstore.errors import ConfigError
from kvstore.storage.encodings import encoding_of
from kvstore.storage.spill_settings import SpillSettings

MIB, GIB = 1 << 20, 1 << 30
REDUCTIONS = ("sum_softmax", "max", "mean")
CODEBOOKS = ("sequence", "model", "auto")
ADAPTIVE = "adaptive"
COMMIT, OVERLAP = "commit", "overlap"
EXTEND, REINDEX, SEGMENT = TURNS = "extend", "reindex", "segment"


@dataclass(frozen=True)
class IndexConfig:
    """How the keys of a table are indexed.

    Attributes:
        kind: a name of `kvstore.index.registry`; `"flat"` means that every query scans all rows exactly.
        options: settings of that kind, for example `{"m": 2, "bits": 6}` for `"pq"`.
        min_rows: rows between sinks and window from which an index is built; shorter tables are scanned exactly.
        over_fetch: candidates taken from the index for each row wanted; they are scored again with the exact keys
            and the best are kept (1 keeps the index's own choice).
        append_rows: rows that leave the window wait, scanned exactly, until this many are encoded in one go.
        seed: of K-Means; the same seed and rows give the same index.
        codebook: whose centroids the codes name. "sequence": each table trains its own. "model": one a layer, trained
            on the first sequence that is long enough (or by `KVStore.train_codebooks`, or loaded), shared by all;
            rows are only encoded. "auto": the model's at once, and the sequence's own, trained in the background, when
            `drift` says that the model's does not fit. Kinds without codebooks ignore it.
        codebook_rows: rows between sinks and window from which a sequence may train the model's codebook.
        reindex_drift: drift (error of recent rows relative to training, see `kvstore.drift`) above which a table is
            trained again in the background; None: only when asked. Never used with codebook="model"; "auto" refines
            above it, or above 2. A change of topic alone gives up to 1.7 and costs little recall; 2 is a good value,
            1.5 for codes of two bytes or fewer with `space="raw"`.
        iterations: of K-Means: a number, None for the kind's default, or "adaptive" for as many as hide behind the
            forward pass of a layer (see `KVStore.iterations`).
        build: when the first index of a table is built. "commit": in `commit_step`, layer after layer. "overlap": by
            worker threads from the layer's `append` on, while later layers compute; the results are the same bits.
        wait: with "overlap", whether a query waits for the index of its layer; else it scans exactly until that is
            there, and whatever comes first (commit, truncate, fork) goes on without it.
        threads: worker threads, each with one kernel thread.
        turns: what happens when a commit brings at least `min_rows` more rows to a table that has an index, as the next
            input of a conversation does (PQCache, section 3.4). "extend": they are coded with the codebook there is.
            "reindex": the whole table is trained again. "segment": they are trained on their own, and what follows is
            coded with their codebook. With keys coded before RoPE codebooks do not age with the position, so the first
            costs little quality.
    """

    kind: str = "pq"
    options: dict[str, Any] = field(default_factory=dict)
    min_rows: int = 256
    over_fetch: float = 2.0
    append_rows: int = 32
    seed: int = 0
    codebook: str = "sequence"
    codebook_rows: int = 2048
    reindex_drift: float | None = None
    iterations: int | str | None = None
    build: str = COMMIT
    wait: bool = True
    threads: int = 1
    turns: str = EXTEND

    def __post_init__(self) -> None:
        if self.min_rows < 1 or self.append_rows < 1:
            raise ConfigError(
                f"min_rows and append_rows must be at least 1, not {self.min_rows} and {self.append_rows}"
            )
        if not 1 <= self.over_fetch < float("inf"):
            raise ConfigError(f"over_fetch must be at least 1, not {self.over_fetch}")
        self._check_codebook()
        self._check_iterations()
        self._check_build()
        self._check_turns()

    def _check_codebook(self) -> None:
        if self.codebook not in CODEBOOKS:
            raise ConfigError(f"codebook must be one of {', '.join(CODEBOOKS)}, not {self.codebook!r}")
        if self.codebook_rows < 1:
            raise ConfigError(f"codebook_rows must be at least 1, not {self.codebook_rows}")
        if self.reindex_drift is not None and not 1.0 < self.reindex_drift < float("inf"):
            raise ConfigError(f"reindex_drift must be above 1 (like training) or None, not {self.reindex_drift}")

    def _check_build(self) -> None:
        if self.build not in (COMMIT, OVERLAP):
            raise ConfigError(f"build must be {COMMIT!r} or {OVERLAP!r}, not {self.build!r}")
        if not isinstance(self.wait, bool):
            raise ConfigError(f"wait must be True or False, not {self.wait!r}")
        if not isinstance(self.threads, int) or isinstance(self.threads, bool) or self.threads < 1:
            raise ConfigError(f"threads must be a whole number from 1 on, not {self.threads!r}")

    def _check_turns(self) -> None:
        if self.turns not in TURNS:
            raise ConfigError(f"turns must be one of {', '.join(TURNS)}, not {self.turns!r}")
        if self.turns == SEGMENT and self.codebook != "sequence":
            raise ConfigError("segments have codebooks of their own; turns='segment' goes with codebook='sequence'")

    def _check_iterations(self) -> None:
        if self.iterations is None:
            return
        number = isinstance(self.iterations, int) and not isinstance(self.iterations, bool) and self.iterations >= 1
        if not number and self.iterations != ADAPTIVE:
            raise ConfigError(f"iterations must be at least 1, {ADAPTIVE!r} or None, not {self.iterations!r}")
        if "iterations" in self.options:
            raise ConfigError("iterations are given twice, in options and beside them; leave one out")


@dataclass(frozen=True)
class StoreConfig:
    """How a store keeps and queries its rows.

    Attributes:
        sinks: first rows of a sequence, always attended exactly and never indexed.
        window: last rows, the same.
        budget: rows that `attend` reads, sinks and window included: a share of the rows (float in (0, 1]), a
            number of rows (int), None for all of them (dense attention), or a function (layer, KV head, rows there
            are) that returns one of these, called for every head of every query.
        min_selected: rows chosen from the middle however small the budget is.
        dense_rows: sequences up to this long are attended densely: there selection costs more than it saves.
        reduce: how the query heads of one KV head agree on a row: "sum_softmax", "max" or "mean".
        index: settings of the index.
        arena_bytes: size of one allocation of the heap.
        huge_pages: ask the system to back the heap by pages of 2 MiB, where it gives any: rows are read faster.
        heap_bytes: limit of the heap (0: none). In a directory a full heap gives blocks up to the disk.
        pool_bytes: of frames for blocks that are on the disk only; taken when the first of them is read.
        pool_policy: which frame is used again: a name of `kvstore.buffer_pool.policy_names`.
        spill_bytes: largest size of the file of a store that lies in a directory; it grows to it as needed.
        durability: of that file: "process" survives a killed process, "power" a loss of power, and waits for the disk.
        flush_rows: rows that a sequence commits before they are sent to the disk by themselves (0: only when asked).
        encoding: of rows on disk: "raw" keeps every bit; "fp16", "bf16" and "int8" are smaller and lose some.
    """

    sinks: int = 4
    window: int = 64
    budget: Budget = 0.1
    min_selected: int = 32
    dense_rows: int = 512
    reduce: str = "sum_softmax"
    index: IndexConfig = field(default_factory=IndexConfig)
    arena_bytes: int = 32 * MIB
    huge_pages: bool = True
    heap_bytes: int = 0
    pool_bytes: int = 64 * MIB
    pool_policy: str = "lru"
    spill_bytes: int = 64 * GIB
    durability: str = "process"
    flush_rows: int = 1024
    encoding: str = "raw"

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 1:
            raise ConfigError(f"sinks must be >= 0 and window >= 1, not {self.sinks} and {self.window}")
        if self.reduce not in REDUCTIONS:
            raise ConfigError(f"reduce must be one of {', '.join(REDUCTIONS)}, not {self.reduce!r}")
        if self.min_selected < 1:
            raise ConfigError(f"min_selected must be at least 1, not {self.min_selected}")
        if self.dense_rows < 0:
            raise ConfigError(f"dense_rows must not be negative, got {self.dense_rows}")
        if self.arena_bytes < 1 or self.heap_bytes < 0 or self.pool_bytes < 0:
            raise ConfigError("arena_bytes must be positive, heap_bytes and pool_bytes not negative")
        make_policy(self.pool_policy, 1)
        if self.flush_rows < 0:
            raise ConfigError(f"flush_rows must not be negative, got {self.flush_rows}")
        SpillSettings(self.spill_bytes, self.durability)
        encoding_of(self.encoding)
        check_budget(self.budget)


def config_from_dict(data: Mapping[str, Any]) -> StoreConfig:
    """Return the settings in plain values, as `dataclasses.asdict` gives them and JSON keeps them; all may be left out.

    Raises `ConfigError` for a name that is no setting, or a value of the wrong type.

    >>> config_from_dict({"budget": 0.2, "index": {"kind": "pq", "options": {"m": 2}}}).index.options
    {'m': 2}
    """
    try:
        settings = dict(data)
        return StoreConfig(**{**settings, "index": IndexConfig(**settings.get("index", {}))})
    except TypeError as error:
        raise ConfigError(f"no settings of a store: {error}") from error
