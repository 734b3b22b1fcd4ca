"""Rules that call each other, read with a stack: they say what an expression cannot, such as nested brackets.

A rule is an expression that may call rules: <value> in it stands for a text of the rule `value`. Each rule
becomes an automaton. A call puts the state behind it on a stack and begins the rule that is called, whose end
takes that state from the stack. Where a grammar leaves open what a text is, several stacks are kept side by
side, which share what lies below their tops.

more/structured_grammar.py decodes by it.

Source: Dong et al., XGrammar, 2024. Engines have gone over to Earley's parser since, which needs no rule
against left recursion: Earley, An Efficient Context-Free Parsing Algorithm, 1970.
"""

import math
import re

from inference_automaton import build_automaton


class Grammar:
    """Rules that call each other, over the characters of a vocabulary.

    Args: rules: {name: expression}, the first is what a text is. Raises ValueError for a rule that is called
        and not there, for one of which no text comes to an end, and for left recursion.
    States of all rules are numbered together. moves: for each {character: next state}; calls: for each
    [(first state of the rule, state behind the call)]; ends: states in which their rule may be over; left:
    for each the fewest characters to the end of its rule. A stack is (state, stack below), with None at the
    bottom. What is read so far is a set of stacks, at first `start`.
    """

    def __init__(self, rules, vocabulary):
        signs = {name: chr(0xE000 + i) for i, name in enumerate(rules)}  # a character for each call
        automata, first, n_states = [], {}, 0
        for name, expression in rules.items():
            if missing := {*re.findall(r"<(\w+)>", expression)} - {*rules}:
                raise ValueError(f"the rule {name} calls {missing.pop()}, which is no rule")
            pattern = re.sub(r"<(\w+)>", lambda call: signs[call[1]], expression)
            automata.append((n_states, *build_automaton(pattern, vocabulary, "".join(signs.values()))))
            first[signs[name]] = n_states
            n_states += len(automata[-1][1])
        self.moves, self.calls, self.ends = [], [], set()
        for base, moves, ends in automata:
            self.ends |= {base + state for state in ends}
            for edges in moves:
                self.moves.append({c: base + state for c, state in edges.items() if c not in first})
                self.calls.append([(first[c], base + state) for c, state in edges.items() if c in first])
        self.start, self.left = {(0, None)}, self._shortest()
        for name, sign in signs.items():
            if self.left[first[sign]] == math.inf:
                raise ValueError(f"no text of the rule {name} comes to an end")
            if self._begins_with(first[sign], first[sign], set()):
                raise ValueError(f"the rule {name} begins with itself (left recursion): stacks would not end")
        self.caller = n_states  # stands for all that may lie below a rule
        self.moves.append({})
        self.calls.append([])

    def _shortest(self):
        left, before = [0 if s in self.ends else math.inf for s in range(len(self.moves))], None
        while left != before:
            before = list(left)
            for state, edges in enumerate(self.moves):
                steps = [1 + left[s] for s in edges.values()]
                steps += [left[first] + left[behind] for first, behind in self.calls[state]]
                left[state] = min([left[state], *steps])
        return left

    def _begins_with(self, state, rule, seen):
        """Whether the rule that starts in this state is called from here before any character is read."""
        if state in seen:
            return False
        seen.add(state)
        return any(
            first == rule
            or self._begins_with(first, rule, seen)
            or self.left[first] == 0
            and self._begins_with(behind, rule, seen)
            for first, behind in self.calls[state]
        )

    def around(self, stacks):
        """These stacks, and those behind calls and ends that need no character."""
        found, order = set(stacks), list(stacks)
        for state, below in order:  # grows while it is read
            following = [(first, (behind, below)) for first, behind in self.calls[state]]
            if state in self.ends and below is not None:
                following.append(below)
            for stack in following:
                if stack not in found:
                    found.add(stack)
                    order.append(stack)
        return found

    def following(self, stacks):
        """{character: the set of stacks behind it} for each character that may come next."""
        behind = {}
        for state, below in self.around(stacks):
            for character, target in self.moves[state].items():
                behind.setdefault(character, set()).add((target, below))
        return behind

    def read(self, text, stacks=None):
        """The stacks behind a text, an empty set where it may not come."""
        stacks = self.start if stacks is None else stacks
        for character in text:
            stacks = self.following(stacks).get(character, set())
        return stacks

    def may_end(self, stacks):
        """Whether a text may be over here."""
        return any(state in self.ends and below is None for state, below in self.around(stacks))

    def characters_left(self, stacks):
        """The fewest characters to an end, infinite where there is no stack."""

        def left(stack):
            total = 0
            while stack is not None:
                total, stack = total + self.left[stack[0]], stack[1]
            return total

        return min(map(left, stacks), default=math.inf)
