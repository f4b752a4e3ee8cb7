"""What befalls a cluster."""

from bastion_batch.cluster.coordinator import Coordinator
from simulation.cluster import Cluster, Life, Member
from simulation.settings import Settings
from simulation.world import Process

HORIZON_SECONDS = 12.0
"""Accidents happen in this time, times the scale."""
MAX_OWNERS_KILLED = 3


class Accidents:
    """Everything that may happen to one cluster; each method is one accident."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        """Plan the accidents of a schedule."""
        self._cluster = cluster
        self._world = cluster.world
        self._random = cluster.world.random
        self._settings = settings
        self._num_owners_to_kill = MAX_OWNERS_KILLED
        cluster.storage.on_hold = self.forget_held
        kinds = [
            *[self.kill_worker] * 4,
            *[self.forsake_worker] * 6,
            *[self.dismiss_worker] * 2,
            *[self.kill_driver] * 2,
            *[self.stop_driver] * 2,
            self.take_over,
        ]
        drawn = [self._random.choice(kinds) for _ in range(settings.num_accidents)]
        drawn += [self.move_row] * settings.num_moves
        doubts = [self.take_unit_back, self.think_sick]
        drawn += [self._random.choice(doubts) for _ in range(settings.num_doubts)]
        drawn += [self.kill_owner] * (0 if settings.kill_owners_at is None else 60)
        for accident in drawn:
            self._world.at(self._random.uniform(0.0, settings.scale * HORIZON_SECONDS), accident)

    def kill_driver(self) -> None:
        """The process, the coordinator in it, and a little later everything it started."""
        for life in self._cluster.lives:
            life.process.kill()

    def kill_worker(self) -> None:
        """One that runs."""
        members = self._members()
        if members:
            self._random.choice(members).process.kill()

    def forsake_worker(self) -> None:
        """Its driver believes that it is dead; it goes on, and dies later."""
        members = self._members()
        if members:
            self._forsake(self._random.choice(members))

    def dismiss_worker(self) -> None:
        """It is told to leave, and its machine goes away a little later."""
        members = self._members()
        if members:
            member = self._random.choice(members)
            self._world.note(member.process.name, "is told to leave")
            member.life.leaving.add(member.attempt)
            _coordinator(member.life).dismiss(member.attempt)
            self._world.at(self._world.later(6.0), member.process.kill)

    def stop_driver(self) -> None:
        """It has its workers journal, waits for them a little, and ends."""
        for life in self._cluster.lives:
            if life.process.alive and life.coordinator is not None and life.ends_at is None:
                self._world.note(life.process.name, "is told to end")
                life.coordinator.drain()
                life.ends_at = self._world.now + self._random.choice([0.5, 3.0, 60.0])

    def take_over(self) -> None:
        """A second driver starts, while the first still works."""
        if not self._cluster.done:
            self._cluster.start_driver()

    def move_row(self) -> None:
        """A row of an open unit goes on in another engine, or back home."""
        members = self._members()
        units = [(m.life, row.unit) for m in members for row in m.life.rows.get(m.attempt, ())]
        if units:
            life, unit = self._random.choice(units)
            row_id, sample_index = self._random.choice(self._cluster.rows_of(unit))
            to = self._random.choice([m.attempt for m in members if m.life is life])
            assert life.balance is not None
            life.balance.force(unit, (row_id, sample_index), to)
            self._world.note("balance", f"{row_id}/{sample_index} to {to}")

    def take_unit_back(self) -> None:
        """An owner that works loses a unit to another, or to itself."""
        owned = [
            (m.life, row.unit) for m in self._members() for row in m.life.rows.get(m.attempt, ())
        ]
        if owned:
            life, unit = self._random.choice(owned)
            assert life.balance is not None
            life.balance.force_back(unit)
            self._world.note("balance", f"unit {unit} is taken back")

    def think_sick(self) -> None:
        """For a while a worker that works is believed to be sick, and its guests go elsewhere."""
        members = self._members()
        if members:
            member = self._random.choice(members)
            balance = member.life.balance
            assert balance is not None
            balance.sick_workers |= {member.attempt}

            def recover() -> None:
                balance.sick_workers -= {member.attempt}

            self._world.note("balance", f"{member.attempt} seems sick")
            self._world.at(self._world.later(3.0), recover)

    def kill_owner(self) -> None:
        """One whose rows others have, and that has acknowledged none, one or more of a unit."""
        living = {member.attempt: member.process for member in self._members()}
        for owner in list(self._cluster.post.owners_of_absent()):
            wanted = owner.num_acknowledged == self._settings.kill_owners_at
            if wanted and owner.attempt in living and self._num_owners_to_kill:
                self._num_owners_to_kill -= 1
                living.pop(owner.attempt).kill()

    def forget_held(self, process: Process) -> None:
        """A process that is held up in a commit is given up, or loses its driver."""
        what = self._random.random()
        if what < self._settings.forsake_rate:
            for member in self._members():
                if member.process is process:
                    self._forsake(member)
        elif what < self._settings.forsake_rate + self._settings.orphan_rate:
            self._world.at(self._world.later(1.0), self.kill_driver)

    def _forsake(self, member: Member) -> None:
        self._world.note(member.process.name, "is taken for dead")
        self._cluster.tell_end(member)
        lasting = self._random.choice([10.0, 100.0])
        self._world.at(self._world.later(lasting), member.process.kill)

    def _members(self) -> list[Member]:
        return self._cluster.members()


def _coordinator(life: Life) -> Coordinator:
    assert life.coordinator is not None
    return life.coordinator
