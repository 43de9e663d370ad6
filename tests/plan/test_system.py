"""What is read from sysfs: planted machines of several sockets, cards in narrow slots, kernels that say little."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from triptych.plan.system import UNTOLD, Cache, Card, numbers, read_system

CPUINFO = "processor\t: 0\nmodel name\t: Planted 9000\n\nprocessor\t: 1\nmodel name\t: Planted 9000\n"


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def sockets(tmp_path) -> Path:
    """Four processors on two nodes; of each two share a last-level cache."""
    files = {"proc/cpuinfo": CPUINFO, "proc/meminfo": "MemTotal:       1000 kB", "sys/devices/system/cpu/online": "0-3"}
    for cpu in range(4):
        cache = f"sys/devices/system/cpu/cpu{cpu}/cache"
        pair = "0-1" if cpu < 2 else "2-3"
        caches = (
            ("1", "Data", "32K", f"{cpu}"),
            ("1", "Instruction", "32K", f"{cpu}"),
            ("2", "Unified", "1024K", f"{cpu}"),
            ("3", "Unified", "32M", pair),
        )
        for index, facts in enumerate(caches):
            for name, text in zip(("level", "type", "size", "shared_cpu_list"), facts, strict=True):
                files[f"{cache}/index{index}/{name}"] = text
    for node, cpus, distances in ((0, "0-1", "10 21"), (1, "2-3", "21 10")):
        files |= {f"sys/devices/system/node/node{node}/{name}": text
                  for name, text in (("cpulist", cpus), ("distance", distances))}  # fmt: skip
    plant(tmp_path, files)
    return tmp_path


def card(root: Path, address: str, port: dict[str, str], **facts: str) -> None:
    """A card below a port, as sysfs links them."""
    behind = "sys/devices/pci0000:00/0000:00:01.0"
    plant(root, {f"{behind}/{name}": text for name, text in port.items()})
    plant(root, {f"{behind}/{address}/{name}": text for name, text in facts.items()})
    devices = root / "sys/bus/pci/devices"
    devices.mkdir(parents=True, exist_ok=True)
    (devices / address).symlink_to(root / behind / address)


def test_each_cache_counts_once_though_every_processor_tells_of_it(sockets):
    found = read_system(sockets)

    assert found.cpu == "Planted 9000"
    assert found.cpus == (0, 1, 2, 3)
    assert found.memory_bytes == 1000 << 10
    assert found.caches == (
        Cache(level=1, num_bytes=4 << 15),
        Cache(level=2, num_bytes=4 << 20),
        Cache(level=3, num_bytes=2 << 25),
    )


def test_nodes_have_their_processors_and_their_distances(sockets):
    found = read_system(sockets)

    assert [(node.number, node.cpus) for node in found.nodes] == [(0, (0, 1)), (1, (2, 3))]
    assert found.between("node:0", "node:1") == 21
    assert found.between("node:1", "node:1") == 10


def test_only_processors_that_the_process_may_use_are_counted(sockets):
    found = read_system(sockets, cpus=frozenset({2}))

    assert [node.number for node in found.nodes] == [1]
    assert found.caches[-1] == Cache(level=3, num_bytes=1 << 25)


def test_a_card_has_the_lanes_and_the_generation_of_the_slot_it_is_in(sockets):
    card(
        sockets, "0000:01:00.0", {"max_link_speed": "16.0 GT/s PCIe", "max_link_width": "8"},
        **{"class": "0x030200", "vendor": "0x10de", "numa_node": "1", "max_link_speed": "32.0 GT/s PCIe",
           "current_link_speed": "2.5 GT/s PCIe", "current_link_width": "16"},
    )  # fmt: skip

    found = read_system(sockets)

    assert found.cards == (Card(address="0000:01:00.0", vendor="NVIDIA", node=1, generation=4, lanes=8),)
    (link,) = found.links
    assert (link.source, link.target, link.kind) == ("node:1", "0000:01:00.0", "pcie")
    assert link.bytes_per_s.value == pytest.approx(15.75e9, rel=1e-3)


def test_a_card_of_which_nobody_tells_the_lanes_has_no_link(sockets):
    card(sockets, "0000:01:00.0", {}, **{"class": "0x120000", "vendor": "0xabcd", "numa_node": "-1",
         "max_link_speed": "Unknown", "current_link_width": "0"})  # fmt: skip
    card(sockets, "0000:01:00.1", {}, **{"class": "0x020000", "vendor": "0x8086"})  # a network card

    found = read_system(sockets)

    assert found.cards == (Card(address="0000:01:00.0", vendor="0xabcd", node=None, generation=None, lanes=None),)
    assert found.links == ()


def test_a_kernel_that_says_nothing_leaves_one_node_with_all_processors(tmp_path):
    found = read_system(tmp_path, cpus=frozenset({0, 1}))

    assert [(node.number, node.cpus, node.distances) for node in found.nodes] == [(0, (0, 1), (10,))]
    assert found.caches == (UNTOLD,)
    assert found.memory_bytes > 0


def test_nvlinks_add_up_between_two_gpus(sockets, monkeypatch):
    class NVMLError(Exception):
        pass

    def state(handle, link):
        if link >= 4:
            raise NVMLError
        return 1 if link < 3 else 0

    def address(number):
        return SimpleNamespace(busId=f"0000000{number}:C1:00.0".encode())

    planted = SimpleNamespace(
        NVMLError=NVMLError, NVML_NVLINK_MAX_LINKS=18, NVML_FEATURE_ENABLED=1, nvmlInit=lambda: None,
        nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetNvLinkState=state, nvmlDeviceGetNvLinkVersion=lambda handle, link: 6,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: address(1),
        nvmlDeviceGetPciInfo=lambda handle: address(0),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", planted)

    (link,) = read_system(sockets).links

    assert (link.source, link.target, link.kind) == ("0000:c1:00.0", "0001:c1:00.0", "nvlink")
    assert link.bytes_per_s.value == 3 * 25e9


def test_the_kernels_lists_are_read():
    assert numbers("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert numbers("\n") == []
