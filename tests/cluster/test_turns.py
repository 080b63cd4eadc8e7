import pytest

from tests.support.clusters import job
from waterflow.cluster.local.coordinator import OnGpu
from waterflow.cluster.local.turns import server_shares
from waterflow.cluster.simulator.speeds import Plain

pytestmark = pytest.mark.virtual


def gpu(*numbers, guest=False):
    return [OnGpu(job(n), guest) for n in numbers]


def test_six_jobs_go_round_four_gpus():
    shares = server_shares([gpu(0, 4), gpu(1, 5), gpu(2), gpu(3)], Plain())
    assert shares == dict.fromkeys(range(6), 4 / 6)


def test_a_free_gpu_of_the_server_is_used_in_turn():
    assert server_shares([gpu(0, 1), gpu()], Plain()) == {0: 1.0, 1: 1.0}


def test_those_with_a_claim_go_first():
    shares = server_shares([gpu(0, 1), gpu(2, 3, guest=True), gpu()], Plain())
    assert shares == {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.5}


def test_those_that_gain_by_it_stay_packed():
    class Packing(Plain):
        def shared(self, spec, other):
            return 0.9 if {spec.index, other.index} == {0, 1} else 0.5

    shares = server_shares([gpu(0, 1), gpu(2, 3)], Packing())
    assert shares == {0: 0.9, 1: 0.9, 2: 0.5, 3: 0.5}
