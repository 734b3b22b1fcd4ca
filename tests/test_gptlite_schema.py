"""Positions of modules, unions and parameters by hand, and what a schema must refuse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptlite_schema import (
    Parameter,
    Schema,
    equal_modules,
    example_prompts,
    example_schema,
    tokens_in_order,
)


def play():
    """a at 0-3, a union of b 4-6 and c 4-8, d with a parameter of 3 positions at 9-15."""
    schema = Schema(20)
    schema.add("a", [1, 2, 3, 4])
    schema.add("b", [5, 6, 7], union="u")
    schema.add("c", [5, 6, 7, 8, 9], union="u")
    schema.add("d", [1, 2], Parameter("who", 3), [3, 4])
    return schema


def test_positions_by_hand():
    schema = play()
    found = {m.name: (m.start, m.end, m.positions) for m in schema.modules.values()}
    assert found["b"] == (4, 7, [4, 5, 6]) and found["c"] == (4, 9, [4, 5, 6, 7, 8])
    assert found["d"] == (9, 16, [9, 10, 14, 15])
    assert schema.modules["d"].parameters == {"who": range(11, 14)}
    asked = schema.prompt(["d", "b"], [7, 7], who=[8, 9])
    assert asked.ids == [8, 9, 7, 7] and asked.positions == [11, 12, 16, 17]
    assert tokens_in_order(schema, asked) == [5, 6, 7, 1, 2, 8, 9, 3, 4, 7, 7]
    assert schema.prompt(["a", "c"], [7]).positions == [9]  # behind what is used, not what is reserved
    assert schema.prompt([], [7, 8]).positions == [0, 1]
    assert schema.prompt(["d"], [7]).positions == [16]  # the parameter's positions stay empty


@pytest.mark.parametrize(
    "add, words",
    [
        (("a", [1]), "a name that is taken"),
        (("e", [1], Parameter("who", 1)), "a name that is taken"),
        (("e",), "no tokens"),
        (("e", [1, 2, 3, 4, 5]), "beyond 20"),
        (("e", [1] * 3, {"room": 2}), "needs 3 positions, not 2"),
        (("e", [1], {"start": 10}), "as does ['d']"),
        (("e", [1, 1], {"start": -1}), "beyond"),
        (("e", [1] * 6, {"union": "u"}), "as does ['d']"),  # an alternative that grows into what follows
        (("e", [1], {"union": "u", "start": 5}), "begins elsewhere than union u"),
    ],
)
def test_what_cannot_be_reserved_is_refused(add, words):
    schema, options = play(), {}
    if isinstance(add[-1], dict):
        add, options = add[:-1], add[-1]
    with pytest.raises(ValueError) as error:
        schema.add(*add, **options)
    assert words in str(error.value) and len(schema.modules) == 4


@pytest.mark.parametrize(
    "names, text, arguments, words",
    [
        (["a", "e"], [1], {}, "no module e"),
        (["b", "c"], [1], {}, "one module of a union"),
        (["a", "a"], [1], {}, "one module of a union, once"),
        (["a"], [], {}, "a text of 0 tokens"),
        (["d"], [1] * 5, {}, "a text of 5 tokens at 16: 1 to 4 fit"),
        (["d"], [1], {"who": [1] * 4}, "argument who has 4 tokens, room 3"),
        (["a"], [1], {"who": [1]}, "room 0"),
    ],
)
def test_what_cannot_be_asked_is_refused(names, text, arguments, words):
    with pytest.raises(ValueError) as error:
        play().prompt(names, text, **arguments)
    assert words in str(error.value)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=5), st.randoms())
def test_no_two_modules_share_a_position(sizes, draw):
    schema = Schema(40)
    for i, (n, spare) in enumerate(sizes):
        schema.add(str(i), list(range(n)), room=n + spare, union=draw.choice([None, "u"]) if i == 0 else None)
    taken = [p for m in schema.modules.values() for p in range(m.start, m.end)]
    assert len(set(taken)) == len(taken) == sum(n + spare for n, spare in sizes)
    names = [m for m in schema.modules if draw.random() < 0.5]
    draw.shuffle(names)
    asked = schema.prompt(names, [1, 1])
    last = max((schema.modules[name].positions[-1] for name in names), default=-1)
    assert asked.positions == [last + 1, last + 2] and asked.modules == tuple(names)


def test_equal_modules_and_the_example():
    schema, asked = equal_modules(list(range(10)), 7, 3, 20, room=4)
    assert [m.ids for m in schema.modules.values()] == [[0, 1], [2, 3], [4, 5]]
    assert [m.start for m in schema.modules.values()] == [0, 4, 8]
    assert asked.ids == [6, 7, 8, 9] and asked.positions == [10, 11, 12, 13]
    pieces = [[i] * 56 for i in range(12)]
    prompts = example_prompts(example_schema(pieces, 256), pieces[4:], seed=3)
    assert len(prompts) == 8 and len({p.modules for p in prompts}) > 1
    assert len({len(p.ids) for p in prompts}) > 1  # names of different lengths
    assert prompts == example_prompts(example_schema(pieces, 256), pieces[4:], seed=3)
