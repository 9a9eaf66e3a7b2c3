"""A plan in words, and as a row of a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from tools.planning.analytic import SPARE, Plan
from tools.planning.chips import GIB

HEAD = ("slice", "mesh", "episodes a step", "state, GiB", "the rest, GiB", "of HBM, GiB", "to spare", "model PFLOP", "sent, GiB", "step, s",
        "bound by", "MFU", "episodes an hour", "from")  # fmt: skip
STATE = ("parameters", "optimiser")


def mesh(plan: Plan) -> str:
  return " x ".join(f"{axis} {n}" for axis, n in plan.mesh.items() if n > 1) or "one device"


def text(plan: Plan, what: str) -> str:
  """Several lines. what: the model and its rows, in words."""
  chip, s = plan.topology.chip, plan.seconds
  sizes = sorted(plan.memory.items(), key=lambda kv: -kv[1])
  sent = ", ".join(f"{kind} {size / GIB:.1f} GiB in {count}" for kind, (count, size) in plan.collectives.items()) or "none"
  by = {"compiled": " (FLOPs, compute and HBM time by arithmetic)", "refused": " (all by arithmetic)"}.get(plan.source, "")
  fits = "refused by the compiler, by arithmetic " if plan.source == "refused" else ""
  fits += f"{plan.spare:.0%} to spare" if plan.spare >= 0 else f"{-plan.spare:.0%} too much"
  return "\n".join(
    [
      f"{plan.topology.name} ({plan.topology.count} x {chip.name}), mesh {mesh(plan)}, {plan.rows} rows of {what} [{plan.source}]",
      f"  memory a device: {plan.total / GIB:.1f} of {chip.hbm / GIB:.1f} GiB, {fits}"
      + ("" if plan.spare >= SPARE else f" (wanted {SPARE:.0%})"),
      "    " + ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in sizes),
      f"  work a step: {plan.flops['model'] / 1e15:.1f} PFLOP of the model, {plan.flops['computed'] / 1e15:.1f} computed; "
      f"HBM {plan.hbm_bytes / 1e12:.1f} TB a device",
      f"  collectives, sent by a device: {sent}",
      f"  time: compute {s['compute']:.2f} s, HBM {s['hbm']:.2f} s, interconnect {s['interconnect']:.2f} s, exposed {s['exposed']:.2f} s "
      f"-> {plan.step:.2f} s a step, bound by {plan.bound}; MFU {plan.mfu:.1%}; {plan.episodes_per_hour:,.0f} episodes an hour learnt{by}",
      *(f"  {note}" for note in plan.notes),
    ]
  )


def row(plan: Plan) -> str:
  state = sum(plan.memory[k] for k in STATE)
  cells = [plan.topology.name, mesh(plan), plan.rows, f"{state / GIB:.1f}", f"{(plan.total - state) / GIB:.1f}",
           f"{plan.total / GIB:.1f} / {plan.topology.chip.hbm / GIB:.1f}", f"{plan.spare:.0%}", f"{plan.flops['model'] / 1e15:.1f}",
           f"{sum(size for _, size in plan.collectives.values()) / GIB:.0f}", f"{plan.step:.1f}", plan.bound, f"{plan.mfu:.0%}",
           f"{plan.episodes_per_hour:,.0f}", plan.source + (", time by arithmetic" if plan.source == "compiled" else "")]  # fmt: skip
  return line(cells)


def line(cells: Sequence) -> str:
  return "| " + " | ".join(map(str, cells)) + " |"


def table(plans: Sequence[Plan]) -> str:
  return "\n".join([line(HEAD), "|---" * len(HEAD) + "|", *map(row, plans)])
