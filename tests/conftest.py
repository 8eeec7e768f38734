import atexit
import gc
import os
import re
import sys
import tempfile
from importlib.metadata import version
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.update(
    OMP_NUM_THREADS="1",
    # A program that is alone computes with a thread for each core, all but one of which would spin
    # while they wait: of a short run that is three quarters of its CPU time.
    OMP_WAIT_POLICY="passive",
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    # Memory comes in pages of 2 MiB: the kernel takes 5 % of the tests' time for small ones.
    GLIBC_TUNABLES="glibc.malloc.hugetlb=1",
)
# Engines of ranks that are killed, or that nobody closes, leave the files of their sockets. A
# socket's path is of 107 characters at most, and `tmp_path` has many.
SOCKETS = tempfile.TemporaryDirectory(prefix="sockets-", ignore_cleanup_errors=True)
os.environ["VLLM_RPC_BASE_PATH"] = SOCKETS.name

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_WORKER:
    # The last thing that a worker does, behind what libraries do at the end: to free all that it
    # has imported would take seconds more.
    atexit.register(os._exit, 0)

# Nothing of what the tests import is garbage. To look for some takes a tenth of the time until the
# first of them runs, and much of that of collections later.
gc.disable()


# The address of the forkserver (harness.py) that all workers share: what it imports takes ten
# seconds, and most of a GiB.
SHARED = "MINIRL_TESTS_FORKSERVER"


def pytest_configure(config) -> None:
    server = forkserver._forkserver
    if IS_WORKER and SHARED in os.environ:
        server._forkserver_address = os.environ.pop(SHARED)  # No test's program is to find it.
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = resource_tracker.ensure_running
    elif config.getoption("dist", "no") != "no":
        server.set_forkserver_preload(["tests.preload"])
        server.ensure_running()
        os.environ[SHARED] = server._forkserver_address


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    if not IS_WORKER:
        gc.unfreeze()  # Libraries count what is left at the end, to which no worker comes.
    SOCKETS.cleanup()


@pytest.hookimpl(optionalhook=True)  # of a plugin that may not be installed
def pytest_xdist_auto_num_workers(config) -> int:
    """How many processes `-n auto` runs tests in. Most tests keep one core busy, some two, and some
    wait: one process more than there are cores fills their time. What needs a GPU needs all of its
    memory."""
    if config.option.markexpr == "gpu":
        return 0
    return min(4, len(os.sched_getaffinity(0)) + 1)


# The older pair, and how minirl refuses what it cannot do.
IS_OLD = version("torch").startswith("2.11.")
REFUSED = re.compile("(use|install) (vLLM 0.32|torch 2.13)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With torch 2.11 and vLLM 0.26, a refusal is an expected failure."""
    report = yield
    if IS_OLD and report.failed and REFUSED.search(report.longreprtext):
        report.outcome = "skipped"
        report.wasxfail = "refused with torch 2.11 and vLLM 0.26"
    return report


@pytest.fixture(scope="module")
def chosen(request) -> set[str]:
    """The families of this module's tests that are to run: `-k arcee` makes one model, not all."""
    items = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return {param["family"] for param in params if "family" in param}


@pytest.fixture(autouse=True)
def end_of_programs():
    """End what a test has started: one that failed has not come to it."""
    yield
    programs = sys.modules.get("programs")  # Tests of programs have imported it.
    if programs:
        for running in programs.Running.started:
            running.kill()
        programs.Running.started.clear()
