"""The synchronisation of the tensor-core backward as a model: whatever the interleaving, it ends, in order, and no barrier is misread.

The model follows `kernels/csrc/triangle_attention_backward.cu`: per CTA one loader, three consumers, three forwarders; memory barriers
with the parity semantics of the hardware (a waiter two phases behind or ahead passes wrongly: `Barrier.wait` raises then, as the kernel
would read the wrong tile); CTAs start in ticket order on a limited number of multiprocessors. Threads are scheduled at random, and
adversarially (one thread starved).
"""

import random

import pytest

CONSUMERS, K_SLOTS, V_SLOTS, RING_STAGES = 3, 4, 3, 2  # as in backward_plan.cuh


class Barrier:
    """A memory barrier: `phase` completes after `count` arrivals."""

    def __init__(self, count):
        self.count, self.arrived, self.phase = count, 0, 0

    def arrive(self):
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.phase = 0, self.phase + 1

    def wait(self, phase):
        """Whether a wait for completion of `phase` (of which the hardware sees the parity alone) returns."""
        passes = (self.phase & 1) != (phase & 1)
        if passes and self.phase <= phase:
            raise AssertionError(f"parity misread: waiting for phase {phase}, barrier is in phase {self.phase}")
        assert self.phase <= phase + 1 or not passes or phase < 0, "waiter overtaken by two phases"
        return passes


class Cta:
    def __init__(self, key_tile, q_range, group, shape):
        self.key_tile, self.q_range, self.group = key_tile, q_range, group
        self.slices, self.q_count, self.q_ranges = shape["slices"], shape["q_count"], shape["q_ranges"]
        self.k_full = [Barrier(1) for _ in range(K_SLOTS)]
        self.k_empty = [Barrier(1) for _ in range(K_SLOTS)]
        self.v_full = [Barrier(1) for _ in range(V_SLOTS)]
        self.v_empty = [Barrier(1) for _ in range(V_SLOTS)]
        self.ring_full = [[Barrier(1) for _ in range(RING_STAGES)] for _ in range(CONSUMERS)]
        self.ring_empty = [[Barrier(1) for _ in range(RING_STAGES)] for _ in range(CONSUMERS)]
        self.dq_full = [[Barrier(1) for _ in range(2)] for _ in range(CONSUMERS)]
        self.dq_empty = [[Barrier(1) for _ in range(2)] for _ in range(CONSUMERS)]
        self.slab = [[Barrier(1) for _ in range(self.q_count)] for _ in range(CONSUMERS)]
        self.slab_order = [[] for _ in range(self.q_count)]

    def loader(self):
        uses = [0] * CONSUMERS
        for n0 in range(0, self.slices, CONSUMERS):
            for j in range(self.q_count):
                for w in range(CONSUMERS):
                    n = n0 + w
                    if n >= self.slices:
                        break
                    if j == 0:
                        ks, vs = n % K_SLOTS, n % V_SLOTS
                        yield lambda ks=ks, n=n: self.k_empty[ks].wait(n // K_SLOTS - 1)
                        self.k_full[ks].arrive()
                        yield lambda vs=vs, n=n: self.v_empty[vs].wait(n // V_SLOTS - 1)
                        self.v_full[vs].arrive()
                    use = uses[w]
                    uses[w] += 1
                    yield lambda w=w, use=use: self.ring_empty[w][use % RING_STAGES].wait(use // RING_STAGES - 1)
                    self.ring_full[w][use % RING_STAGES].arrive()

    def consumer(self, w, dkv_turn):
        tiles = [(n, j) for n in range(w, self.slices, CONSUMERS) for j in range(self.q_count)]

        def ready(use):
            n, j = tiles[use]
            if j == 0:
                yield lambda: self.k_full[n % K_SLOTS].wait(n // K_SLOTS)
                yield lambda: self.v_full[n % V_SLOTS].wait(n // V_SLOTS)
            yield lambda: self.ring_full[w][use % RING_STAGES].wait(use // RING_STAGES)

        def finish(use):
            n, j = tiles[use]
            self.ring_empty[w][use % RING_STAGES].arrive()
            self.dq_full[w][use % 2].arrive()
            if j == self.q_count - 1:
                self.k_empty[n % K_SLOTS].arrive()
                key = (self.group, n, self.key_tile)
                if self.q_range > 0:
                    yield lambda: dkv_turn.get(key, 0) == self.q_range
                if self.q_range + 1 < self.q_ranges:
                    dkv_turn[key] = self.q_range + 1

        if not tiles:
            return
        yield from ready(0)
        for use, (n, j) in enumerate(tiles):
            if use:
                yield from finish(use - 1)
            if j == self.q_count - 1:
                self.v_empty[n % V_SLOTS].arrive()
            if n > 0:
                yield lambda n=n, j=j: self.slab[w][j].wait((n - 1) // CONSUMERS)
            self.slab_order[j].append(n)
            self.slab[(w + 1) % CONSUMERS][j].arrive()
            yield lambda use=use: self.dq_empty[w][use % 2].wait(use // 2 - 1)
            if use + 1 < len(tiles):
                yield from ready(use + 1)
        yield from finish(len(tiles) - 1)

    def forwarder(self, w, dq_turn, dq_order):
        use = 0
        for n in range(w, self.slices, CONSUMERS):
            for j in range(self.q_count):
                key = (self.group, n, self.q_range, j)
                yield lambda use=use: self.dq_full[w][use % 2].wait(use // 2)
                if self.key_tile > 0:
                    yield lambda key=key: dq_turn.get(key, 0) == self.key_tile
                dq_order.setdefault(key, []).append(self.key_tile)
                self.dq_empty[w][use % 2].arrive()
                yield lambda: True
                dq_turn[key] = self.key_tile + 1
                use += 1


def simulate(slices, q_count, key_tiles, q_ranges, groups, processors, seed):
    rng = random.Random(seed)
    shape = {"slices": slices, "q_count": q_count, "q_ranges": q_ranges}
    ctas = [Cta(k, r, g, shape) for g in range(groups) for r in range(q_ranges) for k in range(key_tiles)]  # ticket order
    dq_turn, dkv_turn, dq_order = {}, {}, {}
    waiting, running = list(ctas), []

    def threads(cta):
        return [
            cta.loader(),
            *(cta.consumer(w, dkv_turn) for w in range(CONSUMERS)),
            *(cta.forwarder(w, dq_turn, dq_order) for w in range(CONSUMERS)),
        ]

    while waiting or running:
        while waiting and len(running) < processors:
            running.append([(thread, None) for thread in threads(waiting.pop(0))])
        progress = False
        rng.shuffle(running)
        starved = rng.randrange(7)  # this thread of every CTA runs only when nothing else can
        for skip in (True, False):
            for live in running:
                for index in rng.sample(range(len(live)), len(live)):
                    thread, condition = live[index]
                    if thread is None or (skip and index == starved):
                        continue
                    if condition is not None and not condition():
                        continue
                    progress = True
                    try:
                        live[index] = (thread, next(thread))
                    except StopIteration:
                        live[index] = (None, None)
            if progress:
                break
        finished = [live for live in running if all(thread is None for thread, _ in live)]
        running = [live for live in running if live not in finished]
        assert progress, "deadlock"
    for cta in ctas:
        assert all(order == list(range(slices)) for order in cta.slab_order), "dBias summed out of order"
    assert all(order == list(range(key_tiles)) for order in dq_order.values()), "dQ summed out of order"
    assert len(dq_order) == groups * slices * q_ranges * q_count


@pytest.mark.parametrize("q_count", [1, 2, 6])
@pytest.mark.parametrize("slices", [1, 2, 3, 4, 7, 12])
def test_one_processor_after_the_other(slices, q_count):
    """CTAs that run strictly one at a time: a dependency on a later ticket would hang."""
    for seed in range(4):
        simulate(slices, q_count, key_tiles=2, q_ranges=2, groups=1, processors=1, seed=seed)


@pytest.mark.parametrize("processors", [2, 5, 64])
@pytest.mark.parametrize("slices", [3, 8, 13])
def test_any_interleaving_ends_in_order(slices, processors):
    for seed in range(6):
        simulate(slices, q_count=3, key_tiles=3, q_ranges=2, groups=2, processors=processors, seed=seed)


def test_the_model_sees_a_reversed_dependency():
    """A key tile that waits for a later one must be reported, or the model proves nothing."""
    with pytest.raises(AssertionError, match="deadlock"):
        original = Cta.__init__

        def reversed_order(self, key_tile, q_range, group, shape):
            original(self, shape["q_count"] - key_tile, q_range, group, shape)

        Cta.__init__ = reversed_order
        try:
            simulate(3, q_count=1, key_tiles=2, q_ranges=1, groups=1, processors=1, seed=0)
        finally:
            Cta.__init__ = original


@pytest.mark.parametrize("slots", [1, 2])
def test_the_model_sees_too_few_slots(monkeypatch, slots):
    """With fewer K slots than consumers the loader waits for a consumer that waits for it."""
    monkeypatch.setitem(globals(), "K_SLOTS", slots)
    with pytest.raises(AssertionError, match=r"deadlock|parity"):
        for seed in range(20):
            simulate(13, q_count=2, key_tiles=1, q_ranges=1, groups=1, processors=1, seed=seed)
