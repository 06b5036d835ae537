"""Where the learner is: the newest position is always written in the end, older ones only as far as there is time."""

import threading

import pytest

from m2po_jax.learner import position as module
from m2po_jax.learner.position import Position
from m2po_jax.rollouts import Store, read_position


def test_the_newest_position_is_written_and_those_overtaken_are_not(tmp_path, monkeypatch):
    store = Store.open(tmp_path)
    assert read_position(store) is None
    written, slow, write = [], threading.Event(), module.write_position

    def watched(store, version):
        slow.wait(10)
        written.append(version)
        write(store, version)

    monkeypatch.setattr(module, "write_position", watched)
    position = Position(store)
    for version in range(0, 400, 4):
        position.tell(version)
    slow.set()
    position.close()
    assert read_position(store) == written[-1] == 396 and len(written) <= 2
    again = Position(store)
    again.tell(8)
    again.close()
    assert read_position(store) == 8, "a learner that resumes goes back"


def test_a_store_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    def refusing(store, version):
        raise OSError("away")

    monkeypatch.setattr(module, "write_position", refusing)
    position = Position(Store.open(tmp_path))
    position.tell(0)
    with pytest.raises(OSError, match="away"):
        position.close()
