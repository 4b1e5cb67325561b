"""What a chaos run found: rounds, faults survived, planted faults found, memory."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.arena import Arena

GROWTH = 1.1
LOG_LINES = 60


@dataclass(frozen=True, slots=True)
class Round:
    """One round; it counts where each of its faults hit something."""

    name: str
    faults: Sequence[str]
    hits: Sequence[bool]
    broken: Sequence[str]
    seconds: float
    load: str

    @property
    def counts(self) -> bool:
        """Whether every fault hit what it was meant to hit."""
        return bool(self.faults) and all(self.hits)


@dataclass(slots=True)
class Report:
    """All rounds; ``ok`` where the sound product kept every promise and each planted fault was found."""

    seed: int
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    memory: list[dict[str, int]] = field(default_factory=list)
    grown: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    """Planted faults that showed without chaos: finding them proves nothing."""

    def add(self, planted: str, result: Round) -> None:
        """Take a round and say it."""
        self.rounds.setdefault(planted, []).append(result)
        state = "; ".join(result.broken) if result.broken else "held" if result.counts else "held, hit nothing"
        print(f"{result.name}: {', '.join(result.faults)}: {state} ({result.seconds:.0f} s; {result.load})", flush=True)

    def add_plain(self, planted: str, result: Round) -> None:
        """Take the round without chaos that a planted fault has to pass unseen."""
        print(f"{result.name}: no fault: {'; '.join(result.broken) or 'held'} ({result.seconds:.0f} s)", flush=True)
        if result.broken:
            self.plain.append(planted)

    def add_calm(self, result: Round, rss_bytes: dict[str, int]) -> None:
        """Take a round without a fault, and each process' memory after it."""
        self.add("", result)
        self.memory.append(rss_bytes)
        if len(self.memory) > 1:
            first = self.memory[0]
            self.grown = [
                f"{name} grew from {first[name] >> 20} to {now >> 20} MiB"
                for name, now in rss_bytes.items()
                if now > GROWTH * first[name]
            ]

    def counted(self, planted: str) -> int:
        """Return how many rounds of the sound product (or with a planted fault) counted so far."""
        return sum(one.counts for one in self.rounds.get(planted, ()))

    def keep_logs(self, arena: "Arena", planted: str, number: int) -> None:
        """Keep the logs' ends of a round that broke something: the stack's folder goes away."""
        if planted:
            return
        for path in sorted((arena.stack.home / "logs").glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
            sys.stderr.write(f"--- {path.name} after round {number}\n" + "\n".join(lines) + "\n")

    @property
    def broken(self) -> list[str]:
        """What the sound product broke."""
        return [f"{one.name}: {sentence}" for one in self.rounds.get("", ()) for sentence in one.broken] + self.grown

    @property
    def missed(self) -> list[str]:
        """Planted faults that no round found."""
        unseen = [name for name, found in self.rounds.items() if name and not any(one.broken for one in found)]
        return unseen + self.plain

    @property
    def ok(self) -> bool:
        """Whether everything holds that should, and nothing that should not."""
        return not self.broken and not self.missed

    def lines(self) -> list[str]:
        """Return the table of what was survived and found."""
        survived = Counter(
            f for one in self.rounds.get("", ()) for f, hit in zip(one.faults, one.hits, strict=True) if hit
        )
        lines = [f"chaos: seed {self.seed}", "| fault | times it hit and was survived |", "|---|---|"]
        lines += [f"| {fault} | {times} |" for fault, times in sorted(survived.items())]
        if any(self.rounds):
            lines += ["", "| planted fault | found in round | by |", "|---|---|---|"]
        for name, found in self.rounds.items():
            if name:
                at = next((n for n, one in enumerate(found, 1) if one.broken), None)
                by = found[at - 1].broken[0] if at else "not found"
                lines.append(f"| {name} | {at or '-'} | {by[:120]} |")
        lines += [
            f"memory after a calm round, MiB: {', '.join(f'{k} {v >> 20}' for k, v in m.items())}" for m in self.memory
        ]
        lines += [f"broken: {sentence}" for sentence in self.broken]
        counted = self.counted("")
        lines.append(
            f"chaos: {'ok' if self.ok else 'failed'} {counted} rounds counted of {len(self.rounds.get('', ()))}"
        )
        return lines
