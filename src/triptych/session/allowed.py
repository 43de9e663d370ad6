"""What a request leaves out of its pictures and of its cache, within what the operator allows."""

from __future__ import annotations

import msgspec

from triptych.core.bundle import Manifest
from triptych.core.policy import Compression, KVPolicy, Reduction
from triptych.engine.config import EnginePlan
from triptych.errors import RequestError


def reduction(asked: Compression, plan: EnginePlan) -> Reduction:
    """The operator's own unless the request says otherwise; never less than `min_keep`. Raises RequestError."""
    keep = plan.reduction.keep if asked.keep_visual is None else asked.keep_visual
    if keep < plan.min_keep:
        raise RequestError(
            f"`triptych.keep_visual` is {keep}, the least that may be asked for here is {plan.min_keep}",
            hint="the operator sets it: `--reduce METHOD:KEEP:MIN`",
            param="triptych.keep_visual",
        )
    return Reduction(method=asked.reduce or plan.reduction.method, keep=keep)


def kv_policy(asked: Compression, plan: EnginePlan, manifest: Manifest) -> KVPolicy | None:
    """None where nothing is forgotten; never less than the operator's budget. Raises RequestError."""
    least = 1.0 if plan.kv_budget is None else plan.kv_budget
    budget = least if asked.kv_budget is None else asked.kv_budget
    if budget < least:
        has = "keeps every key and value" if plan.kv_budget is None else f"keeps a share of at least {least}"
        raise RequestError(
            f"`triptych.kv_budget` is {budget}, this server {has}",
            hint="the operator sets it: `--kv-budget SHARE`",
            param="triptych.kv_budget",
        )
    if budget == 1.0:
        return None
    return msgspec.structs.replace(manifest.kv_policy or KVPolicy(method="knorm"), budget=budget)
