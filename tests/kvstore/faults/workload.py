"""Random operations on a store in a directory, foreseen with lists of token numbers.

What is done is planned from the lists and the random numbers alone, so that another process, one that is not killed,
can say what the store must hold after each operation.
"""

from __future__ import annotations

import random
from typing import Any

from kvstore import IndexConfig, KVStore, Schema, Sequence, StoreConfig
from tests.builders import Layers, append, make_rows, same_bits

SCHEMA = Schema(n_layers=2, n_q_heads=2, n_kv_heads=1, head_dim=8, block_tokens=16, fingerprint="of a test")
N_TOKENS = 512
POOL = make_rows(SCHEMA, N_TOKENS, seed=5)  # token t has the keys and values of row t
TOKEN_OF = {POOL[0][0][0, t].numpy().tobytes(): t for t in range(N_TOKENS)}
NAMES = ("a", "b", "c", "d")
ROW_BYTES = SCHEMA.n_layers * SCHEMA.block_bytes // SCHEMA.block_tokens
SAVING = ("flush", "checkpoint")

Model = dict[str, list[int]]
Op = tuple[Any, ...]


def small(kind: str = "pq", **changes: Any) -> StoreConfig:
    """Settings under which 40 rows already are many."""
    options = {"m": 1, "bits": 3} if kind == "pq" else {}
    codebook = changes.pop("codebook", "sequence")
    index = IndexConfig(kind, options, min_rows=24, append_rows=8, codebook=codebook, codebook_rows=100)
    settings = {"sinks": 2, "window": 8, "budget": 24, "min_selected": 8, "dense_rows": 32, "flush_rows": 40}
    room = {"spill_bytes": 4 << 20, "arena_bytes": 8 * SCHEMA.block_bytes}
    return StoreConfig(**{**settings, **room, "index": index, **changes})


def run(first: int, n: int) -> list[int]:
    """n consecutive tokens."""
    return [(first + i) % N_TOKENS for i in range(n)]


def rows_of(tokens: list[int]) -> Layers:
    """Keys and values of tokens, a layer at a time."""
    return [(keys[:, tokens], values[:, tokens]) for keys, values in POOL]


def tokens_of(seq: Sequence) -> list[int]:
    """Which tokens the rows of a sequence are; raises `AssertionError` for bytes that were never given."""
    keys = seq.read(0)[0][0].numpy()
    tokens = [TOKEN_OF.get(row.tobytes(), -1) for row in keys]
    assert -1 not in tokens, f"{seq.name!r} has a row that nobody gave it, at {tokens.index(-1)}"
    for layer, (all_keys, all_values) in enumerate(POOL):
        stored = seq.read(layer)
        assert same_bits(stored[0], all_keys[:, tokens]), f"keys of layer {layer} of {seq.name!r}"
        assert same_bits(stored[1], all_values[:, tokens]), f"values of layer {layer} of {seq.name!r}"
    assert len(seq) == len(tokens)
    return tokens


def found(store: KVStore) -> Model:
    """What a store holds."""
    return {name: tokens_of(store[name]) for name in store}


def plan(model: Model, chance: random.Random) -> Op:
    """Choose the next operation on a store that holds these tokens."""
    name = chance.choice(NAMES)
    kind = chance.choice(["step"] * 6 + ["truncate", "fork", "drop", "unload", "read", "flush", "checkpoint", "vacuum"])
    if kind in ("flush", "checkpoint", "vacuum"):
        return (kind,)
    if kind == "step" or name not in model:
        return ("step", name, chance.randrange(N_TOKENS), chance.choice([1, 7, 16, 45]))
    if kind == "truncate":
        return (kind, name, chance.randint(0, len(model[name])))
    if kind == "fork":
        free = [other for other in NAMES if other not in model]
        return (kind, name, chance.choice(free)) if free else ("flush",)
    return (kind, name)


def foresee(model: Model, op: Op) -> Model:
    """Return what a store that holds the tokens of `model` holds after an operation."""
    after = {name: tokens[:] for name, tokens in model.items()}
    kind, name, *numbers = (*op, "")[:4] if len(op) == 1 else op
    if kind == "step":
        after[name] = after.get(name, []) + run(*numbers)
    elif kind == "truncate":
        del after[name][numbers[0] :]
    elif kind == "fork":
        after[numbers[0]] = after[name][:]
    elif kind == "drop":
        del after[name]
    return after


def perform(store: KVStore, op: Op) -> None:
    """Do an operation; raises what the store raises."""
    kind, *rest = op
    if kind in ("flush", "checkpoint", "vacuum"):
        getattr(store, kind)()
        return
    name, *numbers = rest
    if kind in ("drop", "unload"):
        getattr(store, kind)(name)
    elif kind == "step":
        append(store[name] if name in store else store.create(name), rows_of(run(*numbers)))
    elif kind == "read":
        tokens_of(store[name])
    else:
        getattr(store[name], kind)(*numbers)


def walk(seed: int, n: int, start: Model | None = None) -> list[tuple[Op, Model]]:
    """n operations and what a store holds after each."""
    chance, model, steps = random.Random(seed), start or {}, []
    for _ in range(n):
        op = plan(model, chance)
        model = foresee(model, op)
        steps.append((op, model))
    return steps


def steps_of(ops: list[Op]) -> list[tuple[Op, Model]]:
    """Operations on an empty store, and what it holds after each."""
    steps, model = [], {}
    for op in ops:
        model = foresee(model, op)
        steps.append((op, model))
    return steps


def states_since_flush(start: Model, steps: list[tuple[Op, Model]], done: int, begun: int) -> list[Model]:
    """What the disk may show when `done` operations had ended and `begun` had begun."""
    states = [start, *(model for _, model in steps)]
    last = max((i for i in range(1, done + 1) if steps[i - 1][0][0] in SAVING), default=0)
    return states[last : begun + 1]


def assert_is_one_of(model: Model, states: list[Model]) -> None:
    """Each sequence is as it was in one of these states; what was in all of them is there."""
    for name in {*model, *states[0]}:
        possible = [state.get(name) for state in states]
        assert model.get(name) in possible, f"{name!r} came back as {model.get(name)}, it was one of {possible}"
    assert set(model) <= {name for state in states for name in state}


def assert_sound(store: KVStore) -> None:
    """The books balance, in memory and on disk."""
    store._check()
    store._persistence._archive._check()
    store._persistence._directory.tier._check()
    assert store.check() == []
