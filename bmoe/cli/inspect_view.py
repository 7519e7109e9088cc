"""What `bmoe inspect` prints: lines for people, one object for programs. Views only."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..experts.budget import MiB
from ..inspect.forecast import Measured
from ..inspect.hit_model import DECODE, PROMPT, HitRange
from ..inspect.inspection import Inspection
from ..inspect.speed_model import Prediction, Range
from ..version import __version__

GiB = 1 << 30


def header_lines(found: Inspection) -> list[str]:
    """What the header says, and what a run would decide."""
    file = found.file
    shards = f", {len(file.paths)} shards" if len(file.paths) > 1 else ""
    lines = [f"model: {file.paths[0].name}, {file.arch}, {found.n_layers} layers, {size(found.file_bytes)}{shards}"]
    if not found.layers:
        lines.append("experts: none that are routed (*_exps.weight): a dense model, nothing is streamed")
    else:
        shared = f"{found.n_shared} shared" if found.n_shared else "none shared"
        lines.append(
            f"experts: {found.n_expert} in each of {len(found.layers)} layers, {found.n_used} used by a token, {shared}"
        )
    lines.append("types: " + ", ".join(f"{name} {size(n)}" for name, n in found.quants.items()))
    if found.layers:
        small, large = found.expert_range
        one = size(small) if small == large else f"{size(small)} to {size(large)}"
        lines.append(
            f"sizes: dense weights {size(found.dense)}, experts {size(found.expert_bytes)}, one of them {one}; "
            f"a token routes {size(found.token_bytes)}"
        )
    else:
        lines.append(f"sizes: dense weights {size(found.dense)}")
    if (head := found.head) is not None:
        how = "loaded, in the sums here" if head.loaded else "not loaded without --mtp"
        lines.append(
            f"head: {head.n} for drafting (--mtp), dense {size(head.dense)}, experts {size(head.experts)}, "
            f"{size(head.token)} routed by each drafted token; {how}"
        )
    b = found.buffers
    lines.append(
        f"context: {found.shape.n_ctx} tokens, batches of {found.shape.n_ubatch}: KV {size(b.kv)}, recurrent state "
        f"{size(b.recurrent)}, compute {size(b.compute)}"
    )
    if not found.layers:
        return lines
    lines.append(found.decision.explain() if found.decision is not None else f"cache: refused: {found.refused}")
    if found.advice:
        lines.append(f"note: {found.advice}")
    lines.append(
        f"floor: {_mib(found.sizes.working_set)} MiB hold what one token routes; below that the default policy hits "
        f"little and --cache-policy lru never; below {_mib(found.sizes.smallest)} MiB a cache is refused"
    )
    return lines


def measured_lines(found: Inspection, measured: Measured | None) -> list[str]:
    """What was measured, and how the predictions come about."""
    if measured is None:
        return [
            "disk: unknown (--no-measure)",
            "token: unknown (--no-measure), so no speed is predicted",
            "hits: those of recorded routes of three other models at the same share of the experts",
        ]
    disk, probe = measured.disk, measured.probe
    how = "past the page cache"
    if not disk.direct:
        why = "--no-odirect" if not found.config.odirect else "the file system refuses direct reads"
        how = f"through the page cache ({why}): memory may have answered, the disk can be slower"
    lines = [
        f"disk: {disk.mib_s:.0f} MiB/s, slices of {disk.slice_bytes >> 10} KiB over {disk.lanes} lanes, {how} "
        f"({size(disk.bytes)} in {disk.seconds:.2f} s)"
    ]
    curve = measured.curve
    if curve is None:
        lines.append("token: no time could be measured")
    else:
        hot, cold = 1e3 * curve.seconds(0.0), 1e3 * (measured.uncached or curve).seconds(1.0)
        mode = "overlapped" if found.config.overlap else "serial (--overlap would compute while it reads)"
        there = "with all its experts in the cache" if curve.hot else "without its waiting for reads"
        n = len(probe.samples) + len(probe.uncached)
        lines.append(
            f"token: {_number(hot, 3)} ms {there}, {_number(cold, 3)} ms without a cache, {mode}, {_threads(found)}; "
            f"{n} tokens in {probe.seconds:.1f} s, spread {100 * curve.spread:.0f} %"
        )
    if measured.seen is None:
        lines.append("hits: those of recorded routes of three other models: too few tokens were run to see this one's")
    else:
        seen = measured.seen
        lines.append(
            f"hits: the cache policy on routes drawn like those of {seen.tokens} tokens, which share "
            f"{100 * seen.near:.0f} % of their experts with the next token and {100 * seen.far:.0f} % with later ones"
        )
    return lines


def table(found: Inspection, rows: list[Prediction]) -> list[str]:
    """The predictions, a line for each budget: expected value, and the range in brackets."""
    head = f"{'cache':<10}{'MiB':>8}{'experts':>9}   {'hits, %':<17}{'MiB/token':<24}tok/s"
    lines = [f"expected in decode, {DECODE} tokens after a prompt of {PROMPT}, short context, no drafts:", head]
    for row in rows:
        hits = _span(Range(100 * row.hits.low, 100 * row.hits.mid, 100 * row.hits.high), digits=2)
        read = _span(Range(row.read.low / MiB, row.read.mid / MiB, row.read.high / MiB))
        speed = _span(row.tok_s) if row.tok_s is not None else "unknown"
        fit = "" if row.fits else "  (more than fits here)"
        lines.append(f"{row.name:<10}{_mib(row.budget):>8}{100 * row.share:>7.0f} %   {hits:<17}{read:<24}{speed}{fit}")
    if found.config.drop_cold_experts is not None or found.config.prefetch != "off":
        lines.append("note: what --drop-cold-experts and --prefetch change is not predicted")
    return lines


def as_dict(found: Inspection, measured: Measured | None, rows: list[Prediction]) -> dict[str, Any]:
    """Everything as one object. Bytes, seconds, shares from 0 to 1."""
    small, large = found.expert_range
    decision = found.decision
    return {
        "version": __version__,
        "command": "inspect",
        "model": str(found.file.paths[0]),
        "files": len(found.file.paths),
        "arch": found.file.arch,
        "config": found.config.as_dict(),
        "layers": found.n_layers,
        "experts": {
            "layers": len(found.layers),
            "count": found.n_expert,
            "used": found.n_used if found.layers else 0,
            "shared": found.n_shared,
        },
        "types": found.quants,
        "bytes": {
            "file": found.file_bytes,
            "dense": found.dense,
            "experts": found.expert_bytes,
            "expert_min": small,
            "expert_max": large,
            "token": found.token_bytes,
        },
        "head": asdict(found.head) if found.head is not None else None,
        "context": {
            "tokens": found.shape.n_ctx,
            "ubatch": found.shape.n_ubatch,
            "kv": found.buffers.kv,
            "recurrent": found.buffers.recurrent,
            "compute": found.buffers.compute,
        },
        "cache": {
            "mode": decision.mode if decision is not None else None,
            "budget": decision.budget if decision is not None else None,
            "explained": decision.explain() if decision is not None else None,
            "refused": found.refused or None,
            "advice": found.advice or None,
            "one_token": found.sizes.working_set,
            "smallest": found.sizes.smallest,
            "all_experts": found.sizes.experts,
        }
        if found.layers
        else None,
        "disk": {**asdict(measured.disk), "mib_s": measured.disk.mib_s} if measured is not None else None,
        "measured": _measured(measured) if measured is not None else None,
        "predictions": [
            {
                "name": row.name,
                "budget": row.budget,
                "share": row.share,
                "fits": row.fits,
                "hit_rate": _range(row.hits),
                "bytes_per_token": _range(row.read),
                "tok_s": _range(row.tok_s),
            }
            for row in rows
        ],
    }


def _measured(measured: Measured) -> dict[str, Any]:
    curve, probe = measured.curve, measured.probe
    return {
        "tokens": len(probe.samples) + len(probe.uncached),
        "seconds": probe.seconds,
        "cache": probe.cache,
        "token_s": [list(point) for point in curve.points] if curve is not None else None,
        "uncached_s": measured.uncached.seconds(1.0) if measured.uncached is not None else None,
        "hot": curve.hot if curve is not None else None,
        "spread": curve.spread if curve is not None else None,
        "routes": asdict(measured.seen) if measured.seen is not None else None,
        "law": asdict(measured.laws.mid) if measured.laws is not None else None,
    }


def size(nbytes: int) -> str:
    """Bytes for people: three digits and a unit."""
    for unit, scale in (("GiB", GiB), ("MiB", MiB), ("KiB", 1 << 10)):
        if nbytes >= scale:
            value = nbytes / scale
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{nbytes} B" if nbytes else "0"


def _number(value: float, digits: int) -> str:
    """So many digits, more where the whole part has them, and no exponent."""
    if value < 0.0005:
        return "0"
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _threads(found: Inspection) -> str:
    n = found.config.n_threads()
    return f"{n} thread{'s' if n > 1 else ''}"


def _mib(nbytes: int) -> int:
    return -(-nbytes // MiB)


def _span(value: Range, digits: int = 3) -> str:
    low, mid, high = (_number(x, digits) for x in (value.low, value.mid, value.high))
    return mid if low == mid == high else f"{mid} ({low}-{high})"


def _range(value: Range | HitRange | None) -> dict[str, float] | None:
    return {"low": value.low, "mid": value.mid, "high": value.high} if value is not None else None
