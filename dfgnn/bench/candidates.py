"""``--oracle``: every plan that the scheduler could have taken, measured beside the one that it took."""

from functools import partial

from . import measure
from .measure import timings
from .report import plan_text
from .workloads import Workload


def describe(plans: dict) -> dict[str, dict]:
    """Plans by direction as plain data: schedule, longest item, heads at a time (0: all), parts of the
    sources, number of items, and of rows that are split into how many pieces, with the bytes of these.
    """
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
    """{"candidates", "kind", "chosen", "best", "ratio"} for a measured row with the schedule "auto".

    candidates: {plan: {"ms"} or {"failed": reason}}, by the text of its plans, so that candidates that come
    to the same plan are measured once; the chosen one has the row's own time, and one whose partial rows
    exceed the memory that "auto" may take "too_large": it is not the best. kind: of the times, "kernels"
    where all have it. ratio: chosen / best, at least 1.
    """
    name = plan_text(chosen["plan"])
    found = {name: {kind: chosen[kind] for kind in ("eager", "kernels") if kind in chosen}}
    too_large = set()
    for schedule in work.alternatives(mode):
        candidate = schedule
        try:
            plans = work.plans(mode, schedule)
            candidate = plan_text(describe(plans))
            if candidate in found:
                continue
            if any(
                plan.partial_bytes > work.most_partial_bytes(direction) for direction, plan in plans.items()
            ):
                too_large.add(candidate)
            call = work.call(partial(work.layer.attention, work.graph, schedule=schedule), mode)
            found[candidate] = timings(call, work.graph.device, budget)
        except (RuntimeError, ValueError) as error:
            found[candidate] = {"failed": measure.reason(error)}
    measured = {plan: t for plan, t in found.items() if "failed" not in t}
    kind = "kernels" if all("median" in t.get("kernels", {}) for t in measured.values()) else "eager"
    ms = {plan: t[kind]["median"] for plan, t in measured.items()}
    best = min(ms.keys() - too_large, key=ms.__getitem__)
    note = {plan: {"too_large": True} for plan in too_large}
    return {
        "candidates": {
            plan: ({"ms": ms[plan]} if plan in ms else t) | note.get(plan, {}) for plan, t in found.items()
        },
        "kind": kind,
        "chosen": name,
        "best": best,
        "ratio": ms[name] / ms[best],
    }
