"""Files whose tests take longest come first, so that no one of them is left over at the end of a parallel run."""

import os

import pytest

import warm

os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "True")  # as scikit-learn sets it where a test imports that
warm.fork_templates()

LONGEST_FIRST = (
    "test_hosts",
    "test_installed",
    "test_tour",
    "test_contract",
    "test_buffers",
    "test_ps",
    "test_fit",
    "test_integrations",
    "test_compare",
    "test_ray",
    "test_template_scripts",
    "test_cluster",
    "test_placed",
    "test_fuzz_files",
    "test_page_browser",
    "test_svd_runs",
    "test_lossy_runs",
    "test_serve",
    "test_private_rounds",
    "test_cli",
    "test_serve_browser",
    "test_quota",
    "test_elastic",
    "test_page_hostile",
    "test_watchdog",
    "test_devices_https",
    "test_first_run",
    "test_c10d_table",
    "test_replay",
    "test_pipeline",
    "test_disk_full",
    "test_federated_algorithms",
    "test_callbacks",
    "test_boosting_cli",
    "test_roles",
    "test_resume",
    "test_hostile",
    "test_sharded_memory",
    "test_supervisor",
    "test_loop",
    "test_links",
    "test_ps_parameters",
    "test_federated",
    "test_c10d_collectives",
)


@pytest.fixture(scope="module")
def compiler_imported() -> None:
    """For processes that `warm` starts with `compiler=True`; what is forked for it lives as long as the tests do."""
    warm.import_compiler()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In place, and with the order of a file's own tests as it is."""
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
