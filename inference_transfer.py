"""Keys and values on their way from one rank to another: a stream of messages, and credits that come back.

A message is five numbers [kind, request, value, end, n_rows], then data or none:
BEGIN: a text with `value` tokens in its prompt, `end` with its answer; data: their ids and the positions of
    the n_rows tokens that will come [value + n_rows]
LAYER: keys and values of layer `value` at these positions; data: [n_rows, 2, H, D]
TOKEN: `value` is the first token of the answer; nothing more comes of this text
END: nothing more comes at all
Every message says what it is, so one that is lost leaves none waiting for it. Tensors travel on the CPU.
"""

import queue
import threading
from collections import namedtuple

import torch

BEGIN, LAYER, TOKEN, END = range(4)
Message = namedtuple("Message", "kind request value end n_rows data", defaults=[0, 0, 0, 0, None])


class Sender:
    """The end that sends texts, each for a credit.

    Args: team: of inference_distributed.py; to: the rank at the other end; n_credits: texts that it can hold.
    """

    def __init__(self, team, to, n_credits):
        self.team, self.to, self.credits, self.n_credits = team, to, n_credits, n_credits
        self.sending = []  # (handle, tensor): a tensor must stay as it is until it is sent

    def send(self, kind, *numbers, data=None):
        """Begins to send a message; the data must not be changed."""
        message = Message(kind, *numbers, data=data)
        for tensor in (torch.tensor(message[:5]),) if data is None else (torch.tensor(message[:5]), data):
            self.sending.append((self.team.start_send(tensor, self.to), tensor))

    def wait(self):
        """Waits until all that was sent has gone."""
        for handle, _ in self.sending:
            handle.wait()
        self.sending.clear()

    def take_credit(self):
        """Room for one more text at the other end; waits for a text there to end if there is none."""
        if self.credits == 0:
            self._receive_credit()
        self.credits -= 1

    def _receive_credit(self):
        self.team.receive(torch.empty(1, dtype=torch.int64), self.to)
        self.credits += 1

    def close(self):
        """Says that nothing more comes, and waits until the last text has ended."""
        self.send(END)
        while self.credits < self.n_credits:
            self._receive_credit()
        self.wait()


class Receiver:
    """The end that receives texts, by a thread: they come while this rank computes.

    Args: source: the rank at the other end; shape, dtype: of a token's keys and values in a layer, [2, H, D].
    """

    def __init__(self, team, source, shape, dtype):
        self.team, self.source, self.shape, self.dtype = team, source, shape, dtype
        self.messages, self.returning = queue.SimpleQueue(), []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        try:
            kind = None
            while kind != END:
                header = self.team.receive(torch.empty(5, dtype=torch.int64), self.source).tolist()
                kind, _, n, _, n_rows = header
                data = None
                if kind == BEGIN:
                    data = self.team.receive(torch.empty(n + n_rows, dtype=torch.int64), self.source)
                elif kind == LAYER:
                    data = torch.empty(n_rows, *self.shape, dtype=self.dtype)
                    self.team.receive(data, self.source)
                self.messages.put(Message(*header, data))
        except Exception as error:  # raised again where messages are read
            self.messages.put(error)

    def get(self, timeout=0.0):
        """The next Message, or None where none comes within the time. Raises what the thread met."""
        try:
            message = self.messages.get(timeout > 0, timeout)
        except queue.Empty:
            return None
        if isinstance(message, Exception):
            raise message
        return message

    def give_credit(self):
        """Says that a text has ended."""
        credit = torch.ones(1, dtype=torch.int64)
        self.returning.append((self.team.start_send(credit, self.source), credit))

    def close(self):
        for handle, _ in self.returning:
            handle.wait()
