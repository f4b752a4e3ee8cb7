"""Who decodes: the queue, the rows with slots, what they share, and who gives way.

A row is admitted when a place in the batch is free and the caches of target and drafter have room
for its tokens and a tree. When a live row outgrows them later, the youngest row goes back to the
head of the queue: its slots are closed, its tokens and records kept, and when it returns its
tokens are prefilled again, the last one left out as its root. Nobody is admitted from a shortage
until a live row has ended, so that rows do not chase each other out of the cache. A row that does
not fit alone ends with a fault.

Samples of one prompt form a family. Its first row prefills the prompt; the others wait for it,
copy all but the prompt's last token, and run that one for the logits of their own first draw.
"""

from collections import deque
from collections.abc import Collection

from bastion_batch.engine.cache import KVCache
from bastion_batch.engine.drafters import Drafter
from bastion_batch.engine.memory import CacheFull
from bastion_batch.engine.row import Row
from bastion_batch.engine.step import Work
from bastion_batch.records import RowFault, RowKey

TREE_SLACK = 64
"""Tokens of trees that a row has room for from the start, if there is a drafter."""


class Batch:
    """The rows of an engine, waiting and live.

    Args:
        cache: of the target.
        drafter: keeps slots of its own for every live row; None without one.
        max_rows: most live rows.
    """

    def __init__(self, cache: KVCache, drafter: Drafter | None, max_rows: int) -> None:
        self.live: list[Row] = []
        self.num_requeued = 0
        """Times that a row gave way to an older one."""
        self._cache = cache
        self._drafter = drafter
        self._max_rows = max_rows
        self._slack = 1 if drafter is None else 1 + TREE_SLACK
        self._waiting: deque[Row] = deque()
        self._ended: list[Row] = []
        self._is_short = False
        self._families: dict[tuple[int, ...], list[Row]] = {}
        """Live rows by their prompt, the first to be admitted first."""
        self._followers: dict[int, Row] = {}
        """Live rows, by key, that wait for the first of their family."""

    @property
    def num_waiting(self) -> int:
        """Rows without a slot."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a row waits, is live, or has ended and was not yet retired."""
        return bool(self.live or self._waiting or self._ended)

    def queue(self, row: Row) -> None:
        """Let a row wait for its turn; one that has ended already is retired at the next step."""
        (self._ended if row.finish_reason else self._waiting).append(row)

    def admit(self) -> None:
        """Give slots to those who wait longest, as far as places and memory go."""
        while self._waiting and len(self.live) < self._max_rows and not self._is_short:
            row = self._waiting[0]
            try:
                self._open(row)
            except CacheFull as shortage:
                if self.live:
                    self._is_short = True
                    break
                self._end(self._waiting.popleft(), shortage)
                continue
            self._waiting.popleft()
            self._join(row)
        self.share_prompts()

    def num_tokens(self) -> dict[RowKey, int]:
        """Output tokens so far of every row, live or waiting."""
        return {
            (row.request.row_id, row.request.sample_index): len(row.output_ids)
            for row in (*self.live, *self._waiting)
        }

    def decoding(self) -> list[Row]:
        """Live rows whose prompt is in the cache."""
        return [row for row in self.live if not row.is_prefilling]

    def prompt_chunks(self, room: int) -> list[Work]:
        """At most `room` prompt tokens for the coming pass, first come first served."""
        chunks = []
        for row in self.live:
            if room <= 0:
                break
            if not row.is_prefilling or row.key in self._followers:
                continue
            start = row.context_length
            stop = min(row.prefill_end, start + room)
            chunks.append(Work(row, row.token_ids[start:stop], None))
            room -= stop - start
        return chunks

    def make_room(self, works: list[Work]) -> list[Work]:
        """Room in the caches for a pass; returns the works whose rows did not have to give way."""
        for work in works:
            while work.row.slot is not None:
                try:
                    self._reserve(work)
                    break
                except CacheFull as shortage:
                    self._give_way(shortage)
        return [work for work in works if work.row.slot is not None]

    def share_prompts(self) -> None:
        """Copy prompts to the rows that waited for them; call it when a pass was committed."""
        for row in list(self._followers.values()):
            first = self._families[row.request.prompt_ids][0]
            num_tokens = row.num_prompt_tokens - 1
            if first is not row:
                if first.context_length < num_tokens:
                    continue
                assert first.slot is not None
                assert row.slot is not None
                self._cache.share(first.slot, row.slot, num_tokens)
                if self._drafter is not None:
                    self._drafter.share(first.key, row.key, num_tokens)
            del self._followers[row.key]

    def retire(self) -> list[Row]:
        """Close the slots of rows that have ended; returns all that ended since the last call."""
        for row in [row for row in self.live if row.finish_reason is not None]:
            self._leave(row)
            self._ended.append(row)
            self._is_short = False
        ended, self._ended = self._ended, []
        return ended

    def take(self, row_id: str, sample_index: int) -> Row | None:
        """Take a row out, waiting or live; None if there is none."""
        wanted = (row_id, sample_index)
        for row in (*self.live, *self._waiting):
            if (row.request.row_id, row.request.sample_index) == wanted:
                self._drop(row)
                return row
        return None

    def drop(self, keys: Collection[int]) -> None:
        """Take out the rows of some keys, those that are still here."""
        for row in (*self.live, *self._waiting):
            if row.key in keys:
                self._drop(row)

    def trim(self) -> None:
        """Give back what the caches hold beyond their slots."""
        for cache in (self._cache, *(self._drafter.caches if self._drafter else ())):
            cache.trim()

    def check(self) -> None:
        """Assert that rows, families and caches agree."""
        self._cache.check()
        assert self._cache.num_open == len(self.live)
        for cache in self._drafter.caches if self._drafter else ():
            cache.check()
        for row in self.live:
            assert row.slot is not None
            assert row.context_length <= row.prefill_end
            assert row in self._families[row.request.prompt_ids]
        assert sum(map(len, self._families.values())) == len(self.live)
        assert all(row.slot is None for row in self._waiting)
        assert self._followers.keys() <= {row.key for row in self.live}

    # Slots

    def _open(self, row: Row) -> None:
        num_tokens = len(row.token_ids)
        row.slot = self._cache.open(num_tokens + self._slack)
        if self._drafter is None:
            return
        try:
            self._drafter.reserve(row.key, num_tokens)
        except CacheFull:
            self._close(row)
            raise

    def _reserve(self, work: Work) -> None:
        row, tree = work.row, work.tree
        assert row.slot is not None
        self._cache.reserve(row.slot, len(work.token_ids))
        if self._drafter is not None:
            most_kept = len(work.token_ids) if tree is None else 1 + max(tree.depths)
            self._drafter.reserve(row.key, most_kept)

    def _close(self, row: Row) -> None:
        assert row.slot is not None
        self._cache.close(row.slot)
        row.slot = None
        if self._drafter is not None:
            self._drafter.forget(row.key)

    # Comings and goings

    def _join(self, row: Row) -> None:
        self.live.append(row)
        family = self._families.setdefault(row.request.prompt_ids, [])
        family.append(row)
        if len(family) > 1 and row.num_prompt_tokens > 1:
            self._followers[row.key] = row

    def _leave(self, row: Row) -> None:
        self._close(row)
        self.live.remove(row)
        self._followers.pop(row.key, None)
        family = self._families[row.request.prompt_ids]
        family.remove(row)
        if not family:
            del self._families[row.request.prompt_ids]

    def _drop(self, row: Row) -> None:
        if row.slot is None:
            self._waiting.remove(row)
        else:
            self._leave(row)
            self._is_short = False

    def _give_way(self, shortage: CacheFull) -> None:
        """The row that was added last leaves: to the head of the queue, or for good if alone."""
        youngest = max(self.live, key=lambda row: row.key)
        self._leave(youngest)
        if not self.live:
            self._end(youngest, shortage)
            return
        self._waiting.appendleft(youngest)
        self._is_short = True
        self.num_requeued += 1

    def _end(self, row: Row, shortage: CacheFull) -> None:
        message = f"row of {len(row.token_ids)} tokens does not fit alone: {shortage}"
        row.fail(RowFault("out_of_memory", message))
        self._ended.append(row)
        self._is_short = False
