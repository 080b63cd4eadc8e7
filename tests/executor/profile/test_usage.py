"""What a step is seen to use, beside what its graph says."""

from __future__ import annotations

import pytest

from tests.support.jobs import MODELS
from waterflow.executor.device.host import HostDevice
from waterflow.executor.run.instructions import CallOperator, ReadScalar
from waterflow.executor.run.rng import JobRng
from waterflow.job.training_step import eager_step
from waterflow.partitioner.graph.effects import memory_roots, writes
from waterflow.steps.job_steps import JobSteps

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("name", ["cnn", "tied", "in_place", "transposed", "encoder"])
def test_uses_are_those_of_the_graph(name):
    job = MODELS[name]()
    steps = JobSteps(job, HostDevice(), JobRng(0), 1)
    batch = next(iter(job.data))
    eager_step(job, batch)
    steps.cache.collect_persistent()
    prepared = steps.preparer.prepare(batch)
    step = prepared.specialization.steady
    use = steps.builder.profiler.observe(step, None, prepared.flat)
    roots, inputs = memory_roots(step.graph.nodes), step.graph.inputs
    assert any(value.is_persistent for value in use.values)
    for number, meanings in use.inputs.items():
        mine = {roots.get(inputs[meaning]) for meaning in meanings if meaning in inputs} - {None}
        touching, writing = set(), set()
        for index, instruction in enumerate(step.compiled.lowered.instructions):
            node = instruction.node
            is_call = isinstance(instruction, CallOperator)
            if not (is_call or isinstance(instruction, ReadScalar)):
                continue
            if is_call and node.target.is_view:
                continue
            if any(roots.get(source) in mine for source in (node, *node.all_input_nodes)):
                touching.add(index)
            if any(roots.get(target) in mine for target in writes(node)):
                writing.add(index)
        assert set(use.values[number].uses) == touching
        assert use.values[number].writes == writing
    freed = {int(e["id"]): int(e["node"]) for e in use.profile.events if e["bytes"] < 0}
    made = {int(e["id"]): int(e["node"]) for e in use.profile.events if e["bytes"] > 0}
    for value in use.values:
        if value.block is not None:
            assert made[value.block] == value.uses[0] in value.writes
            assert value.uses[-1] <= freed[value.block]
