"""How many servers: the model and the simulator against the throughput that a deterministic server must have."""

from __future__ import annotations

import math

import pytest

from manyhands.errors import UserError
from manyhands.facts import ComputeTime, LayerTimes, LinkRate, ModelFootprint, TaskProfile
from manyhands.lab.studies.servers_model import (
    ServerModel,
    saturation,
    saturation_of,
    servers_by_formula,
    simulated_rate,
)
from manyhands.lab.studies.servers_study import LivePair, ServersOptions, servers_answer

BATCH = 64
COMPUTE_S, LATENCY_S = 0.02, 1e-4


def model(num_bytes: int = 10**6, apply_s: float = 0.0, consistency: str = "async") -> ServerModel:
    """Workers that take 20 ms a batch, and links of 1 GB/s."""
    layer = LayerTimes(
        name="all", forward=ComputeTime(per_sample_s=COMPUTE_S / BATCH), backward=ComputeTime()
    )
    size = ModelFootprint(parameters=num_bytes, gradients=num_bytes, batch_size=BATCH)
    return ServerModel(
        profile=TaskProfile(layers=(layer,), model=size, optimizer_s=3 * apply_s, owners_s=apply_s),
        consistency=consistency,
        link=LinkRate(latency_s=LATENCY_S, bytes_per_s=1e9),
    )


@pytest.mark.parametrize("consistency", ["async", "bounded:4"])
@pytest.mark.parametrize(("num_bytes", "apply_s"), [(10**6, 0.0), (10**6, 2e-3), (4 * 10**6, 1e-3)])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (8, 1), (32, 1), (32, 2), (64, 4)])
def test_updates_wait_for_the_fullest_of_workers_links_and_optimizers(
    consistency: str, num_bytes: int, apply_s: float, workers: int, servers: int
) -> None:
    """min(w / round, S B / W, S / a): a round has two messages and a step; a server has its part of W and a."""
    round_s = COMPUTE_S + 2 * (LATENCY_S + num_bytes / 1e9) + apply_s / servers
    link = servers * 1e9 / num_bytes
    expected = min(workers / round_s, link, servers / apply_s if apply_s else math.inf)
    made = model(num_bytes, apply_s, consistency)
    assert made.batches_per_s(workers, servers) == pytest.approx(expected, rel=1e-9)
    # Of several servers, the first answers while the others still step: the round is a little shorter.
    assert simulated_rate(made, workers, servers) == pytest.approx(
        expected, rel=0.01 if servers == 1 else 0.12
    )


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (8, 1), (32, 1), (8, 2), (32, 4)])
def test_in_step_a_server_hears_everybody_while_it_still_answers(workers: int, servers: int) -> None:
    """t / w + (max(1, w / S) + 1) W / B: answers leave one by one, and the last push follows the last answer."""
    made = model(consistency="sync")
    samples = math.ceil(BATCH / workers)
    moved_s = (max(1, workers / servers) + 1) * 1e-3
    expected = 1 / (COMPUTE_S * samples / BATCH + 2 * LATENCY_S + moved_s)
    assert made.batches_per_s(workers, servers) == pytest.approx(expected, rel=1e-9)
    assert simulated_rate(made, workers, servers) == pytest.approx(
        expected, rel=0.01 if servers == 1 else 0.15
    )


@pytest.mark.parametrize("servers", [1, 2, 5])
@pytest.mark.parametrize(("num_bytes", "apply_s"), [(10**6, 0.0), (3 * 10**6, 7e-3)])
def test_saturation_is_where_the_servers_are_full(num_bytes: int, apply_s: float, servers: int) -> None:
    made = model(num_bytes, apply_s)
    round_s = COMPUTE_S + 2 * (LATENCY_S + num_bytes / 1e9) + apply_s / servers
    full = round_s * servers / max(num_bytes / 1e9, apply_s)
    # A worker that brings a tenth of the first one's throughput is still worth it.
    expected = math.floor(full) + (full % 1 >= 0.1)
    assert saturation(lambda workers: made.batches_per_s(workers, servers), 10_000) == expected
    assert saturation(lambda workers: made.batches_per_s(workers, servers), expected - 1) is None


def test_cores_are_a_limit_that_no_server_lifts() -> None:
    alone = ServerModel(profile=model(apply_s=5e-3).profile, other_s=5e-3, cores=2)
    assert alone.batches_per_s(1, 1) == pytest.approx(1 / 0.03)
    assert alone.batches_per_s(8, 1) == alone.batches_per_s(8, 4) == pytest.approx(2 / 0.03)


def test_a_few_numbers_share_the_gain_between_them() -> None:
    assert saturation_of({1: 10.0, 2: 20.0, 4: 40.0}) is None
    assert saturation_of({1: 10.0, 2: 19.0, 4: 20.9}) == 2  # 0.95 a worker is less than 1
    assert saturation_of({1: 10.0, 2: 19.0, 4: 21.0}) is None  # exactly a tenth
    assert saturation_of({2: 20.0, 4: 20.0}) == 2


def test_the_formula_and_what_it_leaves_out() -> None:
    """64 workers that push 1 MB each in 20 ms need 3.2 GB/s: four links. Steps of 2 ms each need 6.4 servers."""
    assert servers_by_formula(model(), 64) == 4
    assert servers_by_formula(model(apply_s=2e-3), 64) == 7
    assert servers_by_formula(model(num_bytes=1000), 64) == 1
    assert servers_by_formula(model(consistency="sync"), 8) == 4  # 8 MB in 2.5 ms


@pytest.mark.parametrize("workers", [1, 7, 64, 500])
def test_the_fewest_servers_that_are_enough(workers: int) -> None:
    made = model(apply_s=2e-3)
    wanted = 0.9 * made.batches_per_s(workers, 4096)
    expected = next(servers for servers in range(1, 4097) if made.batches_per_s(workers, servers) >= wanted)
    assert made.servers_needed(workers) == expected


def test_an_answer_says_what_was_seen_and_what_was_not() -> None:
    pairs = [
        LivePair(workers=1, servers=1, seen=[40.0, 41.0, 39.0], predicted=40.0),
        LivePair(workers=2, servers=1, seen=[70.0], predicted=80.0),
        LivePair(workers=4, servers=1, seen=[71.0], predicted=80.0),
    ]
    options = ServersOptions(far_servers="1,2", most_workers=100)
    found = servers_answer(options, pairs, model(apply_s=2e-3), cores=2)
    said = " ".join(found.sentences)
    assert "1 server keeps 12 workers busy, 2 servers keep 24 workers busy" in said
    assert "saturation was seen at 2 workers and predicted at 2 workers" in said
    assert "missed the other 2 pairs by 13 % on average and 14 % at most" in said
    assert found.tables[0].rows[1] == ("2", "1", "70.0", "70.0", "70.0", "80.0", "+14 %")
    assert [row["saturated"] for row in found.figures["saturation"]] == [12, 24]
    assert all("<svg" in chart.picture for chart in found.charts)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"workers": "2,x"}, "--workers 'x' is not an integer of at least 1; write several as 1,2,4"),
        ({"servers": "0"}, "--servers '0'"),
        ({"bandwidth": "fast"}, "--bandwidth: 'fast' is not a rate"),
        ({"latency": "4"}, "--latency: '4' is not a time"),
        ({"consistency": "asink"}, "--consistency"),
        ({"consistency": "softsync:2"}, "give async, sync or bounded:s"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(UserError) as error:
        ServersOptions(**options)
    assert named in str(error.value)
