"""When a process that lives is as good as dead.

The launcher looks at the heartbeats of its children and ends one whose step does not end, or that does
nothing at all. One that a debugger holds is left alone.
"""

from text_generation_inference.engine.heartbeat import STOPPED_LIMIT_S, Watch, is_stopped, is_traced

_SILENT_S = 1.0  # from which on the kernel is asked


def find_hang(watch: Watch, pid: int) -> str | None:
    """What is wrong with a process, in words; None: nothing."""
    signs = watch.look()
    stopped = signs.silent_s > _SILENT_S and is_stopped(pid)
    if signs.silent_s > (min(STOPPED_LIMIT_S, signs.limit_s) if stopped else signs.limit_s):
        what = "hung: it has been stopped" if stopped else "hung: it has shown no sign of life"
        what += f" for {signs.silent_s:.0f} s"
    elif signs.is_stuck:
        what = "hung: it has been stopped" if stopped else f"hung: a step has been running for {signs.turn_s:.0f} s"
    else:
        return None
    if is_traced(pid):
        watch.forgive()
        return None
    return what
