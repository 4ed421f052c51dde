"""``--oracle``: measures every plan that the scheduler could have chosen, beside the one that it chose."""

from . import measure
from .measure import timings
from .report import plan_text
from .workloads import Workload


def describe(plans: dict) -> dict[str, dict]:
    """Plans by direction as plain data: schedule, maximum edges per work item, heads at a time (0: all),
    source partitions, numbers of work items, split rows and their chunks, and the bytes of partial rows."""
    return {
        direction: {
            "schedule": plan.schedule,
            "max_edges": plan.max_edges,
            "heads_per_tile": plan.heads_per_tile,
            "source_parts": plan.source_parts,
            "items": len(plan.items),
            "split_rows": len(plan.splits),
            "pieces": plan.num_slots,
            "partial_bytes": plan.partial_bytes,
        }
        for direction, plan in plans.items()
    }


def measure_candidates(work: Workload, mode: str, chosen: dict, budget: float) -> dict:
    """{"candidates", "kind", "chosen", "best", "ratio"} for one row of the results, with the schedule "auto".

    candidates: {plan: {"ms"} or {"failed": reason}}, keyed by the text of the plans, so that candidates with
    the same plan are measured once. The chosen one has the row's time. One whose partial rows exceed the
    memory that "auto" may use has "too_large" and cannot be the best. kind: the kind of the times, "kernels"
    if all candidates have that. ratio: chosen / best, at least 1.
    """
    name = plan_text(chosen["plan"])
    times = {name: {kind: chosen[kind] for kind in ("eager", "kernels") if kind in chosen}}
    too_large = set()
    for schedule in work.alternatives(mode):
        candidate = schedule
        try:
            plans = work.plans(mode, schedule)
            candidate = plan_text(describe(plans))
            if candidate in times:
                continue
            if any(
                plan.partial_bytes > work.most_partial_bytes(direction) for direction, plan in plans.items()
            ):
                too_large.add(candidate)
            call = work.call(work.attention(schedule), mode)
            times[candidate] = timings(call, work.graph.device, budget)
        except (RuntimeError, ValueError) as error:
            times[candidate] = {"failed": measure.reason(error)}
    measured = {plan: t for plan, t in times.items() if "failed" not in t}
    kind = "kernels" if all("median" in t.get("kernels", {}) for t in measured.values()) else "eager"
    ms = {plan: t[kind]["median"] for plan, t in measured.items()}
    best = min(ms.keys() - too_large, key=ms.__getitem__)
    note = {plan: {"too_large": True} for plan in too_large}
    return {
        "candidates": {
            plan: ({"ms": ms[plan]} if plan in ms else t) | note.get(plan, {}) for plan, t in times.items()
        },
        "kind": kind,
        "chosen": name,
        "best": best,
        "ratio": ms[name] / ms[best],
    }
