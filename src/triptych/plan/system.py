"""What the kernel tells of a machine: processors, caches, NUMA nodes, cards and their lanes."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.core.device import Figure, Link

GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # PCIe's, by GT/s of a lane
LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # a second, one direction
CLASSES = ("0x0300", "0x0302", "0x1200")  # display, 3D, processing accelerator
VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
NVLINK_BYTES = {1: 20 * 10**9, 7: 50 * 10**9, 8: 50 * 10**9}  # a second of one link, by NVML's version; others 25
LOCAL = 10  # the kernel's distance of a NUMA node to itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """All caches of one level together, for data."""

    level: int
    num_bytes: int


UNTOLD = Cache(level=3, num_bytes=32 << 20)  # where the kernel tells of none


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A NUMA node. distances: to each node in turn, as the kernel says."""

    number: int
    cpus: tuple[int, ...]
    distances: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"node:{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU or another accelerator on PCIe. generation, lanes: what card and slot can do; None where nobody says."""

    address: str
    vendor: str
    node: int | None
    generation: int | None
    lanes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One machine, as far as this process may use it."""

    cpu: str
    cpus: tuple[int, ...]
    caches: tuple[Cache, ...]  # fastest first
    memory_bytes: int
    nodes: tuple[Node, ...]  # that have processors of ours
    cards: tuple[Card, ...]
    links: tuple[Link, ...]  # of cards, with their peaks; nothing of it was measured

    def between(self, source: str, target: str) -> int:
        """The kernel's distance of two nodes, such as `node:0`; LOCAL where it is silent."""
        distances = {node.name: node.distances for node in self.nodes}.get(source, ())
        index = int(target.partition(":")[2])
        return distances[index] if index < len(distances) else LOCAL


def read_system(root: Path = Path("/"), cpus: frozenset[int] | None = None) -> System:
    """Read /sys and /proc below `root`. cpus: those this process may use, asked for if not given."""
    allowed = frozenset(_allowed(root)) if cpus is None else cpus
    nodes = tuple(_nodes(root, allowed))
    cards = tuple(_cards(root))
    return System(
        cpu=_cpu_name(root),
        cpus=tuple(sorted(allowed)),
        caches=tuple(_caches(root, allowed)) or (UNTOLD,),
        memory_bytes=_memory(root),
        nodes=nodes or (Node(number=0, cpus=tuple(sorted(allowed)), distances=(LOCAL,)),),
        cards=cards,
        links=(*_lanes(cards), *_nvlinks()),
    )


def _allowed(root: Path) -> set[int]:
    if root == Path("/") and hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    online = root / "sys/devices/system/cpu/online"
    return set(numbers(online.read_text()) if online.is_file() else range(os.cpu_count() or 1))


def numbers(text: str) -> list[int]:
    """The kernel's lists: `0-3,8` → 0, 1, 2, 3, 8."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return [number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)]


def _caches(root: Path, allowed: frozenset[int]) -> Iterator[Cache]:
    """Each cache once, though every processor that shares it tells of it."""
    found: dict[tuple[int, str], int] = {}
    for cpu in sorted(allowed):
        for folder in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
            facts = {name: _text(folder / name) for name in ("level", "type", "size", "shared_cpu_list")}
            size = re.fullmatch(r"(\d+)([KMG]?)", facts["size"])
            if facts["type"] != "Instruction" and size and facts["level"].isdecimal():
                scale = 1 << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]]
                found[int(facts["level"]), facts["shared_cpu_list"]] = int(size[1]) * scale
    for level in sorted({level for level, _ in found}):
        yield Cache(level=level, num_bytes=sum(size for (own, _), size in found.items() if own == level))


def _nodes(root: Path, allowed: frozenset[int]) -> Iterator[Node]:
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    for number, folder in sorted((int(folder.name[4:]), folder) for folder in folders):
        own = tuple(cpu for cpu in numbers(_text(folder / "cpulist")) if cpu in allowed)
        if own:
            distances = tuple(int(word) for word in _text(folder / "distance").split())
            yield Node(number=number, cpus=own, distances=distances)


def _cards(root: Path) -> Iterator[Card]:
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if not _text(folder / "class").startswith(CLASSES):
            continue
        node = _text(folder / "numa_node")
        slots = (folder, folder.resolve().parent)  # the card, and the port above it
        generations = [GENERATIONS.get(_text(slot / "max_link_speed").partition(" ")[0]) for slot in slots]
        lanes = [_text(folder / "current_link_width"), _text(slots[1] / "max_link_width")]
        yield Card(
            address=folder.name,
            vendor=VENDORS.get(_text(folder / "vendor"), _text(folder / "vendor")),
            node=int(node) if node.isdecimal() else None,  # -1 where the firmware does not say
            generation=min((one for one in generations if one), default=None),
            lanes=min((int(one) for one in lanes if one.isdecimal() and int(one)), default=None),
        )


def _lanes(cards: tuple[Card, ...]) -> Iterator[Link]:
    """From the memory beside each card to the card."""
    for card in cards:
        if card.generation and card.lanes:
            peak = LANE_BYTES[card.generation] * card.lanes
            yield Link(
                source=f"node:{card.node or 0}", target=card.address, kind="pcie", generation=card.generation,
                lanes=card.lanes, numa_distance=LOCAL, bytes_per_s=Figure.exact(peak), latency_s=Figure.exact(0.0),
            )  # fmt: skip


def _nvlinks() -> Iterator[Link]:
    """From each of NVIDIA's GPUs to its peers or switches, where `nvidia-ml-py` is installed and finds any."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package or no driver: there are no such links to tell of
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            rates: Counter[str] = Counter()
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
                with suppress(pynvml.NVMLError):  # this GPU has fewer
                    if pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED:
                        version = pynvml.nvmlDeviceGetNvLinkVersion(handle, link)
                        other = _address(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
                        rates[other] += NVLINK_BYTES.get(version, 25 * 10**9)
            own = _address(pynvml.nvmlDeviceGetPciInfo(handle))
            for other, rate in rates.items():
                peak = Figure.exact(rate)
                yield Link(source=own, target=other, kind="nvlink", bytes_per_s=peak, latency_s=Figure.exact(0.0))
    finally:
        pynvml.nvmlShutdown()


def _address(info: Any) -> str:
    """As sysfs writes it: NVML's domain has eight digits, and its text may be bytes."""
    text = info.busId.decode() if isinstance(info.busId, bytes) else info.busId
    return str(text).strip("\0").lower()[-12:]


def _cpu_name(root: Path) -> str:
    """The first processor's, as /proc/cpuinfo has it: x86's `model name`; arm64 has none."""
    found = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _memory(root: Path) -> int:
    found = re.search(r"^MemTotal:\s*(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) << 10 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # what the kernel does not know has no file, or one that cannot be read
        return ""
