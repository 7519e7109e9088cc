"""`pytest bench` measures; `pytest bench --gate` compares and fails. docs/gates.md says how to read either."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Two compute threads, the read lanes and the tests share few cores: waiting threads sleep instead of spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from bench.gates import gate, native
from bench.gates.expect import Counts, Expectations

KINDS = ("ratio", "exact", "instructions")
FAULTS = ("extra-read", "dropped-hit", "wrong-draft", "allocation", "call", "instructions")

Compare = Callable[[str, gate.Side, gate.Side], None]
Exact = Callable[[str, Counts], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gates", "regression gates (docs/gates.md)")
    group.addoption("--gate", action="store_true", help="compare and fail on a breach, instead of measuring")
    group.addoption("--short", action="store_true", help="with --gate: fewer rounds, as a change is checked")
    group.addoption("--rebase", action="store_true", help="with --gate: write expected.json anew and show the changes")
    group.addoption(
        "--plant",
        action="append",
        default=[],
        metavar="WHAT",
        help="with --gate: plant a fault, to show that a gate fails: GATE=FACTOR slows one ratio gate down; "
        + ", ".join(FAULTS),
    )


def pytest_configure(config: pytest.Config) -> None:
    for option in ("--short", "--rebase", "--plant"):
        if config.getoption(option) and not config.getoption("--gate"):
            raise pytest.UsageError(f"{option} goes with --gate")
    for what in config.getoption("--plant"):
        name, _, factor = what.partition("=")
        if what in FAULTS or (name in gate.read_limits() and _is_factor(factor)):
            continue
        raise pytest.UsageError(f"--plant {what}: give GATE=FACTOR with a gate of gates.toml, or {', '.join(FAULTS)}")
    if config.getoption("--rebase") and config.getoption("--plant"):
        raise pytest.UsageError("--rebase would commit what --plant breaks: give one of them")
    config.stash[VERDICTS] = []
    config.stash[EXPECTATIONS] = Expectations(rebase=config.getoption("--rebase"))


VERDICTS = pytest.StashKey[list[gate.Verdict]]()
EXPECTATIONS = pytest.StashKey[Expectations]()


def _is_factor(text: str) -> bool:
    try:
        return float(text) >= 1.0
    except ValueError:
        return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --gate the gates, without it what pytest-benchmark measures: a ratio gate's two sides among them."""
    wanted = KINDS if config.getoption("--gate") else ("ratio",)
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        kinds = [k for k in KINDS if item.get_closest_marker(k)]
        runs = any(k in wanted for k in kinds) if kinds else not config.getoption("--gate")
        (kept if runs else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "side" in metafunc.fixturenames:
        metafunc.parametrize("side", ["gate"] if metafunc.config.getoption("--gate") else ["bmoe", "reference"])


@pytest.fixture
def compare(request: pytest.FixtureRequest, side: str) -> Compare:
    """Compares two sides under the name of a gate, or measures one of them with pytest-benchmark."""
    limits = gate.read_limits()
    config = request.config

    def run(name: str, subject: gate.Side, reference: gate.Side) -> None:
        if name not in limits:
            pytest.fail(f'gates.toml has no [ratio."{name}"]', pytrace=False)
        if side != "gate":
            benchmark = request.getfixturevalue("benchmark")
            benchmark.group = name
            benchmark.pedantic(subject if side == "bmoe" else reference, rounds=60, warmup_rounds=3)
            return
        for what in config.getoption("--plant"):
            planted, _, factor = what.partition("=")
            if planted == name:
                subject = gate.slowed(subject, float(factor))
        effort = gate.SHORT if config.getoption("--short") else gate.FULL
        verdict = gate.measure(name, subject, reference, limits[name], effort)
        config.stash[VERDICTS].append(verdict)
        if verdict.breached:
            pytest.fail(verdict.line, pytrace=False)

    return run


@pytest.fixture
def exact(request: pytest.FixtureRequest) -> Exact:
    """Compares a scenario's counts with the committed ones."""
    expectations = request.config.stash[EXPECTATIONS]

    def run(scenario: str, counts: Counts) -> None:
        if line := expectations.breach(scenario, counts):
            pytest.fail(line, pytrace=False)

    return run


@pytest.fixture
def planted(request: pytest.FixtureRequest) -> frozenset[str]:
    """The faults that --plant asks for."""
    return frozenset(request.config.getoption("--plant")) & {*FAULTS}


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A directory in memory: reads from it depend on no disk, nor on what the page cache has kept."""
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK) or os.statvfs(place).f_bavail * os.statvfs(place).f_frsize < 64 << 20:
        pytest.skip(f"no 64 MiB in memory at {place}: the gates that read would compare a disk with its cache")
    directory = place / f"bmoe-bench-{os.getpid()}"
    directory.mkdir(exist_ok=True)
    try:
        yield directory
    finally:
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()


@pytest.fixture
def one_core() -> Iterator[None]:
    """Keeps the test, and the threads that it starts, on one core: how many are free does not matter then."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@pytest.fixture(autouse=True)
def _needs_a_compiler(request: pytest.FixtureRequest) -> None:
    if any(request.node.get_closest_marker(k) for k in KINDS) and native.compiler() is None:
        pytest.skip("no C compiler: the gates' references cannot be built")


def _is_all(config: pytest.Config, here: Path) -> bool:
    return [(config.invocation_params.dir / arg).resolve() for arg in config.args] == [here.resolve()]


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    verdicts, expectations = config.stash[VERDICTS], config.stash[EXPECTATIONS]
    if verdicts:
        terminalreporter.section("ratio gates")
        terminalreporter.write_line(f"{'gate':28} {'ratio':>6} {'limit':>6} {'rounds':>6}  attempts  reference")
        for v in verdicts:
            tries = " ".join(f"{r:.2f}" for r in v.ratios)
            mark = "BREACH" if v.breached else ""
            terminalreporter.write_line(
                f"{v.name:28} {v.ratio:6.2f} {v.limit.ratio:6.2f} {v.rounds:6}  {tries:9} {v.limit.reference} {mark}"
            )
    skipped = {report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])}
    if skipped and config.getoption("--gate"):
        terminalreporter.section("not compared")
        for reason in sorted(skipped):
            terminalreporter.write_line(reason.removeprefix("Skipped: "))
    if expectations.rebase:
        terminalreporter.section("expectations")
        here = Path(__file__).parent
        if exitstatus == 0 and not config.option.markexpr + config.option.keyword and _is_all(config, here):
            expectations.forget_the_rest()
        expectations.write()
        for line in expectations.changes or ["nothing has changed"]:
            terminalreporter.write_line(line)
