"""One function for each public trace: from a line to a job, or None for what uses no GPU."""

from __future__ import annotations

from datetime import datetime
from difflib import get_close_matches

from waterflow.cluster.spec import JobSpec
from waterflow.cluster.tables import load_json
from waterflow.cluster.traces.rows import Row

_MIB = 1024**2
_GIB = 1024**3


def own(row: Row) -> JobSpec:
    """Our own: job, submit, gpus, seconds, and any of model, tenant, class, memory_gib, ..."""
    cells = row.cells
    kind = cells.get("class") or "guaranteed"
    if kind not in ("guaranteed", "opportunistic"):
        raise row.error("class", f"is {kind!r}", "write guaranteed or opportunistic")
    adaptive = cells.get("adaptive") or "no"
    if adaptive not in ("yes", "no"):
        raise row.error("adaptive", f"is {adaptive!r}", "write yes or no")
    memory = row.number("memory_gib") if cells.get("memory_gib") else 0.0
    least = row.number("least_memory_gib") if cells.get("least_memory_gib") else 0.0
    return JobSpec(
        index=0,
        name=row.text("job"),
        submit=row.number("submit"),
        gpus=row.gpus("gpus"),
        steps=row.number("seconds"),
        model=cells.get("model") or "",
        tenant=cells.get("tenant") or "",
        guaranteed=kind == "guaranteed",
        memory=int(memory * _GIB),
        least_memory=int(least * _GIB),
        utilization=min(row.number("utilization"), 1.0) if cells.get("utilization") else 1.0,
        curve=_curve(row) if cells.get("memory_curve") else (),
        adaptive=adaptive == "yes",
    )


def _curve(row: Row) -> tuple[tuple[float, float], ...]:
    """Shares of a job's memory and its speed with them, like `0.1:0.75 0.5:0.98`."""
    text = row.text("memory_curve")
    remedy = "write shares from small to large with speeds, all from 0 to 1, like 0.1:0.75 0.5:0.98"
    try:
        pairs = [point.split(":") for point in text.split()]
        curve = tuple((float(share), float(speed)) for share, speed in pairs)
    except ValueError:
        raise row.error("memory_curve", f"is {text!r}", remedy) from None
    shares = [share for share, _ in curve]
    good = all(0 < share < 1 and 0 <= speed <= 1 for share, speed in curve)
    if not good or shares != sorted(set(shares)):
        raise row.error("memory_curve", f"is {text!r}", remedy)
    return curve


def itp(row: Row) -> JobSpec:
    """Microsoft ITP: job_id, submission_time, duration, num_gpu."""
    return JobSpec(
        index=0,
        name=row.text("job_id"),
        submit=row.number("submission_time"),
        gpus=row.gpus("num_gpu"),
        steps=row.number("duration"),
    )


def itp_models(row: Row) -> JobSpec:
    """The same with random models, of ElasticFlow: also num_iteration, model_name, batch_size."""
    return _with_model(row, submit="submission_time", iterations="num_iteration")


def elasticflow(row: Row) -> JobSpec:
    """Philly's cluster 103959 with random models, of ElasticFlow."""
    return _with_model(row, submit="submit_time", iterations="iteration")


def _with_model(row: Row, *, submit: str, iterations: str) -> JobSpec:
    """A job with one of ElasticFlow's models; the columns of its submission and its iterations."""
    steps = row.number(iterations)
    seconds = row.number("duration")
    model = row.text("model_name")
    known = load_json("elasticflow_a100")["iterations_per_second"]
    if model not in known:
        near = get_close_matches(model, known, n=2) or sorted(known)[:3]
        remedy = f"near: {', '.join(near)}; or leave models out, with job,submit,gpus,seconds"
        raise row.error("model_name", f"{model!r} has no measured throughput", remedy)
    return JobSpec(
        index=0,
        name=row.text("job_id"),
        submit=row.number(submit),
        gpus=row.gpus("num_gpu"),
        steps=steps or seconds,
        step_seconds=seconds / steps if steps else 1.0,
        model=model,
        batch=int(row.number("batch_size")),
    )


def philly(row: Row) -> JobSpec:
    """Microsoft Philly as Pollux has it: timestamp, duration, num_gpus, gpu_time, cluster."""
    text = row.text("timestamp")
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        remedy = "write a time like 2017-10-09 07:01:55"
        raise row.error("timestamp", f"is {text!r}", remedy) from None
    return JobSpec(
        index=0,
        name=f"line {row.line}",  # the trace has no names
        submit=(at - datetime(2017, 1, 1)).total_seconds(),
        gpus=row.gpus("num_gpus"),
        steps=row.number("duration"),
        tenant=row.text("cluster"),
    )


def muri(row: Row) -> JobSpec:
    """Muri: times in milliseconds, steps of a known model, a class, and the stages of a step."""
    priority = row.text("priority")
    if priority not in ("0", "1"):
        raise row.error("priority", f"is {priority!r}", "write 0 (guaranteed) or 1")
    step = row.number("iteration_time")
    if step == 0:
        raise row.error("iteration_time", "is 0", "write the milliseconds of a step")
    stages = tuple(row.number(f"resource_time_{n}") / 1000 for n in range(3))
    return JobSpec(
        index=0,
        name=row.text("job_id"),
        submit=row.number("submit_time") / 1000,
        gpus=row.gpus("num_gpu"),
        steps=row.number("iterations"),
        step_seconds=step / 1000,
        model=row.text("model_name"),
        guaranteed=priority == "0",
        batch=int(row.number("batch_size")),
        stages=stages,
        utilization=min(stages[1] * 1000 / step, 1.0),
    )


def tiresias(row: Row) -> JobSpec:
    """Tiresias: job_id, num_gpu, submit_time, iterations, model_name, duration, interval."""
    return JobSpec(
        index=0,
        name=row.text("job_id"),
        submit=row.number("submit_time"),
        gpus=row.gpus("num_gpu"),
        steps=float(int(row.number("duration"))),
        model=row.text("model_name"),
    )


def chronus(row: Row) -> JobSpec | None:
    """Chronus: Tiresias' columns, a user, and minutes; jobs of no GPU are left out.

    The artefact does not name the unit; in minutes the days and durations are those of Philly, from
    which the trace was made.
    """
    if row.text("num_gpu") == "0":
        return None
    return JobSpec(
        index=0,
        name=row.text("job_id"),
        submit=60.0 * row.number("submit_time"),
        gpus=row.gpus("num_gpu"),
        steps=60.0 * row.number("duration"),
        model=row.text("model_name"),
        tenant=row.text("user"),
    )


def alibaba(row: Row) -> JobSpec | None:
    """Alibaba 2023: pods with a share of a GPU; those without a GPU, or never run, are left out."""
    if row.text("num_gpu") == "0":
        return None
    if "scheduled_time" not in row.cells:
        raise row.error("scheduled_time", "is missing", "this list has no times: take another")
    if not row.cells["scheduled_time"]:
        return None
    seconds = row.number("deletion_time") - row.number("scheduled_time")
    if seconds < 0:
        raise row.error("deletion_time", "is before scheduled_time", "remove the line")
    return JobSpec(
        index=0,
        name=row.text("name"),
        submit=row.number("creation_time"),
        gpus=row.gpus("num_gpu"),
        steps=seconds,
        tenant=row.text("qos"),
        guaranteed=row.text("qos") != "BE",
        utilization=min(row.number("gpu_milli") / 1000, 1.0),
    )


def gavel(row: Row) -> JobSpec:
    """Gavel: a type and steps, whose duration comes from the table of V100 throughputs.

    Some types were not measured on as many GPUs as its traces ask for; they take the rate on the
    most GPUs that were (steps per second hardly depend on it: each GPU has its own batch).
    """
    gpus, kind = row.gpus("scale_factor"), row.text("type")
    rates = load_json("gavel_v100")["steps_per_second"]
    if kind not in rates:
        near = get_close_matches(kind, rates, n=2) or sorted(rates)[:3]
        raise row.error("type", f"{kind!r} has no measured throughput", f"near: {', '.join(near)}")
    measured = max((int(n) for n in rates[kind] if int(n) <= gpus), default=1)
    return JobSpec(
        index=0,
        name=f"line {row.line}",
        submit=row.number("arrival"),
        gpus=gpus,
        steps=row.number("steps"),
        step_seconds=1.0 / rates[kind][str(measured)],
        model=kind,
    )


def shockwave(row: Row) -> JobSpec:
    """Shockwave: Gavel's columns with a measured duration."""
    steps = row.number("steps")
    seconds = row.number("duration")
    return JobSpec(
        index=0,
        name=f"line {row.line}",
        submit=row.number("arrival"),
        gpus=row.gpus("scale_factor"),
        steps=steps or seconds,
        step_seconds=seconds / steps if steps else 1.0,
        model=row.text("type"),
    )
