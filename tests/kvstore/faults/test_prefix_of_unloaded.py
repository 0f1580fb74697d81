"""Prefixes of sequences that went to the disk after they were last looked at."""

import random

from kvstore import KVStore
from tests.kvstore.faults.workload import SCHEMA, foresee, perform, plan, run, small, tokens_of


def common(tokens, other):
    """How many first tokens are equal."""
    pairs = zip(tokens, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(other)))


def test_a_prefix_is_not_found_in_a_sequence_that_has_other_rows_by_now(tmp_path):
    """Seen in the field: a request was answered from another request's rows."""
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        seq = store.create("a")
        perform(store, ("step", "a", 0, 64))
        seq.note_tokens(run(0, 64))
        assert store.match_prefix(run(0, 64)).n_rows == 64
        seq.truncate(8)
        perform(store, ("step", "a", 300, 56))
        seq.note_tokens(run(300, 56))
        store.unload("a")
        assert store.match_prefix(run(0, 64)) is None


def test_a_prefix_that_is_found_is_that_of_the_rows_whatever_was_done_and_wherever_they_are(tmp_path):
    chance, model = random.Random(1), {}
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        for _ in range(300):
            op = plan(model, chance)
            if op[0] == "step":
                op = (*op[:2], chance.choice([0, 16, 300]), op[3])  # so that many begin alike
            perform(store, op)
            model = foresee(model, op)
            if op[0] == "step":
                store[op[1]].note_tokens(run(*op[2:]))
            if chance.random() < 0.7:
                continue
            wanted = run(chance.choice([0, 16, 300]), 60)
            longest = max((common(wanted, tokens) for tokens in model.values()), default=0)
            match = store.match_prefix(wanted)
            assert (match.n_rows if match else 0) == (longest if longest >= SCHEMA.block_tokens else 0), op
            if match is not None and "twin" not in store:
                assert tokens_of(store[match.name].fork("twin", match.n_rows)) == wanted[: match.n_rows]
                store.drop("twin")
            store._prefixes._check()
