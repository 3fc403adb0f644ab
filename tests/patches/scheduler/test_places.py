from __future__ import annotations

import random

from patches.scheduler.places import Places


def test_places_do_not_overlap_and_come_back() -> None:
    chance, places, taken = random.Random(0), Places(1000, 256), dict[int, int]()
    for _ in range(3000):
        if taken and chance.random() < 0.5:
            start = chance.choice([*taken])
            places.give_back([start], [taken.pop(start)])
            continue
        sizes = [chance.randint(1, 100) for _ in range(chance.randint(1, 3))]
        for start, size in zip(places.take(sizes) or [], sizes, strict=False):
            assert start // 256 == (start + size - 1) // 256
            assert all(start + size <= one or one + n <= start for one, n in taken.items())
            taken[start] = size
    places.give_back([*taken], [*taken.values()])
    assert places.take([256, 256, 256, 232]) == [0, 256, 512, 768]
