"""Which GPUs are free: by node, and nodes by how many they have, so that best fits are at hand."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise

from waterflow.cluster.spec import ClusterSpec


class FreeGpus:
    """The free GPUs of a cluster."""

    def __init__(self, cluster: ClusterSpec) -> None:
        firsts = cluster.firsts
        self._owner = cluster.owner
        self.ids = [list(range(a, b)) for a, b in pairwise(firsts)]
        self.largest = max(node.gpus for node in cluster.nodes)
        self.by_count: list[list[int]] = [[] for _ in range(self.largest + 1)]
        for node, ids in enumerate(self.ids):
            self.by_count[len(ids)].append(node)
        self.total = cluster.gpus

    def take(self, gpus: Iterable[int]) -> None:
        """They are no longer free."""
        for node, found in self._by_node(gpus).items():
            ids = self.ids[node]
            self._leave(node, len(ids))
            for gpu in found:
                ids.remove(gpu)
            insort(self.by_count[len(ids)], node)
            self.total -= len(found)

    def give(self, gpus: Iterable[int]) -> None:
        """They are free again."""
        for node, found in self._by_node(gpus).items():
            ids = self.ids[node]
            self._leave(node, len(ids))
            for gpu in found:
                insort(ids, gpu)
            insort(self.by_count[len(ids)], node)
            self.total += len(found)

    def _leave(self, node: int, count: int) -> None:
        nodes = self.by_count[count]
        del nodes[bisect_left(nodes, node)]

    def _by_node(self, gpus: Iterable[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for gpu in gpus:
            found.setdefault(self._owner[gpu], []).append(gpu)
        return found


class Placer:
    """Finds places among the free GPUs, and remembers what it has given away; changes nothing.

    Best fit: the node that has the fewest free GPUs and still enough. A job larger than a node
    takes the emptiest nodes whole. One that fits nowhere together is spread over as few nodes as
    can be, unless it insists.
    """

    def __init__(self, free: FreeGpus) -> None:
        self._free = free
        self._changed: dict[int, list[int]] = {}
        # Changed nodes by how many are free; an entry that is no longer true is passed by.
        self._heaps: list[list[int]] = [[] for _ in range(free.largest + 1)]
        self.total = free.total

    def give(self, gpus: Iterable[int], owner: Sequence[int]) -> None:
        """Count these as free, too: their jobs are being stopped."""
        for gpu in gpus:
            ids = self._own(owner[gpu])
            insort(ids, gpu)
            heappush(self._heaps[len(ids)], owner[gpu])
            self.total += 1

    def take(self, gpus: Iterable[int], owner: Sequence[int]) -> None:
        """Leave these out."""
        for gpu in gpus:
            ids = self._own(owner[gpu])
            ids.remove(gpu)
            heappush(self._heaps[len(ids)], owner[gpu])
            self.total -= 1

    def place(self, count: int, *, together: bool = False) -> tuple[int, ...] | None:
        """Take `count` GPUs; None where there are too few, or, `together`, too far apart."""
        if count > self.total:
            return None
        node = self.best_fit(count)
        if node is not None:
            return self._grab(((node, count),))
        if together and count <= self._free.largest:
            return None
        nodes = self._spread(count)
        if together and len(nodes) > -(-count // self._free.largest):
            return None
        return self._grab(nodes)

    def count(self, node: int) -> int:
        """How many of a node's GPUs are free."""
        ids = self._changed.get(node)
        return len(self._free.ids[node] if ids is None else ids)

    def has(self, gpu: int, node: int) -> bool:
        """A GPU of a node is free."""
        ids = self._changed.get(node)
        return gpu in (self._free.ids[node] if ids is None else ids)

    def take_all(self) -> list[int]:
        """Take whatever is free."""
        found = [gpu for ids in self._changed.values() for gpu in ids]
        for nodes in self._free.by_count[1:]:
            for node in nodes:
                if node not in self._changed:
                    found += self._free.ids[node]
        self._changed = {node: [] for node in range(len(self._free.ids))}
        self.total = 0
        return found

    def take_from(self, node: int, count: int) -> tuple[int, ...]:
        """Take GPUs of a node that has as many."""
        return self._grab(((node, count),))

    def best_fit(self, count: int, without: Collection[int] = ()) -> int | None:
        """The node with the fewest free GPUs, but `count`; None if no node has as many."""
        for size in range(count, self._free.largest + 1):
            node = self._first(size, without)
            if node is not None:
                return node
        return None

    def _spread(self, count: int) -> list[tuple[int, int]]:
        """The emptiest nodes whole, and the best fit for what is left."""
        found: dict[int, int] = {}
        while count:
            node = self.best_fit(count, found)
            part = count
            if node is None:
                node, part = self._emptiest(found)
            found[node] = part
            count -= part
        return list(found.items())

    def _emptiest(self, without: Collection[int]) -> tuple[int, int]:
        """The node with the most free GPUs, and how many."""
        for size in range(self._free.largest, 0, -1):
            node = self._first(size, without)
            if node is not None:
                return node, size
        raise AssertionError("no GPU is free")

    def _first(self, size: int, without: Collection[int]) -> int | None:
        """The first node with exactly so many free GPUs."""
        changed, heap = self._changed, self._heaps[size]
        while heap and len(changed[heap[0]]) != size:
            heappop(heap)
        best = heap[0] if heap else None
        if best is not None and best in without:
            valid = (n for n in heap if len(changed[n]) == size and n not in without)
            best = min(valid, default=None)
        for node in self._free.by_count[size]:  # in order
            if best is not None and node > best:
                break
            if node not in changed and node not in without:
                return node
        return best

    def _grab(self, parts: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        found: list[int] = []
        for node, count in parts:
            ids = self._own(node)
            found += ids[:count]
            del ids[:count]
            heappush(self._heaps[len(ids)], node)
        self.total -= len(found)
        return tuple(sorted(found))

    def _own(self, node: int) -> list[int]:
        ids = self._changed.get(node)
        if ids is None:
            ids = self._changed[node] = list(self._free.ids[node])
        return ids
