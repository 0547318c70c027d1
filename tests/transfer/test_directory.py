"""What a peer says of its slots: only a place where its segment can be is opened or connected to."""

import os

import pytest

from mooncake_zmq.core.messages import SegmentRef
from mooncake_zmq.transfer.directory import SegmentDirectory

LIFE = ("p", 1)


def directory(tmp_path, layout, shm_dir=None):
    return SegmentDirectory("d", 1, "here", layout, None, None, shm_dir or tmp_path)


def test_a_neighbours_segment_is_mapped_where_it_lies(make_segment, tmp_path, layout):
    owner, known = make_segment("p"), directory(tmp_path, layout)
    known.learn(LIFE, "here", SegmentRef(path=str(owner.path), endpoint="none", slots=8))
    assert known.segment(LIFE) is not None
    assert known.endpoint(LIFE) is None


@pytest.mark.parametrize(
    "named",
    [
        "{shm}/mooncake=test=other=1",
        "{shm}/mooncake=test=p=2",
        "{shm}/elsewhere=test=p=1",
        "{shm}/p",
        "{shm}/below/mooncake=test=p=1",
        "{shm}/below/../mooncake=test=p=1",
        "mooncake=test=p=1",
        "",
        "\0",
    ],
)
def test_a_path_elsewhere_is_not_opened(make_segment, tmp_path, layout, named):
    shm = tmp_path / "shm"
    (shm / "below").mkdir(parents=True)
    path = named.format(shm=shm)
    if named.startswith("{shm}"):
        os.link(make_segment("p").path, path)  # its bytes would be good
    known = directory(tmp_path, layout, shm)
    known.learn(LIFE, "here", SegmentRef(path=path, endpoint="none", slots=8))
    assert known.segment(LIFE) is None


@pytest.mark.parametrize("named", ["inproc://zeromq.zap.01", "tcp://*:1", "tcp://0.0.0.0:1", "ipc://x", "udp://10.0.0.1:1", ""])
def test_an_endpoint_of_another_kind_is_not_connected_to(tmp_path, layout, named):
    known = directory(tmp_path, layout)
    known.learn(LIFE, "there", SegmentRef(path="/x", endpoint=named, slots=8))
    assert known.endpoint(LIFE) is None


@pytest.mark.parametrize("named", ["tcp://10.0.0.1:5560", "ipc:///run/p.data.ipc"])
def test_an_endpoint_on_another_host_is_known(tmp_path, layout, named):
    known = directory(tmp_path, layout)
    known.learn(LIFE, "there", SegmentRef(path="/x", endpoint=named, slots=8))
    assert known.endpoint(LIFE) == named
