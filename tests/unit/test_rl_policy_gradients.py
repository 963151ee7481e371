"""Losses against their formulas written row by row, against exact policy gradients, and against each other."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from manyhands.errors import UserError
from manyhands.workloads.rl.policies import ActorCritic
from manyhands.workloads.rl.policy_gradients import A2C, ALGORITHMS, PPO, Impala, PolicyGradient
from manyhands.workloads.rl.rollouts import Rollouts, RolloutSpec

B, T, ACTIONS, GAMMA = 4, 6, 3, 0.9


def policy_of(seed: int) -> ActorCritic:
    torch.manual_seed(seed)
    policy = ActorCritic((2,), ACTIONS, hidden=5).double()
    with torch.no_grad():
        policy.scores.weight.mul_(100)  # actions that differ
    return policy


def rollouts_of(acting: nn.Module, *, seed: int = 0) -> Rollouts:
    """Rollouts with every kind of end: two terminated rows, two truncated, one of which is followed by a gap."""
    generator = torch.Generator().manual_seed(seed)
    spec = RolloutSpec(
        length=T, observation_shape=(2,), observation_dtype=torch.float64, precision=torch.float64
    )
    empty = spec.empty(B)
    observations = torch.randn(empty.observations.shape, generator=generator, dtype=torch.float64)
    actions = torch.randint(ACTIONS, (B, T), generator=generator)
    with torch.no_grad():
        scores, _values = acting(observations[:, :-1].flatten(0, 1))
    log_probs = scores.log_softmax(1).unflatten(0, (B, T)).gather(2, actions[:, :, None])[:, :, 0]
    terminated, truncated, valid = empty.terminated, empty.truncated, torch.ones(B, T, dtype=torch.bool)
    terminated[0, 2] = terminated[1, 5] = truncated[2, 1] = truncated[3, 5] = True
    valid[2, 2] = False
    rewards = torch.randn((B, T), generator=generator, dtype=torch.float64)
    return empty._replace(
        observations=observations, actions=actions, rewards=rewards, terminated=terminated, truncated=truncated,
        valid=valid, log_probs=log_probs, final_values=1.7 * truncated.double(),
    )  # fmt: skip


def gradient(loss: Tensor, policy: nn.Module) -> Tensor:
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(policy.parameters()))])


def learned(algorithm: PolicyGradient, policy: nn.Module, rollouts: Rollouts, update: int = 0) -> Tensor:
    batch = algorithm.part(algorithm.prepare(policy, rollouts), update, 0)
    return gradient(algorithm.loss(policy, batch), policy)


def close(found: Tensor, expected: Tensor, error: float = 1e-12) -> None:
    assert float(expected.abs().max()) > 0.01, "nothing would be compared"
    torch.testing.assert_close(found, expected, rtol=0, atol=error)


# ---------------------------------------------------------------------- against the formula, one row after the other

RowLoss = Callable[[Tensor, Tensor, float, float, float], Tensor]


def by_rows(policy: nn.Module, rollouts: Rollouts, row_loss: RowLoss, entropy_cost: float) -> Tensor:
    """The loss of rows from the last to the first; `row_loss` has each row's log π(a), V and what follows from it."""
    total = torch.zeros((), dtype=torch.float64)
    for b in range(B):
        scores, values = policy(rollouts.observations[b])
        after = values[T].item()
        target_after, advantage_after = after, 0.0
        for t in reversed(range(T)):
            if not rollouts.valid[b, t]:
                continue
            reward, discount = rollouts.rewards[b, t].item(), GAMMA
            if rollouts.terminated[b, t]:
                discount = 0.0
            elif rollouts.truncated[b, t]:
                reward, discount = reward + GAMMA * rollouts.final_values[b, t].item(), 0.0
            probabilities = torch.softmax(scores[t], 0)
            log_prob = probabilities.log()[rollouts.actions[b, t]]
            value = values[t].item()
            with torch.no_grad():
                ratio = math.exp(log_prob.item() - rollouts.log_probs[b, t].item())
                delta = reward + discount * after - value
                # V-trace's and GAE's recursions; with a trace of 1 and the acting policy both are n-step returns
                advantage = reward + discount * target_after - value
                target_after = (
                    value + min(1, ratio) * delta + discount * min(1, ratio) * (target_after - after)
                )
                advantage_after = delta + discount * 0.9 * advantage_after
                after = value
            rest = row_loss(log_prob, values[t], target_after, advantage, advantage_after, ratio)
            total = total + rest + entropy_cost * (probabilities * probabilities.log()).sum()
    return total / (B * T)


def test_the_gradient_of_a2c() -> None:
    policy = policy_of(1)
    rollouts = rollouts_of(policy)

    def row(log_prob, value, target, advantage, _gae, _ratio):
        return -advantage * log_prob + 1.5 * 0.5 * (target - value) ** 2

    expected = gradient(by_rows(policy, rollouts, row, 0.3), policy)
    algorithm = A2C(discount=GAMMA, value_cost=1.5, entropy_cost=0.3)
    close(learned(algorithm, policy, rollouts), expected)


def test_the_gradient_of_impala() -> None:
    acting, policy = policy_of(1), policy_of(2)
    rollouts = rollouts_of(acting)

    def row(log_prob, value, target, advantage, _gae, ratio):
        return -min(1, ratio) * advantage * log_prob + 0.7 * 0.5 * (target - value) ** 2

    expected = gradient(by_rows(policy, rollouts, row, 0.2), policy)
    algorithm = Impala(discount=GAMMA, value_cost=0.7, entropy_cost=0.2)
    close(learned(algorithm, policy, rollouts), expected)


def test_the_gradient_of_ppo() -> None:
    """Of the ratio where it is within the clip or moving back to it, of the values and of the entropy."""
    acting, policy = policy_of(1), policy_of(2)
    rollouts = rollouts_of(acting)
    clipped = []

    def row(log_prob, value, _target, _advantage, advantage, ratio):
        # a generalized advantage whose sign and ratio say whether the clip holds
        held = (advantage > 0 and ratio > 1.1) or (advantage < 0 and ratio < 0.9)
        clipped.append(held)
        policy_loss = torch.zeros(()) if held else -advantage * ratio * log_prob  # ∇r = r ∇log π
        return policy_loss + 0.6 * 0.5 * (advantage + value.item() - value) ** 2

    expected = gradient(by_rows(policy, rollouts, row, 0.1), policy)
    algorithm = PPO(
        discount=GAMMA, trace=0.9, clip=0.1, epochs=1, minibatches=1, value_cost=0.6, entropy_cost=0.1
    )
    close(learned(algorithm, policy, rollouts), expected)
    assert set(clipped) == {True, False}


# -------------------------------------------------------------------------------------------- against each other


@pytest.mark.parametrize(
    "algorithm",
    [
        Impala(discount=GAMMA, value_cost=1, entropy_cost=0.2),
        PPO(discount=GAMMA, trace=1, epochs=1, minibatches=1, value_cost=1, entropy_cost=0.2),
    ],
    ids=["impala", "ppo"],
)
def test_without_lag_all_are_a2c(algorithm: PolicyGradient) -> None:
    policy = policy_of(3)
    rollouts = rollouts_of(policy)
    expected = learned(A2C(discount=GAMMA, value_cost=1, entropy_cost=0.2), policy, rollouts)
    close(learned(algorithm, policy, rollouts), expected)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_the_mean_over_workers_is_what_one_process_learns(name: str) -> None:
    algorithm, policy = ALGORITHMS[name](), policy_of(4)
    if name == "ppo":
        algorithm = PPO(minibatches=3, epochs=2)
    rollouts = rollouts_of(policy_of(5))
    for update in range(algorithm.updates):
        shares = [
            learned(algorithm, policy, rollouts.part(at, at + 1), update) for at in range(B)
        ]  # the one with fewer transitions, too
        close(torch.stack(shares).mean(0), learned(algorithm, policy, rollouts, update))


def test_each_pass_of_ppo_has_every_row_once_in_an_order_of_its_own() -> None:
    algorithm = PPO(epochs=3, minibatches=2)
    assert algorithm.updates == 6
    batch = algorithm.prepare(policy_of(6), rollouts_of(policy_of(6)))
    batch = batch._replace(targets=torch.arange(T).expand(B, T).double())
    orders = []
    for epoch in range(3):
        parts = [algorithm.part(batch, 2 * epoch + number, 7) for number in range(2)]
        assert all(part.observations.shape == (B, T // 2, 2) for part in parts)
        orders.append(torch.cat([part.targets[0] for part in parts]).tolist())
        assert sorted(orders[-1]) == list(range(T))
    assert len(set(map(tuple, orders))) == 3
    other = algorithm.part(batch, 0, 8).targets[0].tolist()
    assert sorted(other) != sorted(orders[0][: T // 2])


def test_ppo_keeps_its_advantages_while_the_policy_moves() -> None:
    """Its second update is the surrogate of the policy before the first."""
    algorithm, policy = PPO(epochs=2, minibatches=1, entropy_cost=0), policy_of(7)
    batch = algorithm.prepare(policy, rollouts_of(policy))
    before = algorithm.loss(policy, algorithm.part(batch, 0, 0))
    with torch.no_grad():
        for one, step in zip(
            policy.parameters(), torch.autograd.grad(before, policy.parameters()), strict=True
        ):
            one -= 0.01 * step
    assert algorithm.loss(policy, algorithm.part(batch, 1, 0)) < before


def test_normalized_advantages_leave_rows_without_a_transition_out() -> None:
    policy = policy_of(8)
    rollouts = rollouts_of(policy)
    plain, scaled = (PPO(normalize=one).prepare(policy, rollouts) for one in (False, True))
    known = plain.advantages[rollouts.valid].numpy()
    expected = (known - known.mean()) / known.std()
    torch.testing.assert_close(scaled.advantages[rollouts.valid], torch.from_numpy(expected))
    torch.testing.assert_close(scaled.targets, plain.targets)


# --------------------------------------------------------------------------------- against exact policy gradients


class Tabular(nn.Module):
    """Scores and values of two states, each a parameter; an observation is the number of a state."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(9)
        self.scores = nn.Parameter(torch.randn((2, 2), generator=generator, dtype=torch.float64))
        self.values = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        return self.scores[observations], self.values[observations]


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_the_expected_gradient_is_that_of_the_expected_return(name: str) -> None:
    """Over all that can happen in two rows; the second row's state depends on the first action."""
    rewards = torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64)
    policy = Tabular()
    probabilities = policy.scores.softmax(1)
    ways = list(itertools.product(range(2), range(2)))
    chances = torch.stack([probabilities[0, first] * probabilities[first, second] for first, second in ways])
    returns = torch.stack([rewards[0, first] + GAMMA * rewards[first, second] for first, second in ways])
    # the policy's gradient leaves out the discount of the second row's state, as all published algorithms do
    later = torch.stack([rewards[first, second] for first, second in ways])
    of_second = torch.stack([probabilities[first, second] for first, second in ways])
    worth = (chances * returns).sum()
    missing = (chances.detach() / of_second.detach() * of_second * later).sum() * (1 - GAMMA)
    expected = torch.autograd.grad(worth + missing, policy.scores)[0]

    spec = RolloutSpec(length=2, observation_shape=(), observation_dtype=torch.int64, precision=torch.float64)
    actions = torch.tensor(ways)
    states = torch.stack([torch.zeros(4, dtype=torch.int64), actions[:, 0], actions[:, 1]], 1)
    log_probs = probabilities.detach().log()[states[:, :2], actions]
    rollouts = spec.empty(4)._replace(
        observations=states, actions=actions, rewards=rewards[states[:, :2], actions], log_probs=log_probs,
        terminated=torch.tensor([[False, True]] * 4), valid=torch.ones(4, 2, dtype=torch.bool),
    )  # fmt: skip
    given = {"discount": GAMMA, "entropy_cost": 0.0, "value_cost": 0.0}
    algorithm = PPO(trace=1, epochs=1, minibatches=1, **given) if name == "ppo" else ALGORITHMS[name](**given)
    found = torch.zeros_like(expected)
    for at, chance in enumerate(chances.tolist()):
        batch = algorithm.part(algorithm.prepare(policy, rollouts.part(at, at + 1)), 0, 0)
        found -= 2 * chance * torch.autograd.grad(algorithm.loss(policy, batch), policy.scores)[0]
    close(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_gpu_learns_the_same(name: str) -> None:
    algorithm, policy = PPO(minibatches=2) if name == "ppo" else ALGORITHMS[name](), policy_of(10)
    rollouts = rollouts_of(policy_of(11))
    expected = learned(algorithm, policy, rollouts, algorithm.updates - 1)
    on_gpu = Rollouts(*(one.cuda() for one in rollouts))
    close(learned(algorithm, policy.cuda(), on_gpu, algorithm.updates - 1).cpu(), expected, 1e-11)


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: A2C(discount=1.5), "discount is 1.5; it must be a number of at least 0 and at most 1"),
        (lambda: PPO(clip=0.0), "clip is 0.0; it must be a number above 0"),
        (lambda: Impala(c=2.0), "c is 2; it must be at most rho, which is 1"),
        (
            lambda: PPO(minibatches=4).check(length=30, workers=1),
            "minibatches is 4; it must divide the 30 rows of a rollout, so that all minibatches are of one size",
        ),
        (
            lambda: PPO(normalize=True).check(length=32, workers=2),
            "normalize is true with 2 workers, each of which would use a mean of its own; leave it out, or train "
            "with one worker",
        ),
    ],
)
def test_settings_that_make_no_sense(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value) == sentence


def test_only_a2c_needs_rollouts_of_the_newest_weights() -> None:
    assert [name for name, one in ALGORITHMS.items() if not one.corrects_lag] == ["a2c"]


class Masked(nn.Module):
    """The first action can be chosen only where the first number is above 0."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        scores, values = self.policy(observations)
        first = torch.arange(ACTIONS) == 0
        return scores.masked_fill(first & (observations[:, :1] <= 0), -torch.inf), values


@pytest.mark.parametrize("algorithm", [A2C, Impala, PPO])
def test_the_entropy_is_of_the_actions_that_can_be_chosen(algorithm: type[PolicyGradient]) -> None:
    policy = Masked(policy_of(1))
    rollouts = rollouts_of(policy_of(2))
    masked = rollouts.observations[:, :-1, 0] <= 0
    rollouts = rollouts._replace(actions=torch.where(masked, rollouts.actions.clamp(min=1), rollouts.actions))
    costs = [algorithm(entropy_cost=cost) for cost in (1.0, 0.0)]
    if algorithm is PPO:
        costs = [PPO(entropy_cost=cost, minibatches=1) for cost in (1.0, 0.0)]
    found = learned(costs[0], policy, rollouts) - learned(costs[1], policy, rollouts)

    entropy = torch.zeros((), dtype=torch.float64)
    for rollout, row in itertools.product(range(B), range(T)):
        if rollouts.valid[rollout, row]:
            scores, _ = policy.policy(rollouts.observations[rollout, row][None])
            entropy = (
                entropy
                + torch.distributions.Categorical(logits=scores[0, int(masked[rollout, row]) :]).entropy()
            )
    expected = torch.autograd.grad(-entropy / (B * T), list(policy.parameters()), materialize_grads=True)
    close(found, torch.cat([one.flatten() for one in expected]))
