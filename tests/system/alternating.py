"""Sends requests to models that do not fit into memory together, and checks every answer and waiting time:
`python -m tests.system.alternating --rounds 20`.

The checkpoints answer with different tokens. The service may use the memory of only one model, so it swaps
the models while requests wait.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from appliance.actions.parameters import AddModel
from appliance.client import AdminClient
from appliance.models.fit import host_bytes, read_memory
from appliance.models.residency import DRAIN_S, MIN_SERVICE_S
from appliance.settings import ModelSettings
from appliance.settings.fields import OnDemandSettings
from tests.checkpoints import write_constant_checkpoint
from tests.system.service import CALL_TIMEOUT_S, Service, service

MODELS = {"a": 100, "b": 200, "c": 300}
"""The token that each model generates."""
SETTINGS = {"kv_blocks": 100, "threads": 1, "max_num_seqs": 16}
MIN_RESIDENCE_S = 4.0
"""`on_demand.min_residence_s` in the tests. A short value keeps the tests short."""
SLACK_S = 10.0
"""Allowance, in seconds, for a drain and a second swap. A request waits at most as long as the minimum
residence, one swap and this allowance together."""
WITHIN_S = 180.0


class Answered(NamedTuple):
    """The times and tokens of one answer."""

    model: str
    begun_at: float
    """Unix time."""
    first_token_s: float
    tokens: int


class Alternating:
    """A service with three models but memory for only one."""

    def __init__(self, running: Service, folder: Path, min_residence_s: float = MIN_RESIDENCE_S) -> None:
        self.running = running
        self.min_residence_s = min_residence_s
        self.answers: list[Answered] = []
        self.failures: list[str] = []
        for name, checkpoint in checkpoints(folder).items():
            self.running.act(AddModel(name=name, folder=str(checkpoint), settings=SETTINGS))

    def ask(self, model: str, max_tokens: int = 24) -> None:
        """Send one request, and record its answer or its failure."""
        begun_at, began, first_s, tokens = time.time(), time.monotonic(), 0.0, list[int]()
        try:
            with self.running.client(timeout=WITHIN_S) as client:
                for chunk in client.completions.create(
                    model=model,
                    prompt="import ",
                    max_tokens=max_tokens,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                ):
                    for choice in chunk.choices:
                        tokens += (choice.model_extra or {}).get("token_ids") or ()
                        first_s = first_s or time.monotonic() - began
        except Exception as error:
            self.failures.append(f"{model}: {type(error).__name__}: {error}")
            return
        if tokens != [MODELS[model]] * max_tokens:
            self.failures.append(f"{model} answered with the tokens {tokens}")
        self.answers.append(Answered(model, begun_at, first_s, len(tokens)))

    def run(self, clients: dict[str, int], for_s: float, swaps: int = 0, pause_s: float = 0.0) -> float:
        """Run the given number of clients per model for `for_s` seconds, and until there have been `swaps`
        loads. Each client sends a request `pause_s` seconds after each answer. Return the time until the last
        answer, in seconds."""
        began, first = time.monotonic(), self.loads

        def send(model: str) -> None:
            while not self.failures and (time.monotonic() < began + for_s or self.loads < first + swaps):
                self.ask(model)
                time.sleep(pause_s)

        self.in_parallel([partial(send, name) for name, count in clients.items() for _ in range(count)])
        return time.monotonic() - began

    def send_in_order(self, pattern: str, every_s: float) -> None:
        """Send one request for each letter of `pattern`, one every `every_s` seconds, without waiting for
        answers. The letter is the name of the model."""
        began = time.monotonic()

        def send(number: int) -> None:
            time.sleep(max(0.0, began + every_s * number - time.monotonic()))
            self.ask(pattern[number])

        self.in_parallel([partial(send, number) for number in range(len(pattern))])

    def in_parallel(self, calls: list[Callable[[], object]]) -> None:
        """Call the functions in parallel threads, and wait until all have returned."""
        threads = [threading.Thread(target=call, daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)

    def count(self, metric: str) -> dict[str, float]:
        """Return the values of a metric, summed by model."""
        families = text_string_to_metric_families(self.running.metrics())
        found: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name == metric:
                name = sample.labels["model"].partition("@")[0]
                found[name] = found.get(name, 0.0) + sample.value
        return found

    @property
    def loads(self) -> int:
        """Number of on-demand loads so far."""
        return int(sum(self.count("appliance_model_demand_loads_total").values()))

    def loads_s(self) -> list[float]:
        """Return the durations of all on-demand loads so far, in seconds."""
        times = re.findall(r"was ready after ([0-9.]+) s", self.running.log_path.read_text())
        return list(map(float, times))

    def swap_s(self) -> float:
        """Return the duration of the longest on-demand load so far, in seconds."""
        return max(self.loads_s())

    def most_loads(self, first: int) -> int:
        """Return the largest number of loads that ended while one of the requests from number `first` on
        waited for its first token."""
        times = re.findall(r"^(\S+)Z .*was ready after ", self.running.log_path.read_text(), re.MULTILINE)
        ended = [datetime.fromisoformat(f"{at}+00:00").timestamp() for at in times]
        return max(
            sum(one.begun_at <= at <= one.begun_at + one.first_token_s for at in ended)
            for one in self.answers[first:]
        )

    def in_memory(self) -> set[str]:
        """Return the models that are in memory."""
        with AdminClient(self.running.run_dir, CALL_TIMEOUT_S) as client:
            return {model.name for model in client.models() if model.versions[0].replicas}

    def check(self, first: int = 0, models: int = 2) -> None:
        """Check that no request has failed, and that the requests from number `first` on waited no longer
        than allowed when `models` models compete for the memory."""
        assert not self.failures, self.failures[:5]
        longest = max(answer.first_token_s for answer in self.answers[first:])
        bound_s = self.bound_s(models)
        assert longest <= bound_s, (longest, bound_s, self.swap_s())

    def bound_s(self, models: int) -> float:
        """Return the longest time that a request may wait when `models` models compete for the memory.
        `SLACK_S` covers the drain, the exit of the replica's processes and further swaps, but a slow machine
        gets more slack if its swaps take longer."""
        slack_s = max(SLACK_S, DRAIN_S + 2 * self.swap_s())
        more_swaps_s = (models - 2) * (self.swap_s() + MIN_SERVICE_S)
        return self.min_residence_s + self.swap_s() + max(slack_s, more_swaps_s + slack_s / 2)


def checkpoints(folder: Path) -> dict[str, Path]:
    """Write one checkpoint for each model."""
    return {
        name: write_constant_checkpoint(folder / f"checkpoint-{name}", token)
        for name, token in MODELS.items()
    }


def memory_gb(folder: Path, models: float) -> float:
    """Return the memory that `count` of the models need, as a value for `on_demand.memory_gb`."""
    checkpoint = write_constant_checkpoint(folder / "measured", 1)
    settings = ModelSettings(folder=str(checkpoint), device="cpu", **SETTINGS)
    return models * host_bytes(settings, read_memory()) / 1e9


@contextmanager
def alternating(
    folder: Path, capacity: float = 1.5, more: str = "", min_residence_s: float = MIN_RESIDENCE_S
) -> Iterator[Alternating]:
    """Run a service that has enough memory for `capacity` models at a time. `more` is appended to its
    settings."""
    config = folder / "appliance.toml"
    config.write_text(
        # The service must not kill a process that a test has stopped.
        "fronts = 2\nhang_timeout_s = 600\n[models]\n[on_demand]\nmemory_gb = "
        f"{memory_gb(folder, capacity)}\nmin_residence_s = {min_residence_s}\n{more}"
    )
    with service("--config", str(config), "--device", "cpu") as running:
        yield Alternating(running, folder, min_residence_s)


def measure_alone(world: Alternating) -> dict[str, float]:
    """Return each model's answers per second while that model has the memory for itself."""
    rates = {}
    for name in MODELS:
        world.ask(name)
        first = len(world.answers)
        took_s = world.run({name: 4}, 10.0)
        rates[name] = (len(world.answers) - first) / took_s
    return rates


def compared(
    world: Alternating, first: int, took_s: float, rates: dict[str, float], sent_s: float, loaded: set[str]
) -> str:
    """Compare the throughput of the answers from number `first` on, which took `took_s` seconds, with that of
    an ideal order of requests. Return the comparison as text. The ideal order serves all requests of a model
    together, so it loads each model that is not in `loaded` once, in the mean duration of a load. It does not
    end before `sent_s`, when the last request was sent."""
    names = [answer.model for answer in world.answers[first:]]
    answers_s = sum(names.count(name) / rates[name] for name in set(names))
    ideal_s = max(sent_s, answers_s + len(set(names) - loaded) * statistics.mean(world.loads_s()))
    longest = max(answer.first_token_s for answer in world.answers[first:])
    return (
        f"{len(names)} answers in {took_s:.1f} s, {ideal_s / took_s:.0%} of the ideal order's "
        f"throughput, longest load {world.swap_s():.1f} s, longest wait {longest:.1f} s (minimum residence + "
        f"one swap + 10 s = {world.min_residence_s + world.swap_s() + SLACK_S:.1f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20, help="times that the pattern A B A A C is sent")
    parser.add_argument("--seconds", type=float, default=120.0, help="duration of the alternating load")
    parser.add_argument("--min-residence", type=float, default=OnDemandSettings().min_residence_s)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        alternating(Path(folder), min_residence_s=given.min_residence) as world,
    ):
        rates = measure_alone(world)
        first, loads, loaded = len(world.answers), world.loads, world.in_memory()
        took_s = world.run({"a": 4, "b": 4}, given.seconds)
        per_minute = 60 * (world.loads - loads) / took_s
        measurements = compared(world, first, took_s, rates, 0.0, loaded)
        print(f"two busy models: {measurements}, {per_minute:.1f} loads per minute")
        world.check(first)
        for every_s in (0.5, 0.0):
            first, loads, loaded = len(world.answers), world.loads, world.in_memory()
            began = time.monotonic()
            world.send_in_order("abaac" * given.rounds, every_s=every_s)
            took_s, sent_s = time.monotonic() - began, every_s * 5 * given.rounds
            measurements = compared(world, first, took_s, rates, sent_s, loaded)
            print(
                f"{given.rounds} × A B A A C, a request every {every_s} s: {measurements}, "
                f"{world.loads - loads} loads instead of {4 * given.rounds} in the order of arrival"
            )
            world.check(first, len(MODELS))


if __name__ == "__main__":
    main()
