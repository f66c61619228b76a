"""Schedule, decay groups and gradient norm."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise import optim
from shardwise.config import OptimizerConfig


@given(
    total=st.integers(1, 500),
    warmup=st.one_of(st.floats(0, 0.99), st.integers(1, 100)),
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    min_lr=st.floats(0, 1),
)
def test_the_learning_rate_rises_to_lr_then_never_rises_again(total, warmup, schedule, min_lr):
    config = OptimizerConfig(lr=2.0, warmup=warmup, schedule=schedule, min_lr=min_lr)
    rates = [optim.lr_at(config, step, total) for step in range(total)]
    warm = min(optim.warmup_steps(warmup, total), total)
    assert all(0 <= rate <= 2.0 + 1e-12 for rate in rates)
    assert all(a < b for a, b in pairwise(rates[:warm]))
    assert all(a >= b - 1e-12 for a, b in pairwise(rates[warm:]))
    if schedule != "constant" and total > warm:
        assert rates[-1] == pytest.approx(2.0 * min_lr, abs=1e-9)


def test_matrices_decay_and_vectors_do_not():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    groups = optim.make_optimizer(model, OptimizerConfig(lr=1e-3, weight_decay=0.5)).param_groups
    assert [(group["weight_decay"], sorted(p.ndim for p in group["params"])) for group in groups] == [
        (0.5, [2]),
        (0.0, [1, 1, 1]),
    ]


def test_the_square_sum_is_the_squared_norm_and_scaling_scales_it():
    params = [torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(1))]
    for param in params[:2]:
        param.grad = torch.randn_like(param)
    expected = sum(float(p.grad.square().sum()) for p in params[:2])
    assert float(optim.local_square_sum(params)) == pytest.approx(expected, rel=1e-6)
    optim.scale_gradients(params, 0.5)
    assert float(optim.local_square_sum(params)) == pytest.approx(expected / 4, rel=1e-6)


def test_no_gradient_at_all_has_norm_zero():
    assert float(optim.local_square_sum([torch.nn.Parameter(torch.zeros(2))])) == 0
