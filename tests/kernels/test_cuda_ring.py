"""The hand-overs of the Hopper forwards as a host model: roles that load and multiply, barriers that count.

A role is a generator that yields what it waits for; barriers have phases and arrivals as mbarriers do. A schedule in
which all roles wait is the deadlock that the kernel would have. What is modelled is the order of waits and releases in
src/tma_forward.cu and src/twin_forward.cu, not their arithmetic; registers are in test_cuda_compile.py.
"""

from __future__ import annotations

import random

import pytest

from ffpa_hf.kernels.cuda import configs


class Barrier:
    """Arrivals complete a phase; `wait(parity)` passes where the phase of that parity is over (PTX, mbarrier)."""

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.phase = 0

    def arrive(self, arrivals: int = 1) -> None:
        assert arrivals <= self.left, "more arrivals than a phase expects"
        self.left -= arrivals
        if self.left == 0:
            self.left, self.phase = self.count, self.phase + 1

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Named:
    """A named barrier (bar.sync, bar.arrive) of two warpgroups."""

    def __init__(self) -> None:
        self.arrived, self.generation = 0, 0

    def arrive(self) -> int:
        assert self.arrived < 2
        mine = self.generation
        self.arrived += 1
        if self.arrived == 2:
            self.arrived, self.generation = 0, mine + 1
        return mine


class Ring:
    def __init__(self, stages: int, groups: int) -> None:
        self.stages = stages
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(groups) for _ in range(stages)]
        self.holds: list[object] = [None] * stages


def parity(place: int, stages: int) -> int:
    return place // stages % 2


def run(roles, seed: int) -> None:
    """Let roles that can go on do so in random order until all have ended. Raises AssertionError at a deadlock."""
    chance = random.Random(seed)
    waits = {index: lambda: True for index in range(len(roles))}
    while waits:
        ready = [index for index, can in waits.items() if can()]
        assert ready, f"deadlock: {len(waits)} roles wait"
        index = chance.choice(ready)
        try:
            waits[index] = next(roles[index])
        except StopIteration:
            del waits[index]


# --- one block (src/tma_forward.cu) -----------------------------------------------------------------------------------


def tma_loader(ring, q_full, q_empty, pieces, tiles):
    place = rounds = 0
    for tile, steps in enumerate(tiles):
        if not steps:
            continue
        before = rounds % 2 ^ 1
        yield lambda before=before: q_empty.passed(before)
        q_full.arrive()
        rounds += 1
        order = [("k", 0)]
        for step in range(steps):
            order += [("k", step + 1)] if step + 1 < steps else []
            order += [("v", step)]
        for kind, step in order:
            for piece in range(pieces):
                slot, other = place % ring.stages, parity(place, ring.stages) ^ 1
                yield lambda slot=slot, other=other: ring.empty[slot].passed(other)
                ring.holds[slot] = (tile, kind, step, piece)
                ring.full[slot].arrive()
                place += 1


def tma_computer(ring, q_full, q_empty, pieces, tiles, group, turns):
    place = rounds = 0

    def take(tile, kind, step):
        nonlocal place
        for piece in range(pieces):
            slot, now = place % ring.stages, parity(place, ring.stages)
            yield lambda slot=slot, now=now: ring.full[slot].passed(now)
            assert ring.holds[slot] == (tile, kind, step, piece), (ring.holds[slot], tile, kind, step, piece)
            place += 1

    def free(behind):
        for piece in range(pieces, 0, -1):
            ring.empty[(place - piece - behind) % ring.stages].arrive()

    if turns and group == len(turns) - 1:
        turns[0].arrive()
    for tile, steps in enumerate(tiles):
        if not steps:
            continue
        now = rounds % 2
        yield lambda now=now: q_full.passed(now)
        rounds += 1
        yield from take(tile, "k", 0)
        free(0)
        for step in range(1, steps):
            if turns:
                mine = turns[group].arrive()
                yield lambda mine=mine: turns[group].generation > mine
            yield from take(tile, "k", step)
            yield from take(tile, "v", step - 1)
            if turns:
                turns[(group + 1) % len(turns)].arrive()
            free(pieces)
            yield lambda: True  # the softmax: others may go on
            free(0)
        q_empty.arrive()
        yield from take(tile, "v", steps - 1)
        free(0)


def tma_roles(config: configs.TmaConfig, head_dim: int, tiles, turns: bool):
    pieces = -(-configs.chunks_of(head_dim) // config.piece)
    ring = Ring(config.stages, config.groups)
    q_full, q_empty = Barrier(1), Barrier(config.groups)
    order = [Named() for _ in range(config.groups)] if turns else []
    shared = (ring, q_full, q_empty, pieces, tiles)
    return [tma_loader(*shared), *(tma_computer(*shared, group, order) for group in range(config.groups))]


TILES = ([0], [1], [2], [1, 1, 1], [0, 3, 0, 0, 1, 2, 0], [7, 6, 5, 4, 3, 2, 1], [23, 1, 0, 9])


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 192, 200, 256, 264, 320])
def test_the_roles_of_one_block_never_wait_for_each_other(head_dim, turns):
    for causal, masked in ((False, False), (True, False), (False, True)):
        config = configs.choose_tma(head_dim, causal, masked)
        for seed, tiles in enumerate(TILES):
            run(tma_roles(config, head_dim, tiles, turns), seed)


def test_the_model_sees_a_ring_that_is_too_small():
    config = configs.TmaConfig(64, 2, 3, 3)  # head dim 320: two pieces for the keys, two for the values
    with pytest.raises(AssertionError, match="deadlock"):
        run(tma_roles(config, 320, [3], False), 0)


# --- two blocks (src/twin_forward.cu) ---------------------------------------------------------------------------------


class Cluster:
    """What the blocks write into each other: a message box for each group, its barriers."""

    def __init__(self) -> None:
        self.mail = [[None, None], [None, None]]  # [block][group]
        self.mail_full = [[Barrier(2), Barrier(2)] for _ in range(2)]  # the bytes, and that they are expected
        self.mail_free = [[Barrier(1), Barrier(1)] for _ in range(2)]


def twin_order(steps: int, late: bool):
    for step in range(steps + 1):
        if step < steps:
            yield "k", step
        if step > 0:
            yield "own", step - 1
            yield "other", step - 1 - late
    if late:
        yield "other", steps - 1


def twin_loader(ring, pieces, steps, late):
    place = 0
    for kind, step in twin_order(steps, late) if steps else ():
        for piece in range(pieces[kind]):
            slot, other = place % ring.stages, parity(place, ring.stages) ^ 1
            yield lambda slot=slot, other=other: ring.empty[slot].passed(other)
            ring.holds[slot] = (kind, step, piece)
            ring.full[slot].arrive()
            place += 1


def twin_computer(ring, pieces, steps, late, cluster, block, group):
    place = 0
    peer = 1 - block
    other_of = -1  # the step whose probabilities `other` has

    def take(kind, step, free_as_it_goes=False):
        nonlocal place
        for piece in range(pieces[kind]):
            slot, now = place % ring.stages, parity(place, ring.stages)
            yield lambda slot=slot, now=now: ring.full[slot].passed(now)
            assert ring.holds[slot] == (kind, step, piece), (ring.holds[slot], kind, step, piece)
            if piece and free_as_it_goes:
                ring.empty[(place - 1) % ring.stages].arrive()
            place += 1

    def send(step, free_parity):
        yield lambda: cluster.mail_free[block][group].passed(free_parity)
        assert cluster.mail[peer][group] is None, "a message is overwritten"
        cluster.mail[peer][group] = step
        cluster.mail_full[peer][group].arrive()

    def receive(phase):
        nonlocal other_of
        yield lambda: cluster.mail_full[block][group].passed(phase)
        other_of, cluster.mail[block][group] = cluster.mail[block][group], None
        cluster.mail_free[peer][group].arrive()
        cluster.mail_full[block][group].arrive()  # the next message is expected

    def values(step, kind):
        if kind == "other":
            assert other_of == step or step < 0, (other_of, step)
        yield from take(kind, step)

    def free_values():
        both = pieces["own"] + pieces["other"]
        for piece in range(both, 0, -1):
            ring.empty[(place - piece) % ring.stages].arrive()

    if not steps:
        return
    cluster.mail_full[block][group].arrive()
    yield from take("k", 0, True)
    ring.empty[(place - 1) % ring.stages].arrive()
    if not late:
        yield from send(0, 1)
    for step in range(1, steps):
        yield from take("k", step, True)
        last_key = place - 1
        yield from send(step - 1, step & 1) if late else receive((step - 1) & 1)
        yield from values(step - 1, "own")
        yield from values(step - 1 - late, "other")
        ring.empty[last_key % ring.stages].arrive()
        if not late:
            yield from send(step, (step & 1) ^ 1)
        free_values()
        if late:
            yield from receive((step - 1) & 1)
    if late:
        yield from send(steps - 1, steps & 1)
        yield from values(steps - 1, "own")
        yield from values(steps - 2, "other")
        free_values()
        yield from receive((steps - 1) & 1)
        yield from values(steps - 1, "other")
    else:
        yield from receive((steps - 1) & 1)
        yield from values(steps - 1, "own")
        yield from values(steps - 1, "other")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("head_dim", [328, 384, 392, 448, 456, 504, 512])
def test_the_blocks_of_a_cluster_never_wait_for_each_other(head_dim, late):
    config = configs.choose_twin(head_dim)
    halves = -(-configs.chunks_of(configs.half_of(head_dim)) // config.piece)
    pieces = {"k": -(-configs.chunks_of(head_dim) // config.piece), "own": halves, "other": halves}
    for steps in (0, 1, 2, 3, 4, 17):
        for seed in range(3):
            cluster, roles = Cluster(), []
            for block in range(2):
                ring = Ring(config.stages, 2)
                roles.append(twin_loader(ring, pieces, steps, late))
                roles += [twin_computer(ring, pieces, steps, late, cluster, block, group) for group in range(2)]
            run(roles, seed)
