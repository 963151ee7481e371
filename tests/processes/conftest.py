"""Files whose tests take longest come first, so that no one of them is left over at the end of a parallel run."""

import pytest

LONGEST_FIRST = (
    "test_hosts",
    "test_installed",
    "test_ps",
    "test_integrations",
    "test_cluster",
    "test_fit",
    "test_loop",
    "test_fuzz_files",
    "test_compare",
    "test_c10d_failures",
    "test_page_strangers",
    "test_cli",
    "test_page_cli",
    "test_watchdog",
    "test_contract",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In place, and with the order of a file's own tests as it is."""
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
