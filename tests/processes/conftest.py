"""Files whose tests take longest come first, so that no one of them is left over at the end of a parallel run."""

import os

import pytest

from manyhands.training.dynamo import defer

os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "True")  # as scikit-learn sets it where a test imports that

defer()  # or stepping an optimizer here imports torch's compiler, for seconds; what needs it, imports it

LONGEST_FIRST = (
    "test_hosts",
    "test_installed",
    "test_placed",
    "test_ps",
    "test_integrations",
    "test_cluster",
    "test_tour",
    "test_contract",
    "test_fit",
    "test_sweep",
    "test_private_rounds",
    "test_lossy_runs",
    "test_loop",
    "test_compare",
    "test_svd_runs",
    "test_fuzz_files",
    "test_scaling",
    "test_cli",
    "test_pipeline",
    "test_first_run",
    "test_quota",
    "test_elastic",
    "test_watchdog",
    "test_callbacks",
    "test_replay",
    "test_devices_https",
    "test_roles",
    "test_c10d_failures",
    "test_page_strangers",
    "test_page_cli",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In place, and with the order of a file's own tests as it is."""
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
