"""The synchronisation of the tensor-core backward as a model: whatever the interleaving, it ends, in order, and no barrier is misread.

The model follows `kernels/csrc/backward_{helpers,consumer}.cuh`: per CTA two consumers, each with a loader and a forwarder of its
own; memory barriers with the parity semantics of the hardware (a waiter two phases behind or ahead passes wrongly: `Barrier.wait`
raises then, as the kernel would read the wrong tile); buffers that remember what was put into them; CTAs start in ticket order on a
limited number of multiprocessors. Threads are scheduled at random, and adversarially (one thread starved).
"""

import random

import pytest

CONSUMERS, PAIR, RING_STAGES = 2, 2, 2  # as in backward_groups.cuh and backward_layout.cuh
RELEASED = "released"


class Barrier:
    """A memory barrier: `phase` completes after `count` arrivals."""

    def __init__(self, count=1):
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


class Buffer:
    """Shared memory between a writer and a reader, with its `full` and `empty` barriers and what it holds now."""

    def __init__(self):
        self.full, self.empty, self.holds = Barrier(), Barrier(), RELEASED

    def fill(self, what):
        assert self.holds == RELEASED, f"{what} written over {self.holds}, which is still needed"
        self.holds = what
        self.full.arrive()

    def read(self, what):
        assert self.holds == what, f"{self.holds} read in place of {what}"

    def release(self, what):
        self.read(what)
        self.holds = RELEASED
        self.empty.arrive()


class Cta:
    def __init__(self, key_tile, q_range, group, shape):
        self.key_tile, self.q_range, self.group = key_tile, q_range, group
        self.slices, self.q_count, self.q_ranges = shape["slices"][group], shape["q_count"], shape["q_ranges"]
        self.pairs, self.ds_stages = (self.slices + 1) // PAIR, shape["ds_stages"]
        self.k = [Buffer() for _ in range(CONSUMERS)]
        self.v = [Buffer() for _ in range(CONSUMERS)]
        self.rows = [Buffer() for _ in range(CONSUMERS)]
        self.ring = [[Buffer() for _ in range(RING_STAGES)] for _ in range(CONSUMERS)]
        self.dq = [[Buffer() for _ in range(self.ds_stages)] for _ in range(CONSUMERS)]
        self.dkv_done = [Barrier() for _ in range(CONSUMERS)]
        self.slab = [[Barrier() for _ in range(self.q_count)] for _ in range(CONSUMERS)]
        self.slab_order = [[] for _ in range(self.q_count)]

    def members(self, m):
        return PAIR if PAIR * m + 1 < self.slices else 1

    def rounds(self, w):
        return enumerate(range(w, self.pairs, CONSUMERS))

    def loader(self, w, dkv_turn):
        use = tile = 0
        for r, m in self.rounds(w):
            for j in range(self.q_count):
                stage = self.ring[w][use % RING_STAGES]
                yield lambda stage=stage, use=use: stage.empty.wait(use // RING_STAGES - 1)
                stage.fill((m, j))
                use += 1
                if j == 0:
                    yield lambda r=r: self.v[w].empty.wait(r - 1)
                    self.v[w].fill(m)
                yield lambda tile=tile: self.rows[w].empty.wait(tile - 1)
                self.rows[w].fill((m, j))
                tile += 1
                if j == 0:
                    yield lambda r=r: self.k[w].empty.wait(r - 1)
                    self.k[w].fill(m)
            if self.q_range == 0:
                continue
            yield lambda m=m: dkv_turn.get((self.group, m, self.key_tile), 0) == self.q_range
            for x in range(self.members(m)):
                stage = self.ring[w][use % RING_STAGES]
                yield lambda stage=stage, use=use: stage.empty.wait(use // RING_STAGES - 1)
                stage.fill((m, "sums", x))
                use += 1

    def consumer(self, w):
        use = tile = 0

        def ready(r, m, j):
            if j == 0:
                yield lambda: self.k[w].full.wait(r)
                yield lambda: self.v[w].full.wait(r)
            stage, n = self.ring[w][use % RING_STAGES], use // RING_STAGES
            yield lambda: stage.full.wait(n)
            yield lambda t=tile: self.rows[w].full.wait(t)

        for r, m in self.rounds(w):
            for j in range(self.q_count):
                yield from ready(r, m, j)  # then the scores of this tile are issued, which read Q, dO, K, V and rows
                if m > 0:
                    yield lambda m=m, j=j: self.slab[w][j].wait((m - 1) // CONSUMERS)
                stage = self.ring[w][use % RING_STAGES]
                stage.read((m, j))
                self.k[w].read(m)
                self.v[w].read(m)
                self.rows[w].release((m, j))
                if j == self.q_count - 1:
                    self.v[w].release(m)
                self.slab_order[j].append(m)
                self.slab[(w + 1) % CONSUMERS][j].arrive()
                yield from self.store_ds(w, m, j, tile)
                stage.release((m, j))  # the products are complete
                if j == self.q_count - 1:
                    self.k[w].release(m)
                self.dq[w][tile % self.ds_stages].fill((m, j))
                use += 1
                tile += 1
            if self.q_range > 0:
                for x in range(self.members(m)):
                    stage = self.ring[w][use % RING_STAGES]
                    yield lambda stage=stage, use=use: stage.full.wait(use // RING_STAGES)
                    stage.release((m, "sums", x))
                    use += 1
            if self.q_range + 1 < self.q_ranges:
                self.dkv_done[w].arrive()

    def store_ds(self, w, m, j, tile):
        """dS goes where dQ will be: the forwarder must have read the dQ that was there."""
        buffer = self.dq[w][tile % self.ds_stages]
        yield lambda: buffer.empty.wait(tile // self.ds_stages - 1)
        buffer.read(RELEASED)

    def forwarder(self, w, dq_turn, dkv_turn, dq_order):
        tile = 0
        for r, m in self.rounds(w):
            for j in range(self.q_count):
                key, buffer = (self.group, m, self.q_range, j), self.dq[w][tile % self.ds_stages]
                yield lambda buffer=buffer, tile=tile: buffer.full.wait(tile // self.ds_stages)
                if self.key_tile > 0:
                    yield lambda key=key: dq_turn.get(key, 0) == self.key_tile
                dq_order.setdefault(key, []).append(self.key_tile)
                buffer.release((m, j))
                yield lambda: True
                dq_turn[key] = self.key_tile + 1
                tile += 1
            if self.q_range + 1 < self.q_ranges:
                yield lambda r=r: self.dkv_done[w].wait(r)
                dkv_turn[(self.group, m, self.key_tile)] = self.q_range + 1


def simulate(slices, q_count, key_tiles, q_ranges, groups, processors, seed, ds_stages=1):
    """Run all CTAs of a launch; ``slices``: of every group, or a list of each group's."""
    rng = random.Random(seed)
    slices = [slices] * groups if isinstance(slices, int) else slices
    shape = {"slices": slices, "q_count": q_count, "q_ranges": q_ranges, "ds_stages": ds_stages}
    ctas = [Cta(k, r, g, shape) for g in range(groups) for r in range(q_ranges) for k in range(key_tiles)]  # ticket order
    dq_turn, dkv_turn, dq_order = {}, {}, {}
    waiting, running = list(ctas), []

    def threads(cta):
        for w in range(CONSUMERS):
            yield cta.loader(w, dkv_turn)
            yield cta.consumer(w)
            yield cta.forwarder(w, dq_turn, dkv_turn, dq_order)

    while waiting or running:
        while waiting and len(running) < processors:
            running.append([(thread, None) for thread in threads(waiting.pop(0))])
        progress = False
        rng.shuffle(running)
        starved = rng.randrange(3 * CONSUMERS + 1)  # this thread of every CTA runs only when nothing else can
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
        assert all(order == list(range(cta.pairs)) for order in cta.slab_order), "dBias summed out of order"
    assert all(order == list(range(key_tiles)) for order in dq_order.values()), "dQ summed out of order"
    assert len(dq_order) == sum((of_group + 1) // PAIR for of_group in slices) * q_ranges * q_count


@pytest.mark.parametrize("q_count", [1, 2, 6])
@pytest.mark.parametrize("slices", [1, 2, 3, 5, 8, 15])
def test_one_processor_after_the_other(slices, q_count):
    """CTAs that run strictly one at a time: a dependency on a later ticket would hang."""
    for seed in range(8):
        ds_stages = 1 + seed % 2
        # Several query ranges have more tiles each than there are places for dS: see `test_the_model_sees_ranges_that_are_too_short`.
        simulate(slices, q_count, 2, 2 if q_count > ds_stages else 1, groups=1, processors=1, seed=seed, ds_stages=ds_stages)


@pytest.mark.parametrize("processors", [2, 5, 64])
@pytest.mark.parametrize("slices", [3, 8, 17])
def test_any_interleaving_ends_in_order(slices, processors):
    for seed in range(6):
        simulate(slices, q_count=3, key_tiles=3, q_ranges=3, groups=2, processors=processors, seed=seed, ds_stages=1 + seed % 2)


@pytest.mark.parametrize("processors", [1, 3, 64])
def test_groups_of_different_sizes(processors):
    """The last groups are short, may be odd, and may be empty (`split_groups`)."""
    for seed in range(6):
        simulate([16, 4, 0, 3], q_count=3, key_tiles=2, q_ranges=2, groups=4, processors=processors, seed=seed, ds_stages=1 + seed % 2)


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


def test_the_model_sees_a_missing_wait(monkeypatch):
    """A consumer that does not wait for its dQ tile to be read writes dS over it."""
    monkeypatch.setattr(Cta, "store_ds", lambda self, w, m, j, tile: iter([lambda: True]))
    with pytest.raises(AssertionError, match="still needed"):
        for seed in range(20):
            simulate(9, q_count=2, key_tiles=2, q_ranges=1, groups=1, processors=2, seed=seed)


def test_the_model_sees_rows_freed_before_they_are_read(monkeypatch):
    """Log-sum-exp and delta are operands of the scores: a loader that does not wait for these overwrites them."""

    def early(self, w, dkv_turn, original=Cta.loader):
        self.rows[w].empty.wait = lambda phase: True
        yield from original(self, w, dkv_turn)

    monkeypatch.setattr(Cta, "loader", early)
    with pytest.raises(AssertionError, match="still needed"):
        for seed in range(20):
            simulate(9, q_count=3, key_tiles=1, q_ranges=1, groups=1, processors=1, seed=seed)


def test_the_model_sees_ranges_that_are_too_short():
    """With as many places for dS as tiles, dK and dV can be handed over twice before the forwarder looks (the kernel asserts)."""
    with pytest.raises(AssertionError, match=r"parity|overtaken|deadlock"):
        for seed in range(20):
            simulate(15, q_count=1, key_tiles=2, q_ranges=2, groups=1, processors=1, seed=seed, ds_stages=2)


def test_the_model_sees_a_barrier_shared_by_two_receivers(monkeypatch):
    """One slab barrier for both consumers would be ahead of one of them, whose parity then lies."""
    original = Cta.__init__

    def shared(self, *arguments):
        original(self, *arguments)
        self.slab = [self.slab[0]] * CONSUMERS

    monkeypatch.setattr(Cta, "__init__", shared)
    with pytest.raises(AssertionError, match=r"parity|overtaken|out of order|deadlock"):
        for seed in range(20):
            simulate(13, q_count=2, key_tiles=1, q_ranges=1, groups=1, processors=1, seed=seed)
