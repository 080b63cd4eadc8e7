import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from waterflow.partitioner import EVENT, Profile, node_times
from waterflow.partitioner.testing import profiles, step_profile

pytestmark = pytest.mark.virtual


def make(events, nodes=4, **other):
    return Profile(
        np.array(events, dtype=EVENT), np.zeros(nodes), other.pop("persistent", 0), **other
    )


def test_a_small_step_by_hand():
    profile = step_profile(
        [[4], [8, 2, -2], [], [-8], [-4, 3]], seconds=[1, 2, 3, 4, 5], persistent=100
    )
    assert profile.curve().tolist() == [4, 12, 14, 12, 4, 0, 3]
    assert profile.node_net().tolist() == [4, 8, 0, -8, -1]
    assert profile.node_live().tolist() == [0, 4, 12, 12, 4, 3]
    assert profile.node_high().tolist() == [4, 14, 12, 12, 4]
    assert profile.transient_peak_bytes == 14
    assert profile.solo_peak_bytes == 114
    assert profile.surviving_bytes == 3
    assert profile.peak_node == 1
    assert profile.num_nodes == 5
    assert profile.seconds == 15


def test_a_step_without_events_is_flat():
    profile = make([], nodes=2, persistent=7)
    assert profile.solo_peak_bytes == 7
    assert profile.peak_node == 0
    assert profile.node_live().tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([(1, 8, 0), (0, 8, 1)], "must not decrease"),
        ([(4, 8, 0)], r"lie in 0\.\.3"),
        ([(-1, 8, 0)], r"lie in 0\.\.3"),
        ([(0, 0, 0)], "0 bytes"),
        ([(0, 8, 1)], "count up from 0"),
        ([(0, 8, 0), (0, 8, 0)], "count up from 0"),
        ([(0, 8, 0), (1, -8, 1)], "block 1 is freed but never allocated"),
        ([(0, -8, -1)], "block -1 is freed but never allocated"),
        ([(0, 8, 0), (1, -8, 0), (2, -8, 0)], "block 0 is freed more than once"),
        ([(0, 8, 0), (1, -8, 1), (2, 8, 1)], "block 1 is freed before it is allocated"),
        ([(0, 8, 0), (1, -4, 0)], "block 0 is freed with other bytes"),
    ],
)
def test_wrong_events_are_refused(events, message):
    with pytest.raises(ValueError, match=message):
        make(events, name="x")


def test_wrong_headers_are_refused():
    for change, message in (
        ({"node_seconds": np.zeros(0)}, "at least one"),
        ({"node_seconds": np.zeros((2, 2))}, "vector"),
        ({"node_seconds": np.array([1.0, np.nan, 0, 0])}, "finite"),
        ({"node_seconds": np.array([1.0, -1.0, 0, 0])}, "not negative"),
        ({"persistent_bytes": -1}, "below 0"),
        ({"persistent_bytes": 1.5}, "not an int"),
        ({"source": "guess"}, "source is 'guess'"),
        ({"events": np.zeros(3)}, "dtype EVENT"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(make([(0, 8, 0)]), **change)


def test_a_profile_cannot_be_changed():
    events = np.array([(0, 8, 0)], dtype=EVENT)
    profile = Profile(events, np.zeros(1), 0)
    events["bytes"] = 9
    assert profile.transient_peak_bytes == 8
    for array in (profile.events, profile.node_seconds, profile.curve(), profile.node_live()):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = array


@given(profiles(), st.integers(0, 1 << 40))
def test_the_same_step_of_another_job_is_what_would_be_made_anew(profile, held):
    curve = profile.curve()
    found = profile.beside(name="other", persistent_bytes=held)
    anew = dataclasses.replace(profile, name="other", persistent_bytes=held)
    assert (found.name, found.solo_peak_bytes) == (anew.name, anew.solo_peak_bytes)
    assert found.to_bytes() == anew.to_bytes()
    assert found.curve() is curve
    assert profile.beside().to_bytes() == profile.to_bytes()
    for wrong, message in ((-1, "profile 'other': .* below 0"), (1.5, "not an int")):
        with pytest.raises(ValueError, match=message):
            profile.beside(name="other", persistent_bytes=wrong)


def test_unknown_time_of_one_job_makes_node_counts_the_time_of_all():
    known = step_profile([[1], [-1]], seconds=[3.0, 4.0])
    unknown = step_profile([[1], [2], [-1]])
    assert [times.tolist() for times in node_times([known, known])] == [[3, 4], [3, 4]]
    mixed = node_times([known, unknown])
    assert [len(times) for times in mixed] == [2, 3]
    assert len(set(np.concatenate(mixed).tolist())) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(profile=profiles())
def test_npz_round_trip(tmp_path, profile):
    path = tmp_path / "profile.npz"
    dataclasses.replace(profile, name="résnet", source="measured").to_npz(path)
    read = Profile.from_npz(path)
    assert np.array_equal(read.events, profile.events)
    assert np.array_equal(read.node_seconds, profile.node_seconds)
    assert (read.name, read.source) == ("résnet", "measured")
    assert read.persistent_bytes == profile.persistent_bytes
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.npz"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_a_value_error_or_the_same_profile(tmp_path, data):
    path = tmp_path / "profile.npz"
    profile = step_profile([[4], [8], [-8], [-4]], persistent=5)
    profile.to_npz(path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), label="truncate"):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        read = Profile.from_npz(path)
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017 (damage to unused zip fields may go unseen)
    else:
        assert np.array_equal(read.events, profile.events)
        assert read.persistent_bytes == profile.persistent_bytes


def test_files_that_are_no_profile(tmp_path):
    path = tmp_path / "profile.npz"
    for content in (b"", b"hello", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="does not hold a valid profile"):
            Profile.from_npz(path)
    with pytest.raises(FileNotFoundError):
        Profile.from_npz(tmp_path / "absent.npz")


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "profile.npz"
    step_profile([[4], [-4]], name="old").to_npz(path)

    def no_space(*_args, **_kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", no_space)
    with pytest.raises(OSError, match="no space left"):
        step_profile([[4], [-4]], name="new").to_npz(path)
    assert Profile.from_npz(path).name == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.npz"]
