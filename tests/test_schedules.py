"""Schedules against their formulas, and inside LambdaLR."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

from lightning_fp4.schedules import fp4_warmup_cosine, steps_of_tokens, warmup_cosine


def test_warmup_cosine_has_the_values_of_its_formula():
    schedule = functools.partial(warmup_cosine, warmup_steps=10, total_steps=110, final=0.1)
    assert [schedule(s) for s in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert schedule(9) == pytest.approx(1.0)
    for step in (10, 35, 60, 110):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 10) / 100))
        assert schedule(step) == pytest.approx(0.1 + 0.9 * cosine)
    assert schedule(110) == schedule(5000) == pytest.approx(0.1)


def test_fp4_schedule_decays_then_turns_into_a_cosine():
    every = steps_of_tokens(50e9, tokens_per_step=50e6)
    assert every == 1000
    schedule = functools.partial(
        fp4_warmup_cosine,
        warmup_steps=100,
        total_steps=8100,
        peak=0.8,
        decay=0.15,
        decay_every_steps=every,
        cosine_start=4100,
        final=0.05,
    )
    assert schedule(99) == schedule(100) == pytest.approx(0.8)
    assert schedule(1100) == pytest.approx(0.8 * 0.85)
    assert schedule(3100) == pytest.approx(0.8 * 0.85**3)
    assert schedule(4099) == pytest.approx(schedule(4100), rel=1e-3)
    assert schedule(4100) == pytest.approx(0.8 * 0.85**4)
    assert schedule(6100) == pytest.approx((0.8 * 0.85**4 + 0.04) / 2)
    assert schedule(8100) == schedule(9999) == pytest.approx(0.04)
    values = [schedule(s) for s in range(100, 9000)]
    assert all(a >= b for a, b in itertools.pairwise(values))


def test_a_decay_below_the_final_value_does_not_rise_again():
    schedule = functools.partial(
        fp4_warmup_cosine, warmup_steps=0, total_steps=100, decay=0.9, decay_every_steps=10, cosine_start=50, final=0.5
    )
    assert schedule(60) == schedule(100) == pytest.approx(1e-5)


def test_it_works_in_lambda_lr_and_resumes():
    def make():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        schedule = functools.partial(warmup_cosine, warmup_steps=4, total_steps=20)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    def run(optimizer, scheduler, steps):
        rates = []
        for _ in range(steps):
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
        return rates

    straight = run(*make(), 12)
    assert straight == pytest.approx([2 * warmup_cosine(s, warmup_steps=4, total_steps=20) for s in range(12)])
    optimizer, scheduler = make()
    first = run(optimizer, scheduler, 5)
    other_optimizer, other_scheduler = make()
    other_optimizer.load_state_dict(optimizer.state_dict())
    other_scheduler.load_state_dict(scheduler.state_dict())
    assert first + run(other_optimizer, other_scheduler, 7) == pytest.approx(straight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": 10, "total_steps": 10}, "must come in this order"),
        ({"warmup_steps": 5, "total_steps": 10, "cosine_start": 3}, "must come in this order"),
        ({"warmup_steps": 1, "total_steps": 10, "decay": 0.15}, "steps_of_tokens"),
        ({"warmup_steps": 1, "total_steps": 10, "decay": 1.0, "decay_every_steps": 1}, "below 1"),
        ({"warmup_steps": 1, "total_steps": 10, "final": 2.0}, "from 0 to 1"),
    ],
)
def test_errors_say_what_was_passed(options, message):
    with pytest.raises(ValueError, match=message):
        fp4_warmup_cosine(0, **options)
    with pytest.raises(ValueError, match="tokens_per_step=0"):
        steps_of_tokens(1, 0)
