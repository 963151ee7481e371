"""Policies: the networks' shapes and first weights, actions drawn from scores, and what is refused."""

import pytest
import torch
from torch import Tensor, nn

from manyhands.errors import UserError
from manyhands.workloads.rl.policies import ActorCritic, check_policy, choose, scorer
from manyhands.workloads.rl.rollouts import RolloutSpec

PRECISIONS = [torch.float32, torch.float64, torch.bfloat16]  # the last is drawn by torch's operations


def spec_of(shape: tuple[int, ...], kind: torch.dtype) -> RolloutSpec:
    return RolloutSpec(length=5, observation_shape=shape, observation_dtype=kind)


# ---------------------------------------------------------------------------------------------------- networks


@pytest.mark.parametrize(
    ("shape", "kind", "parameters"),
    [
        ((4,), torch.float32, 2 * (4 * 64 + 64 + 64 * 64 + 64) + 64 * 6 + 6 + 65),
        ((10, 10, 4), torch.bool, 2 * (400 * 64 + 64 + 64 * 64 + 64) + 64 * 6 + 6 + 65),
        ((), torch.int64, 2 * (64 + 64 + 64 * 64 + 64) + 64 * 6 + 6 + 65),
        # 16 filters of 8×8, 32 of 4×4 and 256 units, as Mnih et al. (2016) have it for 4 frames of 84×84
        ((4, 84, 84), torch.uint8, 4112 + 8224 + (9 * 9 * 32 * 256 + 256) + 256 * 6 + 6 + 257),
        ((3, 20, 20), torch.uint8, 3088 + 8224 + (32 * 256 + 256) + 256 * 6 + 6 + 257),
    ],
)
def test_the_network_fits_its_observations(
    shape: tuple[int, ...], kind: torch.dtype, parameters: int
) -> None:
    policy = ActorCritic(shape, 6)
    check_policy(policy, spec_of(shape, kind), 6)
    assert sum(one.numel() for one in policy.parameters()) == parameters


def test_a_shared_trunk_serves_both() -> None:
    apart, shared = ActorCritic((4,), 2), ActorCritic((4,), 2, shared=True)
    trunk = sum(one.numel() for one in shared.policy_trunk.parameters())
    assert sum(one.numel() for one in apart.parameters()) - trunk == sum(
        one.numel() for one in shared.parameters()
    )
    _scores, values = shared(torch.ones(3, 4))
    values.sum().backward()
    assert all(one.grad is not None for one in shared.policy_trunk.parameters())


def test_first_weights_are_orthogonal_and_first_actions_nearly_uniform() -> None:
    policy = ActorCritic((64,), 5).double()
    for layer in (policy.policy_trunk[0], policy.policy_trunk[2]):
        torch.testing.assert_close(
            layer.weight @ layer.weight.T, 2 * torch.eye(64).double(), atol=1e-5, rtol=0
        )
        assert not layer.bias.any()
    scores, _values = policy(torch.randn(100, 64, dtype=torch.float64))
    assert float((scores.detach().softmax(1) - 0.2).abs().max()) < 0.02


def test_bytes_are_seen_as_shares_of_white() -> None:
    policy = ActorCritic((128,), 2).double()
    bytes_seen = torch.arange(256).reshape(2, 128).to(torch.uint8)
    for found, expected in zip(policy(bytes_seen), policy(bytes_seen.double() / 255), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((4,), torch.float32), ((3,), torch.uint8), ((5, 2), torch.float64), ((3, 20, 20), torch.uint8)],
)
@pytest.mark.parametrize("rows", [1, 8, 100])  # the last is more than numpy is given
def test_scores_alone_are_those_of_the_policy(shape: tuple[int, ...], kind: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    observations = torch.randint(256, (rows, *shape), generator=generator).to(kind)
    for precision, error in ((torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 0)):
        policy = ActorCritic(shape, 3).to(precision)
        scores_of = scorer(policy)
        with torch.no_grad():
            policy.scores.weight.mul_(100)  # in place, so it is seen
            policy.policy_trunk[0].bias.fill_(0.1)
            torch.testing.assert_close(
                scores_of(observations), policy(observations)[0], rtol=error, atol=error
            )


def test_scores_alone_of_a_policy_of_ones_own() -> None:
    policy = Fixed(lambda n: (torch.full((n, 2), 3.0), torch.zeros(n)))
    assert scorer(policy)(torch.zeros(4, 1)).tolist() == [[3.0, 3.0]] * 4


# ------------------------------------------------------------------------------------------------------ actions


@pytest.mark.parametrize("precision", PRECISIONS)
def test_actions_are_as_frequent_as_their_probabilities(precision: torch.dtype) -> None:
    """Numbers that fill [0, 1) evenly meet each action as often as it is probable, to one in their number."""
    scores = torch.tensor([0.5, -1.0, 2.0, float("-inf"), 0.0]).to(precision)
    count = 100_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    actions, log_probs = choose(scores.expand(count, 5), uniforms)
    expected = torch.distributions.Categorical(logits=scores.double())
    torch.testing.assert_close(
        actions.bincount(minlength=5) / count, expected.probs.float(), atol=1.1 / count, rtol=0
    )
    assert actions.dtype == torch.int64
    assert log_probs.dtype == precision
    torch.testing.assert_close(log_probs, expected.log_prob(actions).to(precision))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_action_follows_from_its_own_row(precision: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = (3 * torch.randn((37, 6), generator=generator)).to(precision)
    uniforms = torch.rand(37, generator=generator, dtype=torch.float64)
    actions, log_probs = choose(scores, uniforms)
    for begin, end in ((0, 1), (1, 5), (5, 21), (21, 37)):
        some, of_some = choose(scores[begin:end], uniforms[begin:end])
        assert torch.equal(some, actions[begin:end])
        assert torch.equal(of_some, log_probs[begin:end])
    strided = choose(scores.T.contiguous().T, uniforms.repeat_interleave(2)[::2])
    assert torch.equal(strided[0], actions)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_ends_of_the_interval_give_possible_actions(precision: torch.dtype) -> None:
    scores = torch.tensor([[float("-inf"), 1.0, 1.0, float("-inf")]]).to(precision).expand(2, 4)
    actions, log_probs = choose(scores, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
    assert actions.tolist() == [1, 2]
    torch.testing.assert_close(log_probs, torch.full((2,), -0.6931471805599453).to(precision))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
@pytest.mark.parametrize("shape", [(4,), (4, 84, 84)])
def test_a_gpu_draws_the_same(shape: tuple[int, ...]) -> None:
    policy = ActorCritic(shape, 6).double()
    observations = torch.randn((20, *shape), generator=torch.Generator().manual_seed(1)).double()
    uniforms = torch.rand(20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        expected, of_expected = choose(scorer(policy)(observations), uniforms)
        actions, log_probs = choose(scorer(policy.cuda())(observations.cuda()), uniforms.cuda())
    assert torch.equal(actions.cpu(), expected)
    torch.testing.assert_close(log_probs.cpu(), of_expected, rtol=0, atol=1e-10)


def test_drawing_gives_no_gradient() -> None:
    scores = torch.zeros((2, 3), requires_grad=True)
    assert not choose(scores, torch.zeros(2))[1].requires_grad


# ---------------------------------------------------------------------------------------------- what is refused


class Fixed(nn.Module):
    """Whatever it is given, it answers with `outputs` of the number of observations."""

    def __init__(self, outputs: object) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, observations: Tensor) -> object:
        return self.outputs(len(observations)) if callable(self.outputs) else self.outputs


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        (lambda n: torch.zeros(n, 2), "it gave a Tensor; it must give (scores, values)"),
        (lambda n: (torch.zeros(n, 2), 0.0), "it gave a tuple; it must give (scores, values)"),
        (
            lambda n: (torch.zeros(n, 3), torch.zeros(n)),
            "its scores are of shape (3, 3); they must be (3, 2), as the environment has 2 actions",
        ),
        (
            lambda n: (torch.zeros(n, 2), torch.zeros(n, 1)),
            "its values are of shape (3, 1); they must be (3,)",
        ),
        (
            lambda n: (torch.zeros(n, 2, dtype=torch.int64), torch.zeros(n)),
            "its scores are of type int64; they must be of a floating type",
        ),
        (
            lambda n: (torch.zeros(n, 2), torch.full((n,), float("nan"))),
            "its values are not all finite; check its initial weights",
        ),
        (
            lambda n: (torch.full((n, 2), -torch.inf), torch.zeros(n)),
            "its scores are not all finite; check its initial weights",
        ),
    ],
)
def test_a_policy_that_does_not_fit(outputs: object, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        check_policy(Fixed(outputs), spec_of((4,), torch.float32), 2)
    assert str(caught.value) == f"policy: for observations of shape (3, 4) and type float32 {sentence}"


def test_an_action_may_be_impossible() -> None:
    """Its score is minus infinity; it is never drawn, whatever the number."""
    scores = torch.tensor([[-torch.inf, 0.0]]).expand(3, 2)
    check_policy(Fixed((scores, torch.zeros(3))), spec_of((4,), torch.float32), 2)
    actions, log_probs = choose(scores, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert actions.tolist() == [1, 1, 1]
    assert log_probs.tolist() == [0, 0, 0]


def test_a_policy_that_fails_says_how() -> None:
    with pytest.raises(
        UserError, match=r"of shape \(3, 5\) and type float32 it failed: mat1 and mat2 shapes"
    ):
        check_policy(ActorCritic((4,), 2), spec_of((5,), torch.float32), 2)


def test_the_check_leaves_a_policy_as_it_was() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.rest = nn.BatchNorm1d(4), ActorCritic((4,), 2)

        def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
            return self.rest(self.norm(observations))

    policy = Normed()
    before = {name: one.clone() for name, one in policy.state_dict().items()}
    check_policy(policy, spec_of((4,), torch.float32), 2)
    assert policy.training
    assert policy.norm.training
    for name, one in policy.state_dict().items():
        assert torch.equal(one, before[name])
