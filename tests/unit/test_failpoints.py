"""Faults on demand."""

import time

import pytest

from text_generation_inference import failpoints
from text_generation_inference.errors import StartError
from text_generation_inference.failpoints import FailpointError, failpoint


@pytest.fixture(autouse=True)
def off_again():
    yield
    failpoints.configure(None)


def test_nothing_happens_unless_asked():
    failpoint("engine.plan")
    failpoints.configure("engine.apply=raise")
    failpoint("engine.plan")


def test_raise_every_time_and_the_nth_time():
    failpoints.configure("engine.plan=raise; engine.apply=raise@2")
    for _ in range(2):
        with pytest.raises(FailpointError, match="engine.plan"):
            failpoint("engine.plan")
    failpoint("engine.apply")
    with pytest.raises(FailpointError):
        failpoint("engine.apply")
    failpoint("engine.apply")


def test_lack_of_memory_reads_as_the_device_says_it():
    failpoints.configure("engine.launch=memory")
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        failpoint("engine.launch")


def test_delay():
    failpoints.configure("api.write=delay:0.05")
    start = time.monotonic()
    failpoint("api.write")
    assert time.monotonic() - start >= 0.05


def test_a_file_may_change_meanwhile(tmp_path):
    asked = tmp_path / "asked"
    failpoints.configure(f"@{asked}")
    failpoint("engine.plan")
    asked.write_text("engine.plan=raise@1")
    with pytest.raises(FailpointError):
        failpoint("engine.plan")
    failpoint("engine.plan")
    asked.write_text("")
    failpoint("engine.plan")


@pytest.mark.parametrize("text", ["engine.plam=raise", "engine.plan=explode", "engine.plan"])
def test_what_is_no_failpoint_is_told(text):
    with pytest.raises(StartError, match="TGI_FAILPOINTS"):
        failpoints.configure(text)
