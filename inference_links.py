"""Links between processors, and from which size on it pays to split work over them: computed, not measured.

A collective starts once, then passes messages around a ring, each of which takes the link's latency and its
bytes over the link's bandwidth (Thakur et al., Optimization of Collective Communication Operations in MPICH,
2005). A link is a figure of its maker; what a library and other traffic cost on top is not in it.

Sources. Bandwidth of one direction: NVIDIA, H100 data sheet, 2023 (NVLink 4 and PCIe 5.0, half of what it
gives for both directions); NVIDIA, ConnectX-7 data sheet, 2023 (InfiniBand NDR, 400 Gb/s); IEEE 802.3ae, 2002
(Ethernet). Latency: the constants that NCCL 2.10 chooses its algorithm by (ring, low-latency protocol), which
its start is from as well; for Ethernet half of the round trip in a data centre in Dean, Software Engineering
Advice from Building Large-Scale Distributed Systems, 2009.
"""

from collections import namedtuple

Link = namedtuple("Link", "gb_per_s latency_us")
LINKS = {
    "NVLink 4": Link(450, 0.47),
    "PCIe 5.0, 16 lanes": Link(64, 1.0),
    "InfiniBand NDR": Link(50, 2.7),
    "Ethernet, 10 Gb/s": Link(1.25, 250),
}
START_US = 3.6  # of a collective


def collective_link_ms(link, kind, n_bytes, world_size):
    """Time in ms of one collective over a ring of W ranks.

    Args: kind: all_reduce, all_gather, all_to_all, or send (one message); n_bytes: of the tensor that a rank
        brings, as in inference_distributed.collective_ms. Raises KeyError for another kind.
    """
    W = world_size
    steps, n_sent = {  # messages one after the other, bytes of each
        "all_reduce": (2 * (W - 1), n_bytes / W),
        "all_gather": (W - 1, n_bytes),
        "all_to_all": (W - 1, n_bytes / W),
        "send": (1, n_bytes),
    }[kind]
    message_us = link.latency_us + n_sent / (1000 * link.gb_per_s)
    return (START_US + steps * message_us) / 1000 if steps else 0.0


def spared_ms(row, whole, parts, part=None):
    """What splitting work over `parts` processors spares: a processor does its part alone, all at once.

    Args: row of a sweep; whole: column of the ms of one processor; part: column of the ms that a processor
        takes for its part, by default whole / parts.
    """
    return row[whole] - (row[part] if part else row[whole] / parts)


def pays_from(gains):
    """The first size of (size, ms spared, ms added) from which on splitting spares more than it adds.

    None where it does not at the last size.
    """
    found = None
    for size, spared, added in reversed(gains):
        if spared <= added:
            break
        found = size
    return found


def add_break_even(report, rows, size, whole, cost, exchanges, parts, part=None):
    """Adds a table to a report: from which size on splitting pays, by the exchanges here and over each link.

    The processors are as fast as the one that was measured, each with its part. Nothing for a single one.

    Args: rows of a sweep; cost: column of the ms that the exchanges took here; exchanges: list of
        (times, kind, bytes at size 1) for collective_link_ms; whole, parts, part: as in spared_ms.
    """
    if parts < 2:
        return
    last, lines = rows[-1][size], []
    for name, link in {"this machine, measured": None, **LINKS}.items():
        gains = []
        for row in rows:
            added = row[cost]
            if link:
                times = [
                    (n, collective_link_ms(link, kind, one * row[size], parts)) for n, kind, one in exchanges
                ]
                added = sum(n * ms for n, ms in times)
            gains.append((row[size], spared_ms(row, whole, parts, part), added))
        line = {"link": name, "GB/s": link and link.gb_per_s, "latency us": link and link.latency_us}
        line |= {f"spares ms at {last}": gains[-1][1], f"adds ms at {last}": gains[-1][2]}
        lines.append(line | {f"pays from {size}": pays_from(gains)})
    title = f"Computed by inference_links.py: when {parts} processors as fast as this one pay"
    report.sweep(f"{title} (-: at no {size} up to {last})", lines)
