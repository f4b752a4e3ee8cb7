"""A worker's dealings with the others: rows of its units that are away, and guests of theirs.

The owner of a unit alone decides where its rows are decoded, and it alone takes outcomes. Every
handler here may run twice, or for something long past: mail that names an epoch other than the
unit's is dropped and counted, and the rest is judged by where the row is now.

Nobody waits for an answer. What was lost on the way comes again when the owner asks, which it
does when it takes a unit over and every so often while rows are away; who is gone for good, the
coordinator says.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from bastion_batch.cluster.guests import Guests
from bastion_batch.cluster.links import Link
from bastion_batch.cluster.live_rows import Finished, LiveRows, Refusal
from bastion_batch.cluster.mail import Ack, Ask, Holding, Mail, Outcomes, Recall, Returned, Task
from bastion_batch.cluster.messages import Directions, InFlight, Ownership
from bastion_batch.cluster.open_unit import OpenUnit
from bastion_batch.cluster.waiting import MAX_RENDERED_PER_STEP, WaitingRows
from bastion_batch.core.lengths import RowFacts
from bastion_batch.core.orders import RowMove, Share
from bastion_batch.io.journal import Entry, Saved
from bastion_batch.records import Outcome, Prefix, RowFault, RowKey

ASK_SECONDS = 10.0
"""How long an owner waits for rows that are away before it asks after them."""


class Exchange:
    """Owned and borrowed rows of one attempt, and the mail about them."""

    def __init__(
        self, attempt: int, link: Link, live: LiveRows, clock: Callable[[], float]
    ) -> None:
        self.open: dict[int, OpenUnit] = {}
        """The units that this worker owns, oldest first."""
        self.waiting = WaitingRows(self.open)
        self.guests = Guests()
        self.num_dropped = 0
        """Mail dropped because its sender or its reader is no longer the one it was for."""
        self._attempt = attempt
        self._link = link
        self._live = live
        self._clock = clock
        self._asked_at: dict[int, float] = {}
        self._shares: deque[Share] = deque()

    # As an owner

    def take_over(self, unit: OpenUnit) -> None:
        """Own a unit; ask for the rows of it that others had for an earlier owner."""
        number = unit.number
        guest = self.guests.pop(number)
        self.open[number] = unit
        for row_id, sample_index, attempt in unit.lease.held:
            if attempt != self._attempt:
                unit.places.send_away((row_id, sample_index), attempt)
        for key in self._live.of_unit(number):
            if key not in unit.places:
                self._live.drop(key)
            else:
                unit.places.adopt(key)
        if guest is not None:
            for outcome in guest.kept.values():
                unit.add(outcome)
            for row in guest.waiting.values():
                unit.places.put_back(row)
        self._ask(unit)

    def ask_after_absent(self) -> None:
        """Ask for rows of which nothing has been heard for long."""
        for unit in self.open.values():
            if self._clock() - self._asked_at[unit.number] >= ASK_SECONDS:
                self._ask(unit)

    def acknowledge(self, unit: OpenUnit, *, committed: bool = False) -> None:
        """Tell those who keep outcomes of the unit which ones they need not keep any longer."""
        for sender, keys in unit.acknowledged(committed=committed).items():
            self._link.send(sender, Ack(unit.number, tuple(keys)))

    def close(self, unit: OpenUnit) -> None:
        """The unit is committed."""
        self.acknowledge(unit, committed=True)
        self._live.drop_unit(unit.number)
        del self.open[unit.number]
        del self._asked_at[unit.number]

    def _ask(self, unit: OpenUnit) -> None:
        self._asked_at[unit.number] = self._clock()
        for attempt in sorted(set(unit.places.away.values())):
            self._link.send(attempt, Ask(unit.number, unit.lease.epoch, self._attempt))

    def _send(self, unit: OpenUnit, row: Prefix, to: int) -> None:
        unit.places.remember(row)
        unit.places.send_away(row.key, to)
        facts = unit.facts(row.key)
        self._link.send(to, Task(unit.number, unit.lease.epoch, self._attempt, row, facts))

    def serve_shares(self) -> None:
        """Give waiting rows to others, no more than may be tokenised between two steps."""
        room = MAX_RENDERED_PER_STEP
        while self._shares and room:
            share = self._shares.popleft()
            num_now = min(share.num_rows, room)
            for unit, row in self.waiting.for_other(num_now):
                if row is not None:
                    self._place(unit, row, share.to)
            room -= num_now
            if num_now < share.num_rows:
                self._shares.appendleft(share._replace(num_rows=share.num_rows - num_now))

    def _move(self, move: RowMove) -> None:
        unit, key = self.open.get(move.unit), move.key
        if unit is None or not unit.places.is_movable(key):
            return
        if key in unit.places.away:
            if unit.places.away[key] != move.to:
                unit.places.destinations[key] = move.to
                recall = Recall(unit.number, unit.lease.epoch, (key,))
                self._link.send(unit.places.away[key], recall)
            return
        if key in self._live:
            row = None if move.to == self._attempt else self._live.export(key)
        else:
            row = unit.take(key)
        if row is not None:
            self._place(unit, row, move.to)

    def _place(self, unit: OpenUnit, row: Prefix, to: int) -> None:
        if to == self._attempt:
            unit.places.put_back(row)
        else:
            self._send(unit, row, to)

    # As either

    def settle(self, results: Iterable[Finished | Refusal]) -> None:
        """Hand on what the engine came to."""
        for result in results:
            match result:
                case Finished(unit, outcome, _) if unit in self.open:
                    self._take(self.open[unit], outcome)
                case Refusal(unit, row, fault) if unit in self.open:
                    self.open[unit].places.refuse(row, self._attempt, fault)
                case Finished(unit, outcome, _) if unit in self.guests:
                    self.guests[unit].kept[outcome.key] = outcome
                    self._send_outcomes(unit, (outcome,))
                case Refusal(unit, row, fault) if unit in self.guests:
                    self._return(unit, (row,), fault)
                    self.guests.release(unit, [row.key])

    def follow(self, directions: Directions) -> None:
        """Do what the coordinator's answer to a report calls for."""
        for unit in self.open.values():
            gone = [key for key, at in unit.places.away.items() if at in directions.lost]
            unit.places.lose(gone)
        for ownership in directions.owners:
            if ownership.attempt != self._attempt:  # its own comes with the lease
                self._give_up_if_older(ownership)
                self._rebind(ownership)
        for number in directions.released:
            self._forget(number)
        self.waiting.follow(directions.orders)
        for move in directions.orders.moves:
            self._move(move)
        self._shares.extend(directions.orders.shares)
        for row in directions.hopeless:
            unit = self.open.get(row.unit)
            if unit is not None and unit.places.only_parked_left:  # a worker may yet come
                unit.give_up((row.row_id, row.sample_index))

    def receive(self, mail: Mail) -> None:
        """Take in what another worker sent."""
        match mail:
            case Task():
                self._accept(mail)
            case Ask():
                self._rebind(Ownership(mail.unit, mail.epoch, mail.owner))
            case Recall():
                self._give_back(mail)
            case Ack():
                self.guests.forget(mail.unit, mail.keys)
            case Outcomes() | Returned() | Holding():
                unit = self.open.get(mail.unit)
                if unit is None or unit.lease.epoch != mail.epoch:
                    self.num_dropped += 1
                else:
                    self._take_news(unit, mail)

    def _take_news(self, unit: OpenUnit, mail: Outcomes | Returned | Holding) -> None:
        match mail:
            case Outcomes():
                for outcome in mail.outcomes:
                    self._take(unit, outcome, mail.sender)
                    self._live.drop(outcome.key)
                self.acknowledge(unit)
            case Returned():
                for row in mail.rows:
                    self._take_back(unit, row, mail)
            case Holding():
                away = [key for key, at in unit.places.away.items() if at == mail.sender]
                unit.places.lose(key for key in away if key not in mail.keys)
                for key in mail.keys:
                    if key not in self._live:
                        unit.places.send_away(key, mail.sender)

    def _take(self, unit: OpenUnit, outcome: Outcome, sender: int | None = None) -> None:
        if unit.add(outcome, sender):
            self.waiting.learn_from(unit, outcome)

    def _take_back(self, unit: OpenUnit, row: Prefix, mail: Returned) -> None:
        if unit.places.away.get(row.key) != mail.sender:
            return  # it is elsewhere already, or has ended
        destination = unit.places.destinations.get(row.key, self._attempt)
        if mail.refusal is not None:
            unit.places.refuse(row, mail.sender, mail.refusal)
        else:
            self._place(unit, row, destination)

    def _give_up_if_older(self, now: Ownership) -> None:
        """Go on as a decoder of a unit that was taken from this worker, if it was."""
        unit = self.open.get(now.unit)
        if unit is None or unit.lease.epoch >= now.epoch:
            return
        del self.open[now.unit]
        del self._asked_at[now.unit]
        self.guests.bind(*now)
        guest = self.guests[now.unit]
        guest.kept = {outcome.key: outcome for outcome in unit.unsafe_outcomes()}
        guest.facts = {key: unit.facts(key) for key in self._live.of_unit(now.unit)}

    def _forget(self, number: int) -> None:
        """A unit is committed, by whomever."""
        self.guests.pop(number)
        self._live.drop_unit(number)
        if self.open.pop(number, None) is not None:
            del self._asked_at[number]

    # As a decoder

    def leave(self) -> list[Entry]:
        """Take every row out of the engine; guests go back. What is known of all of them."""
        for number, guest in self.guests.items():
            rows = [*self._exported(self._live.of_unit(number)), *guest.waiting.values()]
            guest.waiting = {row.key: row for row in rows}
            self._return(number, tuple(rows), None)
        for unit in self.open.values():
            for row in self._exported(self._live.of_unit(unit.number)):
                unit.places.put_back(row)
        return [*self._prefixes()]

    def guests_to_journal(self) -> list[Entry]:
        """Outcomes that their owners have not yet safe."""
        return [
            Entry(number, key, outcome)
            for number, guest in self.guests.items()
            for key, outcome in guest.kept.items()
        ]

    def _prefixes(self) -> Iterator[Entry]:
        for unit in self.open.values():
            yield from unit.prefixes_to_journal()
        for number, guest in self.guests.items():
            for key, row in guest.waiting.items():
                if row.num_tokens:
                    yield Entry(number, key, Saved.of(row))

    def _exported(self, keys: Iterable[RowKey]) -> Iterator[Prefix]:
        rows = (self._live.export(key) for key in keys)
        return (row for row in rows if row is not None)

    def _accept(self, task: Task) -> None:
        if task.unit in self.open or not self.guests.bind(task.unit, task.epoch, task.owner):
            self.num_dropped += 1
        elif task.row.key not in self._live and not self.guests.accept(task):
            kept = self.guests[task.unit].kept.get(task.row.key)
            self._send_outcomes(task.unit, (kept,) if kept else ())

    def _rebind(self, now: Ownership) -> None:
        """A unit has this owner: tell it everything that there is of the unit here."""
        unit, epoch, owner = now
        if unit in self.open or not self.guests.bind(unit, epoch, owner):
            self.num_dropped += 1
            return
        guest = self.guests[unit]
        self._send_outcomes(unit, tuple(guest.kept.values()))
        keys = (*self._live.of_unit(unit), *guest.waiting)
        self._link.send(owner, Holding(unit, epoch, self._attempt, keys))

    def _give_back(self, recall: Recall) -> None:
        if recall.unit not in self.guests or self.guests[recall.unit].epoch != recall.epoch:
            self.num_dropped += 1
            return
        waiting = self.guests[recall.unit].waiting
        rows = [waiting.pop(key) for key in recall.keys if key in waiting]
        live = [key for key in recall.keys if key in self._live]
        rows += self._exported(live)
        self._return(recall.unit, rows, None)
        self.guests.release(recall.unit, [row.key for row in rows])

    def _send_outcomes(self, unit: int, outcomes: Sequence[Outcome]) -> None:
        guest = self.guests[unit]
        if outcomes:
            mail = Outcomes(unit, guest.epoch, self._attempt, tuple(outcomes))
            self._link.send(guest.owner, mail)

    def _return(self, unit: int, rows: Sequence[Prefix], refusal: RowFault | None) -> None:
        guest = self.guests[unit]
        if rows:
            mail = Returned(unit, guest.epoch, self._attempt, tuple(rows), refusal)
            self._link.send(guest.owner, mail)

    # For reports

    def in_flight(self) -> Iterator[InFlight]:
        """The rows that this worker has: live first, then waiting guests and kept outcomes."""
        for number, row, facts, num_tokens in self._live.rows():
            epoch = self._epoch(number)
            if epoch is not None:
                yield _in_flight(number, epoch, row, facts, num_tokens, live=True)
        for number, guest in self.guests.items():
            for key, row in guest.waiting.items():
                facts = guest.facts[key]
                yield _in_flight(number, guest.epoch, row, facts, row.num_tokens, live=False)
            for key, outcome in guest.kept.items():
                num_tokens = outcome.completion.num_output_tokens
                yield InFlight(*key, number, guest.epoch, num_tokens, live=False)

    def _epoch(self, unit: int) -> int | None:
        if unit in self.open:
            return self.open[unit].lease.epoch
        return self.guests[unit].epoch if unit in self.guests else None


def _in_flight(
    unit: int, epoch: int, row: Prefix, facts: RowFacts, num_tokens: int, *, live: bool
) -> InFlight:
    num_prompt_tokens = len(row.exported.request.prompt_ids)
    return InFlight(*row.key, unit, epoch, num_tokens, live, num_prompt_tokens, facts)
