"""Schemas of prompts: which modules prompts consist of, and the positions that each of them reserves.

Modules lie one behind the other unless told otherwise; alternatives of a union share their positions, and a
parameter keeps positions free inside a module for tokens that a prompt supplies. Positions that a prompt does
not use stay empty: with learned positions a gap is allowed, since attention asks who sees whom, not who is
next to whom. What is computed of a prompt, and when, is in main_prompt_cache.py.

Source: Gim et al., Prompt Cache: Modular Attention Reuse for Low-Latency Inference, 2024.
"""

import random
from collections import namedtuple

# room: positions that are kept free in a module's text, for at most as many tokens that a prompt supplies
Parameter = namedtuple("Parameter", "name room")
# start, end: its reserved positions; ids, positions: its tokens; parameters: {name: range of positions}
Module = namedtuple("Module", "name union start end ids positions parameters")
# modules: names; ids, positions: the tokens that are new, arguments first, the text behind all else last
Prompt = namedtuple("Prompt", "modules ids positions")


class Schema:
    """Which modules prompts are made of, and their positions in a context of seqlen tokens."""

    def __init__(self, seqlen):
        self.seqlen, self.modules = seqlen, {}

    def add(self, name, *parts, start=None, room=None, union=None):
        """Reserves positions for a module.

        Args: parts: lists of token ids, and Parameters; start: its first position, by default behind all
            others; room: how many positions it gets, by default as many as it needs; union: a name that
            alternatives have in common, of which a prompt takes one: they begin at the same position.
        Raises ValueError for a name that is taken, or positions too few, taken or beyond the context.
        """
        others = [m for m in self.modules.values() if union is None or m.union != union]
        alternatives = [m for m in self.modules.values() if m not in others]
        if start is None:
            start = alternatives[0].start if alternatives else max((m.end for m in others), default=0)
        ids, positions, parameters, place = [], [], {}, start
        for part in parts:
            here = range(place, place + (part.room if isinstance(part, Parameter) else len(part)))
            if isinstance(part, Parameter):
                parameters[part.name] = here
            else:
                ids, positions = [*ids, *part], [*positions, *here]
            place = here.stop
        end = place if room is None else start + room
        taken = [m.name for m in others if m.start < end and start < m.end]
        known = {key for m in self.modules.values() for key in (m.name, *m.parameters)}
        for wrong, reason in (
            (not ids, "has no tokens"),
            (known & {name, *parameters}, "uses a name that is taken"),
            (place > end, f"needs {place - start} positions, not {room}"),
            (start < 0 or end > self.seqlen, f"takes positions {start} to {end}, beyond {self.seqlen}"),
            (taken, f"takes positions {start} to {end}, as does {taken[:1]}"),
            (any(m.start != start for m in alternatives), f"begins elsewhere than union {union}"),
        ):
            if wrong:
                raise ValueError(f"module {name} {reason}")
        self.modules[name] = Module(name, union, start, end, ids, positions, parameters)

    def prompt(self, names, text, **arguments):
        """A Prompt of these modules, in any order, and a text behind the last position that they use.

        Args: text: token ids; arguments: {parameter: token ids}; without one its positions stay empty.
        Raises ValueError for what the schema lacks or has no room for, a union twice, or an empty text.
        """
        if unknown := set(names) - set(self.modules):
            raise ValueError(f"the schema has no module {min(unknown)}")
        modules = [self.modules[name] for name in names]
        if len({m.union or (m.name,) for m in modules}) < len(names):
            raise ValueError(f"of {', '.join(names)} a prompt can take one module of a union, once")
        rooms = {name: room for m in modules for name, room in m.parameters.items()}
        ids, positions = [], []
        for name, tokens in arguments.items():
            if len(tokens) > len(rooms.get(name, ())):
                raise ValueError(f"argument {name} has {len(tokens)} tokens, room {len(rooms.get(name, ()))}")
            ids, positions = ids + list(tokens), positions + list(rooms[name][: len(tokens)])
        behind = max([-1, *positions, *(m.positions[-1] for m in modules)]) + 1
        if not 0 < len(text) <= self.seqlen - behind:
            raise ValueError(f"a text of {len(text)} tokens at {behind}: 1 to {self.seqlen - behind} fit")
        positions += range(behind, behind + len(text))
        return Prompt(tuple(names), ids + list(text), positions)


def equal_modules(ids, n, n_modules, seqlen, room=None):
    """A Schema of the first n token ids in equal modules of so much room, and a Prompt with the rest."""
    schema, size = Schema(seqlen), n // n_modules
    for i in range(n_modules):
        schema.add(f"module {i}", ids[i * size : (i + 1) * size], room=room)
    return schema, schema.prompt(list(schema.modules), ids[n_modules * size :])


def example_schema(pieces, seqlen):
    """A Schema of four pieces of text [56] each: one of three scenes, and a speech that names somebody."""
    schema = Schema(seqlen)
    for i in range(3):  # of different lengths: behind a shorter one positions stay empty
        schema.add(f"scene {i}", pieces[i][: 56 - 8 * i], union="scene")
    schema.add("speech", pieces[3][:20], Parameter("name", 12), pieces[3][20:])
    return schema


def example_prompts(schema, pieces, seed):
    """A Prompt of the example schema for each piece of text [36 or more]: a scene, a name or none, a text."""
    draw, prompts = random.Random(seed), []
    for piece in pieces:
        name = piece[24 : 24 + draw.randrange(13)]
        prompts.append(schema.prompt([f"scene {draw.randrange(3)}", "speech"], piece[:24], name=name))
    return prompts


def tokens_in_order(schema, prompt):
    """All token ids of a prompt, in the order of their positions: what a model without modules would read."""
    parts = [schema.modules[name] for name in prompt.modules] + [prompt]
    placed = [pair for part in parts for pair in zip(part.positions, part.ids, strict=True)]
    return [token for _, token in sorted(placed)]
