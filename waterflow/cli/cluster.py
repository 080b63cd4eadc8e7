"""The commands about many GPUs: `waterflow cluster simulate` and `waterflow cluster policies`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from waterflow.cli.shared import (
    INTERRUPTED,
    AsJson,
    WholeHelp,
    clean_stdout,
    one_line_errors,
    print_table,
)

if TYPE_CHECKING:
    from waterflow.cluster import ClusterSpec, JobSpec, Results

app = typer.Typer(
    cls=WholeHelp, no_args_is_help=True, help="Who trains where on many GPUs, in simulated time."
)

_EVERY = 2.0  # seconds between two lines of progress


@app.command()
def simulate(
    trace: Annotated[Path, typer.Argument(help="jobs: a public trace, or job,submit,gpus,seconds")],
    policy: Annotated[str, typer.Option(help="one or more, like fifo,tiresias")] = "fifo",
    nodes: Annotated[int | None, typer.Option(help="equal machines")] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of each")] = 8,
    memory_gib: Annotated[float, typer.Option(help="memory of each GPU")] = 32.0,
    cluster: Annotated[
        Path | None, typer.Option(help="a TOML file with [[node]] and [quotas] instead of --nodes")
    ] = None,
    format: Annotated[str, typer.Option(help="the trace's, where it is not recognised")] = "",
    compat: Annotated[
        str, typer.Option(help="do as the simulator of tiresias or muri, artefacts included")
    ] = "",
    costs: Annotated[
        str, typer.Option(help="of moves: free, measured (by papers), stop-resume (30 s each)")
    ] = "free",
    pairs: Annotated[
        Path | None, typer.Option(help="what `waterflow pair --json` printed: speeds of pairs")
    ] = None,
    failures: Annotated[
        float, typer.Option(help="mean days between two failures of a node; 0: none")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="of the failures")] = 0,
    skip_too_large: Annotated[
        bool, typer.Option("--skip-too-large", help="leave out jobs larger than the cluster")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="a folder for pictures, tables and a page")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate policies on a trace, side by side: completion times, makespan, preemptions.

    Ctrl-C ends the policy at work with what it has done (exit code 130); the others are left out.
    """
    from waterflow.cluster import make_policy, read_trace
    from waterflow.common.errors import JobError

    with one_line_errors(), clean_stdout(as_json):
        machines = _machines(cluster, nodes, gpus_per_node, memory_gib)
        jobs = read_trace(trace, format)
        if skip_too_large:
            jobs = _small_enough(jobs, machines)
        names = [name.strip() for name in policy.split(",") if name.strip()]
        if not names:
            raise JobError("no policy is named: say --policy fifo,tiresias")
        for name in names:
            make_policy(name, compat)
        settings = _settings(costs, failures, seed, pairs)
        results = {}
        for name in names:
            results[name] = _one(jobs, machines, name, compat, settings)
            if results[name].interrupted:
                break
        if out is not None:
            _write(out, trace, machines, results)
    _show(trace, machines, results, as_json)
    if any(found.interrupted for found in results.values()):
        raise typer.Exit(INTERRUPTED)


@app.command()
def policies(as_json: AsJson = False) -> None:
    """List the policies, and the papers that they are from."""
    import json

    from waterflow.cluster.policies import POLICIES
    from waterflow.report.table import Column, FittedTable

    if as_json:
        rows = {n: {"source": p.source, "summary": p.summary} for n, p in POLICIES.items()}
        typer.echo(json.dumps(rows))
        return
    words = Column("what it does", words=True, wraps=True), Column("from", words=True, wraps=True)
    table = FittedTable("policies", Column("policy"), *words)
    for name, kind in POLICIES.items():
        table.add_row(name, kind.summary, kind.source)
    print_table(table)


def _machines(
    cluster: Path | None, nodes: int | None, gpus_per_node: int, memory_gib: float
) -> ClusterSpec:
    from waterflow.cluster import ClusterSpec
    from waterflow.common.errors import JobError

    if (cluster is None) == (nodes is None):
        raise JobError("say which machines: --nodes 20, or --cluster spec.toml, and not both")
    if cluster is not None:
        return ClusterSpec.load(cluster)
    assert nodes is not None
    return ClusterSpec.of(nodes, gpus_per_node, memory=int(memory_gib * 1024**3))


def _small_enough(jobs: tuple[JobSpec, ...], machines: ClusterSpec) -> tuple[JobSpec, ...]:
    from dataclasses import replace

    kept = [job for job in jobs if job.gpus <= machines.gpus]
    if len(kept) < len(jobs):
        typer.echo(f"waterflow: {len(jobs) - len(kept)} jobs are too large: left out", err=True)
    return tuple(replace(job, index=index) for index, job in enumerate(kept))


def _settings(costs: str, failures: float, seed: int, pairs: Path | None) -> dict[str, Any]:
    from waterflow.cluster.simulator.costs import COSTS
    from waterflow.cluster.simulator.failures import Failures
    from waterflow.cluster.simulator.pairs import read_pairs
    from waterflow.common.errors import JobError

    if costs not in COSTS:
        raise JobError(f"there are no costs {costs!r}: say one of {', '.join(COSTS)}")
    if failures < 0:
        raise JobError(f"--failures {failures} is negative: give days, or 0 for none")
    found: dict[str, Any] = {"costs": COSTS[costs]}
    if pairs is not None:
        found["speeds"] = read_pairs(pairs)
    if failures:
        found["failures"] = Failures(mean=failures * 86400, seed=seed)
    return found


def _one(
    jobs: tuple[JobSpec, ...],
    machines: ClusterSpec,
    name: str,
    compat: str,
    settings: dict[str, Any],
) -> Results:
    from waterflow.cluster import simulate as run

    last = time.monotonic()

    def progress(now: float, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _EVERY:
            last = time.monotonic()
            typer.echo(f"{name}: day {now / 86400:.1f}, {done} of {total} jobs done", err=True)

    return run(jobs, machines, name, compat=compat, progress=progress, **settings)


def _write(out: Path, trace: Path, machines: ClusterSpec, results: dict[str, Results]) -> None:
    from waterflow.cluster.report.page import write_report

    write_report(out, trace.name, machines.gpus, results)
    typer.echo(f"report written to {out / 'index.html'}", err=True)


def _show(trace: Path, machines: ClusterSpec, results: dict[str, Results], as_json: bool) -> None:
    import json
    import math

    if as_json:
        document = {
            "trace": str(trace),
            "gpus": machines.gpus,
            "policies": {name: found.summary() for name, found in results.items()},
        }
        for row in document["policies"].values():  # type: ignore[attr-defined]
            row.update({k: None for k, v in row.items() if isinstance(v, float) and math.isnan(v)})
        typer.echo(json.dumps(document))
        return
    from waterflow.cluster.report.tables import side_by_side

    print_table(side_by_side(trace.name, machines.gpus, results))
    if any(not found.finished for found in results.values()):
        typer.echo("not all jobs are done: figures are of those that are", err=True)
