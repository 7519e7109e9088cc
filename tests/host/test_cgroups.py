"""Which cgroups limit a process: invented trees, then the real ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import Machine, MiB

from bmoe.host.memory import (
    CgroupLimit,
)

UNLIMITED_V1 = 9223372036854771712


# --- v1 ---


def test_v1_own_cgroup_and_every_ancestor_count(machine: Machine) -> None:
    machine.own("4:memory:/a/b/c", "3:cpu,cpuacct:/elsewhere", "1:name=memory:/elsewhere")
    machine.mount("cgroup", "/sys/fs/cgroup/cpu", options="rw,cpu,cpuacct")
    machine.mount("cgroup", "/sys/fs/cgroup/memory", options="rw,memory")
    machine.v1("sys/fs/cgroup/cpu/elsewhere", 1)
    machine.v1("sys/fs/cgroup/memory/elsewhere", 2)
    machine.v1("sys/fs/cgroup/memory/a/b/c", 900 * MiB, usage=100 * MiB)
    machine.v1("sys/fs/cgroup/memory/a/b", UNLIMITED_V1)
    machine.v1("sys/fs/cgroup/memory/a", 800 * MiB, usage=500 * MiB)
    machine.v1("sys/fs/cgroup/memory", UNLIMITED_V1, usage=9000 * MiB)
    assert machine.found() == [("/a/b/c", 1, 900 * MiB), ("/a", 1, 800 * MiB)]
    assert machine.facts().available() == 300 * MiB
    assert machine.facts().binding() == "cgroup /a (limit 800 MiB)"


def test_v1_page_cache_of_the_whole_subtree_can_be_given_back_unless_dirty(machine: Machine) -> None:
    machine.own("4:memory:/a")
    machine.mount("cgroup", "/sys/fs/cgroup/memory", options="rw,memory")
    machine.v1(
        "sys/fs/cgroup/memory/a",
        1000 * MiB,
        usage=900 * MiB,
        inactive_file=1 * MiB,
        active_file=2 * MiB,
        total_inactive_file=100 * MiB,
        total_active_file=200 * MiB,
        total_dirty=30 * MiB,
        total_writeback=5 * MiB,
        total_mapped_file=250 * MiB,
        total_shmem=400 * MiB,
    )
    (limit,) = machine.facts().limits
    assert limit == CgroupLimit("/a", 1, 1000 * MiB, 900 * MiB, 265 * MiB)
    assert machine.facts().available() == 365 * MiB


@pytest.mark.parametrize("unlimited", [UNLIMITED_V1, 2**63 - 1, 2**63 - 65536])
def test_v1_unlimited_is_no_limit_whatever_the_page_size(machine: Machine, unlimited: int) -> None:
    machine.own("4:memory:/a")
    machine.mount("cgroup", "/sys/fs/cgroup/memory", options="rw,memory")
    machine.v1("sys/fs/cgroup/memory/a", unlimited, hierarchical_memory_limit=unlimited)
    assert machine.found() == []


def test_v1_a_limit_above_what_a_container_sees_still_counts(machine: Machine) -> None:
    machine.own("4:memory:/")
    machine.mount("cgroup", "/sys/fs/cgroup/memory", options="rw,memory")
    machine.v1(
        "sys/fs/cgroup/memory", UNLIMITED_V1, usage=100 * MiB, hierarchical_memory_limit=700 * MiB
    )  # the pod's limit
    assert machine.found() == [("/", 1, 700 * MiB)]
    assert machine.facts().available() == 600 * MiB


def test_v1_ancestors_in_sight_are_not_counted_again_below(machine: Machine) -> None:
    machine.own("4:memory:/a/b")
    machine.mount("cgroup", "/sys/fs/cgroup/memory", options="rw,memory")
    machine.v1("sys/fs/cgroup/memory/a/b", UNLIMITED_V1, hierarchical_memory_limit=700 * MiB)
    machine.v1("sys/fs/cgroup/memory/a", 700 * MiB, hierarchical_memory_limit=700 * MiB)
    machine.v1("sys/fs/cgroup/memory", UNLIMITED_V1, hierarchical_memory_limit=UNLIMITED_V1)
    assert machine.found() == [("/a", 1, 700 * MiB)]


# --- v2 ---


def test_v2_own_cgroup_and_every_ancestor_count(machine: Machine) -> None:
    machine.own("0::/user.slice/app.scope")
    machine.mount("cgroup2", "/sys/fs/cgroup", options="rw,nsdelegate")
    machine.v2("sys/fs/cgroup/user.slice/app.scope", "max", usage=10 * MiB)
    machine.v2(
        "sys/fs/cgroup/user.slice",
        str(600 * MiB),
        usage=500 * MiB,
        inactive_file=100 * MiB,
        active_file=50 * MiB,
        file_dirty=20 * MiB,
        file_writeback=10 * MiB,
        file_mapped=90 * MiB,
    )
    machine.write("sys/fs/cgroup/cgroup.controllers", "memory\n")  # the root has no memory.max
    assert machine.facts().limits == (CgroupLimit("/user.slice", 2, 600 * MiB, 500 * MiB, 120 * MiB),)
    assert machine.facts().available() == 220 * MiB


@pytest.mark.parametrize(
    ("max_", "high", "limit"),
    [("500", "max", 500), ("max", "400", 400), ("500", "400", 400), ("400", "500", 400), ("0", "max", 0)],
)
def test_v2_the_lower_of_max_and_high_is_the_limit(machine: Machine, max_: str, high: str, limit: int) -> None:
    machine.own("0::/a")
    machine.mount("cgroup2", "/sys/fs/cgroup")
    machine.v2("sys/fs/cgroup/a", max_, high=high)
    assert machine.found() == [("/a", 2, limit)]


def test_v2_max_is_no_limit(machine: Machine) -> None:
    machine.own("0::/a")
    machine.mount("cgroup2", "/sys/fs/cgroup")
    machine.v2("sys/fs/cgroup/a", "max", usage=5)
    assert machine.found() == []


# --- both, and where they are mounted ---


def test_a_hybrid_machine_has_limits_of_both(machine: Machine) -> None:
    machine.own("4:memory:/one", "0::/two")
    machine.mount("cgroup", "/sys/fs/cgroup/memory", options="rw,cpu,memory")
    machine.mount("cgroup2", "/sys/fs/cgroup/unified")
    machine.v1("sys/fs/cgroup/memory/one", 500 * MiB)
    machine.v2("sys/fs/cgroup/unified/two", str(400 * MiB))
    assert sorted(machine.found()) == [("/one", 1, 500 * MiB), ("/two", 2, 400 * MiB)]
    assert machine.facts().binding() == "cgroup /two (limit 400 MiB)"


def test_mount_points_are_found_not_assumed(machine: Machine) -> None:
    machine.own(r"0::/system.slice/a\x2db:c d.service")
    machine.mount("cgroup2", "/mnt/control groups", root=r"/system.slice/a\x2db:c d.service")
    machine.v2("mnt/control groups", str(300 * MiB))
    machine.v2("sys/fs/cgroup", str(1 * MiB))
    assert machine.found() == [(r"/system.slice/a\x2db:c d.service", 2, 300 * MiB)]


def test_a_hierarchy_mounted_twice_counts_once(machine: Machine) -> None:
    machine.own("0::/a/b")
    machine.mount("cgroup2", "/sys/fs/cgroup")
    machine.v2("sys/fs/cgroup/a", str(500 * MiB))
    machine.v2("sys/fs/cgroup/a/b", str(600 * MiB))
    (machine.root / "again").symlink_to("sys/fs/cgroup/a")
    machine.mount("cgroup2", "/again", root="/a")
    assert machine.found() == [("/a/b", 2, 600 * MiB), ("/a", 2, 500 * MiB)]


def test_a_container_that_sees_its_own_cgroup_at_the_mounts_root(machine: Machine) -> None:
    # v1 docker: the host's names in both, the mount shows the own cgroup and what is below.
    machine.own("4:memory:/docker/f00/worker")
    machine.mount("cgroup", "/sys/fs/cgroup/memory", root="/docker/f00", options="rw,memory")
    machine.v1("sys/fs/cgroup/memory", 512 * MiB)
    machine.v1("sys/fs/cgroup/memory/worker", 256 * MiB)
    machine.v1("sys/fs/cgroup/memory/docker/f00/worker", 1)
    assert machine.found() == [("/docker/f00/worker", 1, 256 * MiB), ("/docker/f00", 1, 512 * MiB)]


@pytest.mark.parametrize(
    ("own", "root"),
    [
        ("/docker/f00", "/"),  # the host's name, a mount that hides it
        ("/docker/f00/f00", "/docker/f0"),  # a prefix of the text, not of the path
        ("/", "/docker/f00"),  # a namespace made after the mount
        ("/../../f00", "/"),  # moved out of its namespace
    ],
)
def test_where_root_and_path_do_not_match_the_mounts_top_counts(machine: Machine, own: str, root: str) -> None:
    machine.v2("sys/f00", "1")  # where a naive join of "/../../f00" would look
    machine.v2("sys/fs/cgroup/f00", "1")  # and a naive prefix
    machine.own(f"0::{own}")
    machine.mount("cgroup2", "/sys/fs/cgroup", root=root)
    machine.v2("sys/fs/cgroup", str(512 * MiB))
    assert [limit for _, _, limit in machine.found()] == [512 * MiB]


def test_a_cgroup_namespace_with_its_own_mount(machine: Machine) -> None:
    machine.own("0::/")
    machine.mount("cgroup2", "/sys/fs/cgroup")
    machine.v2("sys/fs/cgroup", str(512 * MiB))
    assert machine.found() == [("/", 2, 512 * MiB)]


@pytest.mark.parametrize(
    ("own", "root"),
    [
        ("/", "/../.."),
        ("/inner", "/.."),
        ("/../pod/inner", "/../.."),
        ("/../../slice/pod/inner", "/../../.."),
    ],
)
def test_a_cgroup_namespace_with_the_hosts_mount_finds_the_cgroup_that_holds_us(
    machine: Machine, own: str, root: str
) -> None:
    names = {"/": ["pod", "inner"], "/inner": ["pod", "inner"], "/../pod/inner": ["slice", "pod", "inner"]}
    path = names.get(own, ["top", "slice", "pod", "inner"])
    machine.own(f"0::{own}")
    machine.mount("cgroup2", "/sys/fs/cgroup", root=root)
    for depth in range(1, len(path) + 1):
        machine.v2("/".join(["sys/fs/cgroup", *path[:depth]]), str(depth * MiB))
        for other in ("a", "m", "z", "0"):
            directory = "/".join(["sys/fs/cgroup", *path[: depth - 1], other])
            machine.v2(directory, "1")
            machine.write(f"{directory}/cgroup.procs", "12345\n")
    machine.write("/".join(["sys/fs/cgroup", *path, "cgroup.procs"]), "77\n1234\n")
    assert machine.found() == [("/" + "/".join(path[:depth]), 2, depth * MiB) for depth in range(len(path), 0, -1)]


def test_a_path_below_a_root_above_the_namespace_is_taken_literally(machine: Machine) -> None:
    machine.own("0::/../sibling/x")
    machine.mount("cgroup2", "/sys/fs/cgroup", root="/..")
    machine.v2("sys/fs/cgroup/sibling/x", str(9 * MiB))
    machine.v2("sys/fs/cgroup/sibling", str(8 * MiB))
    assert machine.found() == [("/sibling/x", 2, 9 * MiB), ("/sibling", 2, 8 * MiB)]


# --- what cannot be read ---


def test_missing_and_garbled_files_bound_nothing(machine: Machine) -> None:
    machine.own("4:memory:/a/b", "0::/a", "", "nonsense")
    machine.mountinfo.append("short line - cgroup2")
    machine.mount("cgroup", "/v1", options="rw,memory")
    machine.mount("cgroup2", "/v2")
    machine.v1("v1/a/b", 5)
    (machine.root / "v1/a/b/memory.limit_in_bytes").write_text("\n")
    machine.write("v1/a/memory.limit_in_bytes", f"{100 * MiB}\n")  # no usage, no stat
    machine.write("v2/a/memory.max/a-directory", "")
    assert machine.facts().limits == (CgroupLimit("/a", 1, 100 * MiB, 0, 0),)


def test_no_own_cgroup_file_means_the_mounts_top(machine: Machine) -> None:
    machine.mount("cgroup2", "/sys/fs/cgroup")
    machine.v2("sys/fs/cgroup", str(MiB))
    assert machine.found() == [("/", 2, MiB)]


# --- real cgroups ---


def _real_hierarchy() -> tuple[int, Path] | None:
    """A memory hierarchy in which this user can make cgroups."""
    for version, top in ((1, Path("/sys/fs/cgroup/memory")), (2, Path("/sys/fs/cgroup"))):
        marker = top / ("memory.limit_in_bytes" if version == 1 else "cgroup.subtree_control")
        if not (marker.exists() and os.access(top, os.W_OK) and os.geteuid() == 0):
            continue
        if version == 1 or "memory" in marker.read_text().split():
            return version, top
    return None


@pytest.fixture
def real_cgroup() -> Iterator[Path]:
    """A cgroup limited to 384 MiB with an empty one inside; gives the inner one."""
    hierarchy = _real_hierarchy()
    if hierarchy is None:
        pytest.skip("needs root and a writable memory cgroup")
    version, top = hierarchy
    outer = top / f"bmoe_test_{os.getpid()}"
    try:
        try:
            (outer / "inner").mkdir(parents=True)
            limit_file = "memory.limit_in_bytes" if version == 1 else "memory.max"
            (outer / limit_file).write_text(str(384 * MiB))
        except OSError as error:
            pytest.skip(f"cannot make a cgroup: {error}")
        yield outer / "inner"
    finally:
        for directory in (outer / "inner", outer):
            for _ in range(50):  # busy until its last process is reaped
                try:
                    directory.rmdir()
                except FileNotFoundError:
                    pass
                except OSError:
                    time.sleep(0.1)
                    continue
                break


def run_inside(cgroup: Path, code: str, *wrapper: str) -> list[str]:
    """The lines that `code`, run by a Python inside `cgroup`, prints."""
    repo = Path(__file__).resolve().parents[2]
    enter = f'echo $$ > "{cgroup}/cgroup.procs" && exec "$@"'
    child = subprocess.run(
        ["/bin/sh", "-c", enter, "sh", *wrapper, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(repo)},
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.split("\n")[:-1]


REPORT = """
from bmoe.host.memory import read_memory_facts
facts = read_memory_facts()
print(facts.available())
print(facts.binding())
"""


def test_real_the_limit_of_an_enclosing_cgroup_binds(real_cgroup: Path) -> None:
    available, binding = run_inside(real_cgroup, REPORT)
    assert binding == f"cgroup /{real_cgroup.parent.name} (limit 384 MiB)"
    assert 300 * MiB < int(available) < 384 * MiB


def test_real_memory_in_use_takes_room_and_page_cache_does_not(real_cgroup: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:  # not /tmp: page cache, not tmpfs
        code = f"""
import os
from bmoe.host.memory import read_memory_facts
print(read_memory_facts().available())
block = bytearray(b"x") * (100 << 20)
print(read_memory_facts().available())
with open({file.name!r}, "wb") as file:
    for _ in range(100):
        file.write(bytes(1 << 20))
    file.flush()
    os.fsync(file.fileno())
facts = read_memory_facts()
print(facts.available())
print(facts.limits[0].usage)
print(len(block))
"""
        empty, taken, cached, usage, _ = map(int, run_inside(real_cgroup, code))
    assert 95 * MiB < empty - taken < 110 * MiB
    if usage < 150 * MiB:
        pytest.skip("the file's pages were not charged to the cgroup")
    assert abs(cached - taken) < 12 * MiB


def test_real_a_new_cgroup_namespace_hides_the_name_but_not_the_limit(real_cgroup: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--cgroup", "true"], capture_output=True).returncode:
        pytest.skip("needs unshare --cgroup")
    available, binding = run_inside(real_cgroup, REPORT, unshare, "--cgroup")
    assert binding == f"cgroup /{real_cgroup.parent.name} (limit 384 MiB)"
    assert 300 * MiB < int(available) < 384 * MiB
