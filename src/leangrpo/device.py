"""Devices that are not here, by their data sheets and the share of them that is achieved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from .complaints import did_you_mean
from .errors import problem
from .settings_model import Size

FACTS = Path(__file__).with_name("devices.yaml")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """`count` devices of a node: peak operations and bytes a second, and the shares achieved.

    `half` and `single` are peaks of numbers of 2 and of 4 bytes; `link` is between devices, `host`
    to the host's memory, both in one direction; `memory` in bytes, and `host_memory`, the host's
    for each of them.
    """

    name: str
    count: int
    memory: int
    half: float
    single: float
    bandwidth: float
    link: float
    host: float
    flops_share: float
    bandwidth_share: float
    link_share: float
    host_share: float
    link_kind: str
    host_memory: int

    def flops(self, itemsize: int) -> float:
        """Achieved operations a second on numbers of so many bytes."""
        if itemsize <= 2:
            return self.half * self.flops_share
        return self.single * self.flops_share * (1.0 if itemsize <= 4 else 0.5)

    @property
    def moved(self) -> float:
        """Achieved bytes a second of its memory."""
        return self.bandwidth * self.bandwidth_share

    @property
    def linked(self) -> float:
        """Achieved bytes a second of a collective between devices."""
        return self.link * self.link_share

    @property
    def hosted(self) -> float:
        """Achieved bytes a second to the host's memory."""
        return self.host * self.host_share

    def describe(self) -> str:
        """One line for people."""
        return (
            f"{self.count} x {self.name}, {self.memory / GIB:.4g} GiB each; {self.half / 1e12:.4g} "
            f"TFLOP/s bfloat16 (x {self.flops_share:g} achieved), {self.single / 1e12:.4g} float32;"
            f" memory {self.bandwidth / 1e9:.4g} GB/s (x {self.bandwidth_share:g}); "
            f"{self.link_kind} {self.link / 1e9:.4g} GB/s (x {self.link_share:g})"
        )


@cache
def table() -> dict[str, Any]:
    """The data sheets that come along, `devices.yaml`."""
    loaded: dict[str, Any] = yaml.safe_load(FACTS.read_text(encoding="utf-8"))
    return loaded


def device(
    name: str = "a6000",
    count: int = 1,
    *,
    memory: int | str | None = None,
    tflops: float | None = None,
    bandwidth: float | None = None,
    link: float | None = None,
    efficiency: float | None = None,
    host_memory: int | str | None = None,
) -> Device:
    """A device of the table, with what is given in place of its own facts.

    `memory` in bytes, or as 48GiB; `tflops` its bfloat16 peak, of which `efficiency` is achieved;
    `bandwidth` its memory's peak in GB/s; `link` what collectives between devices achieve in GB/s;
    `host_memory` of the host, for each device, as `memory` is written.
    Raises LeanError for a name that is not in the table, or a number that is not positive.
    """
    known = table()["devices"]
    if name.lower() not in known:
        remedy = did_you_mean(name.lower(), known) or f"Devices: {', '.join(known)}."
        remedy += " For another one, take the nearest with --memory, --tflops, --bandwidth, --link."
        raise problem("--device", name, "it is not in the table", remedy)
    num_bytes, host_bytes = _bytes("--memory", memory), _bytes("--host-memory", host_memory)
    given = {"gpus": count, "memory": num_bytes, "tflops": tflops, "bandwidth": bandwidth}
    given["host-memory"] = host_bytes
    for option, value in {**given, "link": link, "efficiency": efficiency}.items():
        if value is not None and not value > 0:
            raise problem(f"--{option}", value, "it must be more than 0")
    if efficiency is not None and efficiency > 1:
        raise problem("--efficiency", efficiency, "it is a share, between 0 and 1")
    facts, shares = known[name.lower()], table()["shares"]
    own = facts["memory"] * GIB if num_bytes is None else num_bytes
    return Device(
        name=facts["name"],
        count=count,
        memory=own,
        half=1e12 * (facts["bfloat16"] if tflops is None else tflops),
        single=1e12 * facts["float32"],
        bandwidth=1e9 * (facts["bandwidth"] if bandwidth is None else bandwidth),
        link=1e9 * (facts["link"] if link is None else link),
        host=1e9 * facts["host"],
        flops_share=shares["flops"] if efficiency is None else efficiency,
        bandwidth_share=shares["bandwidth"],
        link_share=facts["link_share"] if link is None else 1.0,
        host_share=shares["host"],
        link_kind=facts["link_kind"],
        host_memory=shares["host_memory"] * own if host_bytes is None else host_bytes,
    )


def _bytes(option: str, text: int | str | None) -> int | None:
    try:
        found: int | None = TypeAdapter(Size | None).validate_python(text)
    except ValidationError as error:
        raise problem(option, text, "it must be a size such as 48GiB") from error
    return found
