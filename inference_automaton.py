"""A regular expression as an automaton over the characters of a vocabulary, by derivatives.

The derivative of an expression by a character is the expression of what may follow it: that of (ab|ac)d by a
is (b|c)d. Expressions are the states of the automaton, then, and derivatives its edges; where a text may end,
the expression matches the text without characters. Simplified as they are made, there are finitely many.

main_structured_decoding.py decodes by it, and more/structured_grammar.py by several that call each other.

Source: Brzozowski, Derivatives of Regular Expressions, 1964; Owens, Reppy and Turon, Regular-expression
Derivatives Re-examined, 2009.
"""

import re
from functools import lru_cache

# Nodes: ("one", characters), ("or", nodes), ("then", node, node), ("repeat", node, least, most), ("empty",)
NOTHING, EMPTY = ("or", frozenset()), ("empty",)  # no text at all; the text without characters
PIECE = re.compile(r"\(\?:|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?=[\d,])\d*,?\d*\}|.", re.S)
QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
MOST_STATES = 4000


def either(nodes):
    """The node of what matches one of these nodes."""
    parts = frozenset().union(*(node[1] if node[0] == "or" else {node} for node in nodes))
    return next(iter(parts)) if len(parts) == 1 else ("or", parts)


def then(node, rest):
    """The node of one text behind another."""
    if NOTHING in (node, rest):
        return NOTHING
    if EMPTY in (node, rest):
        return rest if node == EMPTY else node
    return ("then", node[1], then(node[2], rest)) if node[0] == "then" else ("then", node, rest)


def repeat(node, least, most):
    """The node of a text several times behind itself; most: None for any number."""
    return EMPTY if most == 0 or node == EMPTY else ("repeat", node, least, most)


def parse(pattern, vocabulary, calls=""):
    """The node of an expression as Python's re reads it, over the characters of the vocabulary.

    Characters of calls stand for themselves alone: no class and no dot contains them.

    Raises ValueError for what re refuses, and for what tells more than which texts match: anchors,
    references, look-around, lazy repetition, flags.
    """

    def refuse(why, cause=None):
        raise ValueError(f"the expression {pattern!r}: {why}") from cause

    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        refuse(error, error)
    pieces = PIECE.findall(pattern)[::-1]  # the next one is the last

    def choice():
        nodes = [sequence()]
        while pieces and pieces[-1] == "|":
            pieces.pop()
            nodes.append(sequence())
        return either(nodes)

    def sequence():
        nodes = []
        while pieces and pieces[-1] not in ("|", ")"):
            nodes.append(repeated(one(pieces.pop())))
        node = EMPTY
        for part in reversed(nodes):
            node = then(part, node)
        return node

    def one(piece):
        if piece in calls:
            return "one", frozenset(piece)
        if piece in ("^", "$") or re.match(r"\\[\dABZbzNUux]", piece):
            refuse(f"{piece} is not known here")
        if piece not in ("(", "(?:"):  # which characters it stands for, re knows
            return "one", frozenset(c for c in vocabulary if re.fullmatch(piece, c))
        if pieces[-1] == "?":
            refuse("of the groups with (? there is (?: alone")
        node = choice()
        pieces.pop()  # its )
        return node

    def repeated(node):
        found = QUANTIFIER.fullmatch(pieces[-1]) if pieces else None
        if not found:
            return node
        sign = pieces.pop()
        if pieces and QUANTIFIER.fullmatch(pieces[-1]):
            refuse(f"a second repetition behind {sign}")
        if sign in "*+?":
            return repeat(node, int(sign == "+"), 1 if sign == "?" else None)
        least, comma, most = found.groups()
        return repeat(node, int(least or 0), int(most) if most else None if comma else int(least))

    try:
        return choice()
    except RecursionError as error:
        refuse("groups are nested too deep", error)


def may_end(node):
    """Whether the text without characters matches."""
    kind, *parts = node
    if kind == "or":
        return any(may_end(part) for part in parts[0])
    if kind == "then":
        return may_end(parts[0]) and may_end(parts[1])
    return kind == "empty" or kind == "repeat" and (parts[1] == 0 or may_end(parts[0]))


@lru_cache(maxsize=100_000)
def derivative(node, character):
    """The node of what may follow this character, NOTHING where no text begins with it."""
    kind, *parts = node
    if kind == "one":
        return EMPTY if character in parts[0] else NOTHING
    if kind == "or":
        return either(derivative(part, character) for part in parts[0])
    if kind == "repeat":
        inner, least, most = parts
        rest = repeat(inner, max(least - 1, 0), most and most - 1)
        return then(derivative(inner, character), rest)
    if kind == "then":
        following = then(derivative(parts[0], character), parts[1])
        return either([following, derivative(parts[1], character)]) if may_end(parts[0]) else following
    return NOTHING


def build_automaton(pattern, vocabulary, calls=""):
    """The automaton of an expression over a vocabulary of characters; it starts in state 0.

    Args: calls: further characters, which stand for themselves alone (see parse).

    Returns: (moves, ends): moves: for each state {character: next state}, without edges after which nothing
        matches; ends: the set of states in which a text may end. Raises ValueError for an expression that
        cannot be read (see parse), that no text matches, or that needs too many states.
    """
    numbers, moves = {parse(pattern, vocabulary, calls): 0}, []
    for node in (nodes := list(numbers)):  # grows while it is read
        moves.append({})
        for character in (*vocabulary, *calls):
            following = derivative(node, character)
            if following == NOTHING:
                continue
            if following not in numbers:
                numbers[following] = len(nodes)
                nodes.append(following)
                if len(nodes) > MOST_STATES:
                    raise ValueError(f"the expression {pattern!r} needs more than {MOST_STATES} states")
            moves[-1][character] = numbers[following]
    ends = {number for node, number in numbers.items() if may_end(node)}
    distance = distances(moves, ends)
    if 0 not in distance:
        raise ValueError(f"no text of these characters matches the expression {pattern!r}")
    live = [{c: s for c, s in edges.items() if s in distance} for edges in moves]
    return live, ends


def distances(moves, ends):
    """{state: the fewest edges from it to one of the ends}, for states that lead to one."""
    before = {}
    for state, edges in enumerate(moves):
        for target in edges.values():
            before.setdefault(target, set()).add(state)
    distance, order = dict.fromkeys(ends, 0), list(ends)
    for state in order:  # grows while it is read
        for other in before.get(state, ()):
            if other not in distance:
                distance[other] = distance[state] + 1
                order.append(other)
    return distance
