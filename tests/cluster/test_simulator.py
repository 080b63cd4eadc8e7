import math
from dataclasses import replace

import pytest

from tests.support.clusters import job
from waterflow.cluster import ClusterSpec, simulate
from waterflow.cluster.policies.antman import AntMan
from waterflow.cluster.policies.elastic_tiresias import ElasticTiresias
from waterflow.cluster.policies.tiresias import Tiresias
from waterflow.cluster.simulator.costs import Costs
from waterflow.cluster.simulator.failures import Failures
from waterflow.cluster.simulator.measured import Measured, locality, scaling
from waterflow.cluster.simulator.pairs import read_pairs
from waterflow.cluster.simulator.speeds import Plain
from waterflow.common.errors import JobError

pytestmark = pytest.mark.virtual

ONE = ClusterSpec.of(1, 1)


def test_one_after_another():
    found = simulate([job(0), job(1, 10.0), job(2, 20.0)], ONE, "fifo")
    assert found.start.tolist() == [0, 100, 200]
    assert found.finish.tolist() == [100, 200, 300]
    assert found.average_jct == (100 + 190 + 280) / 3
    assert found.makespan == 300
    assert found.gpus_over_time[1] == [(100, 1), (200, 0)]
    assert found.queue_length.tolist() == [0, 1, 2, 1, 0, 0]
    assert found.service.tolist() == [100, 100, 100]


def test_a_preempted_job_goes_on_where_it_was_and_pays_to_come_back():
    jobs = [job(0, seconds=100), job(1, 50.0, seconds=10)]
    free = simulate(jobs, ONE, "srtf")
    assert free.finish.tolist() == [110, 60]
    assert free.preemptions.tolist() == [1, 0]
    paid = simulate(jobs, ONE, "srtf", costs=Costs(start=2, resume=5))
    # 2 s to start, 48 s of work; the other 2 + 10 s; then 2 + 5 s and the 52 s that are left.
    assert paid.finish.tolist() == [121, 62]


def test_tiresias_moves_down_those_that_have_had_their_share():
    jobs = [job(0, gpus=2, seconds=100), job(1, 10.0, gpus=2, seconds=20)]
    cluster = ClusterSpec.of(1, 2)
    # 80 GPU seconds are reached at 40 s; then the new job is served first.
    found = simulate(jobs, cluster, Tiresias(limits=(80.0,)), speeds=Plain())
    assert found.start.tolist() == [0, 40]
    assert found.finish.tolist() == [120, 60]
    assert simulate(jobs, cluster, Tiresias(limits=(1e9,))).finish.tolist() == [100, 120]


def test_elastic_jobs_shrink_under_load_and_grow_into_idle_gpus():
    cluster = ClusterSpec.of(1, 4)
    grown = simulate([job(0, gpus=2)], cluster, ElasticTiresias(), speeds=Plain())
    assert grown.gpus_over_time[0][0] == (0, 4)
    assert grown.finish.tolist() == [50]
    policy = ElasticTiresias(limits=(100.0, 1e6), most_waiting=0)
    jobs = [job(0, gpus=4, seconds=100), job(1, 50.0, gpus=2, seconds=100)]
    found = simulate(jobs, cluster, policy, speeds=Plain())
    # In the second queue when the other comes: both run, on two GPUs each.
    assert found.gpus_over_time[0][:2] == [(0, 4), (50, 2)]
    assert found.start[1] == 50
    assert found.preemptions.sum() == 0


def test_growing_costs_what_it_says():
    jobs = [job(0, gpus=2, seconds=100), job(1, 0.0, gpus=2, seconds=50)]
    costs = Costs(grow=30)
    found = simulate(jobs, ClusterSpec.of(1, 4), ElasticTiresias(), speeds=Plain(), costs=costs)
    assert found.resizes.tolist() == [1, 0]
    assert found.finish.tolist() == [50 + 30 + 25, 50]


def test_an_opportunistic_job_runs_in_the_gaps_of_a_guaranteed_one():
    jobs = [job(0, seconds=100, utilization=0.6), job(1, seconds=40, guaranteed=False)]
    found = simulate(jobs, ONE, "antman")
    assert found.finish[0] == pytest.approx(100, rel=0.011)
    # Ten seconds until the GPU's load is known, then 40 % of the time.
    assert found.finish[1] == pytest.approx(10 + 36 / 0.4 * 0.4 + 4 + 60, abs=12)
    assert found.opportunistic[1] > 0


def test_a_guaranteed_job_has_its_memory_though_a_guest_must_go():
    guest = job(0, seconds=500, guaranteed=False, utilization=0.1, memory=10, least_memory=4)
    small = job(1, 100.0, utilization=0.5, memory=26, least_memory=20)
    cluster = ClusterSpec.of(1, 1, memory=32)
    beside = simulate([guest, small], cluster, "antman", speeds=Measured())
    assert beside.preemptions.tolist() == [0, 0]
    large = job(1, 100.0, utilization=0.5, memory=30, least_memory=20)  # 30 + 4 do not fit
    found = simulate([guest, large], cluster, "antman", speeds=Measured())
    assert found.preemptions.tolist() == [1, 0]
    assert found.finish[1] == beside.finish[1] == 200


def test_guaranteed_jobs_that_only_wait_are_as_fast_as_alone():
    # AntMan, section 5.2, in small: a tenant with a claim to all GPUs, and one with none.
    cluster = ClusterSpec.of(2, 2, quotas={"a": 4, "b": 0})
    mine = [job(i, i * 60.0, 1 + i % 2, 300, tenant="a", utilization=0.7) for i in range(12)]
    others = [
        job(12 + i, i * 30.0, 1, 500, tenant="b", guaranteed=False, utilization=0.9)
        for i in range(12)
    ]
    policy = AntMan(patience=math.inf)
    ordered = sorted([*mine, *others], key=lambda one: one.submit)
    both = [replace(one, index=index) for index, one in enumerate(ordered)]
    shared = simulate(both, cluster, policy)
    times = shared.completion_times[[one.tenant == "a" for one in both]]
    exclusive = simulate(mine, cluster, policy).completion_times
    assert times.mean() <= 1.01 * exclusive.mean()
    assert shared.opportunistic.sum() > 0


def test_a_failed_node_costs_what_came_after_the_last_checkpoint():
    class Once(Failures):
        def first(self, cluster):
            yield 50.0, 0

        def next(self, node, now):
            return math.inf

    failures = Once(mean=1.0, repair=100.0, checkpoint=30.0)
    found = simulate([job(0, seconds=100)], ONE, "fifo", failures=failures)
    assert found.finish.tolist() == [150 + 70]  # 30 of 50 s are kept


def test_the_same_seed_gives_the_same_failures():
    jobs = [job(i, i * 10.0, seconds=5000) for i in range(20)]
    runs = [
        simulate(jobs, ClusterSpec.of(4, 2), "fifo", failures=Failures(5000.0, 60.0, 100.0, seed))
        for seed in (1, 1, 2)
    ]
    assert runs[0].finish.tolist() == runs[1].finish.tolist()
    assert runs[0].finish.tolist() != runs[2].finish.tolist()


def test_jobs_of_no_length_end_at_once():
    assert simulate([job(0, 5.0, seconds=0)], ONE, "tiresias").finish.tolist() == [5]


def test_a_policy_that_starts_nothing_ends():
    found = simulate([job(0)], ONE, "nop")
    assert not found.finished
    assert math.isnan(found.average_jct)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([], "the trace has no jobs"),
        ([job(0, gpus=2)], "job 'j0' asks for 2 GPUs and the cluster has 1"),
        ([job(0, memory=2**60)], "job 'j0' needs .* bytes on each GPU"),
        ([job(1)], "job 'j1' has the number 1 and is job 0"),
    ],
)
def test_what_cannot_be_simulated_is_refused(jobs, message):
    with pytest.raises(JobError, match=message):
        simulate(jobs, ONE, "fifo")


def test_measured_speeds():
    speeds = Measured()
    vgg = job(0, gpus=8, model="vgg16", batch=256)
    assert speeds.step_time(vgg, 8, 1) == 1.0
    assert speeds.step_time(vgg, 4, 1) == pytest.approx(7.9964 / 4.6419, rel=1e-4)
    assert scaling("vgg16", 256, 6) == pytest.approx((4.6419 + 7.9964) / 2 / 1.3137, rel=1e-4)
    assert locality("alexnet", 8, 4) == pytest.approx(0.2684)
    assert locality("unheard of", 8, 4) == 1.0
    assert 1 < scaling("unheard of", 64, 2) < 2


def test_pairs_are_measured_or_what_both_use():
    speeds = Measured()
    small, large = (job(0, model=f"ResNet-18 (batch size {n})") for n in (16, 256))
    assert speeds.shared(small, large) == pytest.approx(24.4546 / 32.3534, abs=1e-3)
    # This pair of Gavel's table was never measured: both rates are exactly those alone.
    assert speeds.shared(small, small) == 0.5
    half = job(0, utilization=0.5)
    assert speeds.shared(half, half) == 1.0


def test_pairs_of_the_planner_are_what_two_jobs_get(tmp_path):
    path = tmp_path / "pairs.json"
    path.write_text('[{"names": ["bert", "vgg16"], "speed": 1.5, "batch": [8, 8]}]')
    speeds = read_pairs(path)
    vgg, bert = job(0, model="vgg16"), job(1, model="bert")
    assert speeds.shared(vgg, bert) == speeds.shared(bert, vgg) == 0.75
    assert speeds.shared(vgg, vgg) == 0.5
    for text in ("[]", "{}", '[{"names": ["a", "b"]}]', '[{"names": ["a"], "speed": 1}]', "x"):
        path.write_text(text)
        with pytest.raises(JobError, match="has no pairs"):
            read_pairs(path)
