import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.buffer_pool.page_table import PageTable

SMALLEST, LARGEST = -(2**63), 2**63 - 1
IDS = st.sampled_from([SMALLEST, -1, 0, 1, 2, 3, 40, LARGEST - 1, LARGEST]) | st.integers(SMALLEST, LARGEST)


def array(values):
    return np.array(list(values), np.int64)


def test_an_empty_table_finds_nothing():
    assert PageTable().find(array([0, LARGEST, SMALLEST])).tolist() == [-1, -1, -1]
    assert len(PageTable()) == 0


@given(st.lists(st.tuples(st.sets(IDS, max_size=8), st.booleans()), max_size=12))
def test_a_table_is_a_dictionary(changes):
    table, model = PageTable(), {}
    for ids, adds in changes:
        if adds:
            new = [block for block in ids if block not in model]
            homes = [len(model) + i for i in range(len(new))]
            table.add(array(new), array(homes))
            model.update(zip(new, homes, strict=True))
        else:
            known = [block for block in ids if block in model]
            table.remove(array(known))
            for block in known:
                del model[block]
            renumber(table, model)
        assert table.ids.tolist() == sorted(model)
        assert len(table) == len(model)
        asked = [*ids, *model, 77, LARGEST, SMALLEST]
        assert table.find(array(asked)).tolist() == [model.get(block, -1) for block in asked]
        owners = np.zeros(len(model), np.int64)
        owners[list(model.values())] = list(model)
        table._check(owners, np.ones(len(model), np.bool_))


def renumber(table, model):
    """Move the blocks to frames without gaps."""
    table.remove(array(model))
    model.update({block: frame for frame, block in enumerate(model)})
    table.add(array(model), array(model.values()))
