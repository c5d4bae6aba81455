"""The tuner with a made-up clock: which candidates it tries, what it believes, and what it keeps. No GPU is needed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ffpa_hf.kernels.triton import choice, configs
from ffpa_hf.kernels.tuning import clock, triton_tuner
from ffpa_hf.kernels.tuning.tiles import Bucket

CPU = torch.device("cpu")
HOPPER = configs.target_for((9, 0))
AMPERE = configs.target_for((8, 6))
FORWARD = Bucket("forward", 512, 16, 1, 8192, 8192, "none", False, 1024)
BACKWARD = FORWARD._replace(direction="backward")
BUCKETS = [
    bucket._replace(head_dim=head_dim, q_len=q_len, busy=busy)
    for bucket in (FORWARD, BACKWARD)
    for head_dim in (64, 72, 256, 320, 512, 1024)
    for q_len, busy in ((1, False), (64, False), (8192, False), (8192, True))
]


class Made:
    """Stands in for the launcher: results are ones, times come from a function of the config."""

    def __init__(self, bucket, device, ms, results=lambda config: torch.ones(4), fails=()):
        self.ms, self.results, self.fails, self.ran = ms, results, fails, []

    def run(self, config):
        self.ran.append(config)
        if config in self.fails:
            raise RuntimeError("out of resources")
        return (self.results(config),)


def tune(bucket, ms, target=HOPPER, mode="fast", **options):
    """(row, the stand-in, configs sampled) of one tuning with made-up times."""
    made = Made(bucket, CPU, ms, **options)
    sampled = []

    class Sampler:
        def __init__(self, run, device):
            run()
            self.config = made.ran[-1]
            self.estimate = ms(self.config)
            sampled.append(self.config)

        def sample(self):
            return self.estimate

        def round_ms(self):
            return self.estimate

    row = triton_tuner.tune(bucket, CPU, mode, setup=lambda *_: made, sampler=Sampler, target=target)
    return row, made, sampled


# --- candidates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [HOPPER, AMPERE, configs.target_for((9, 4), True)], ids=str)
@pytest.mark.parametrize("mode", ["fast", "max"])
def test_candidates_are_legal_different_and_begin_with_the_rule(target, mode):
    for bucket in BUCKETS:
        found = triton_tuner.candidates(bucket, target, mode)
        ruled = choice.by_rule(bucket.direction, triton_tuner.problem_of(bucket), target)
        assert found[0] == ruled and len(set(found)) == len(found)
        for config in found[1:]:
            assert configs.is_legal(config, bucket.head_dim, target.smem_limit, 2, target.tma), config


def test_the_short_list_is_short_and_the_grid_is_not():
    for bucket in BUCKETS:
        short, grid = (len(triton_tuner.candidates(bucket, HOPPER, mode)) for mode in ("fast", "max"))
        assert 2 <= short <= 14, bucket
        assert grid > 1.5 * short, bucket


def test_widths_that_come_to_the_same_columns_are_one_candidate():
    found = triton_tuner.candidates(FORWARD._replace(head_dim=64), HOPPER, "max")
    shapes = [replace(config, width=0) for config in found if isinstance(config, configs.ForwardConfig)]
    assert len(set(shapes)) == len(shapes)


def test_one_loop_over_the_keys_is_tried_for_intervals_alone():
    def loops(mask, mode):
        found = triton_tuner.candidates(FORWARD._replace(head_dim=256, mask=mask), HOPPER, mode)
        return {config.phased for config in found if isinstance(config, configs.ForwardConfig)}

    for mode in ("fast", "max"):
        assert loops("intervals", mode) == {True, False} and loops("causal", mode) == {True}


def test_two_kernel_forwards_need_descriptors():
    def wide(target, mode):
        found = triton_tuner.candidates(FORWARD, target, mode)
        return any(isinstance(config, configs.WideConfig) for config in found)

    assert wide(HOPPER, "fast") and wide(HOPPER, "max") and not wide(AMPERE, "max")


# --- choosing ---------------------------------------------------------------------------------------------------------


def by_list(table, otherwise=9.0):
    return lambda config: table.get(config, otherwise)


def test_the_fastest_is_kept_with_its_times():
    ruled, *others = triton_tuner.candidates(FORWARD, HOPPER, "fast")
    row, _, sampled = tune(FORWARD, by_list({ruled: 2.0, others[1]: 1.5, others[2]: 1.8}))
    assert choice.decode(row["tiles"]) == others[1]
    assert (row["ms"], row["rule_ms"], row["mode"]) == (1.5, 2.0, "fast") and row["tried"] == len(sampled)


@pytest.mark.parametrize("ms", [1.99, 1.97, 2.5])
def test_what_lies_within_the_noise_of_the_rule_is_no_gain(ms):
    ruled, *others = triton_tuner.candidates(FORWARD, HOPPER, "fast")
    row, _, _ = tune(FORWARD, by_list({ruled: 2.0, others[0]: ms}))
    assert choice.decode(row["tiles"]) == ruled and row["ms"] == row["rule_ms"] == 2.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1.05, 0.0])
def test_a_fast_config_with_wrong_results_is_not_believed(wrong):
    ruled, *others = triton_tuner.candidates(FORWARD, HOPPER, "fast")
    spoiled = torch.ones(4)
    spoiled[2:] = wrong
    row, _, sampled = tune(
        FORWARD,
        by_list({ruled: 2.0, others[0]: 0.1}),
        results=lambda config: spoiled if config == others[0] else torch.ones(4),
    )
    assert others[0] not in sampled and choice.decode(row["tiles"]) == ruled


def test_dead_rows_must_be_dead_for_all():
    dead = torch.tensor([1.0, float("-inf")])
    assert triton_tuner._agree((dead,), (dead.clone(),))
    assert not triton_tuner._agree((torch.tensor([1.0, 3.0]),), (dead,))
    assert not triton_tuner._agree((dead,), (torch.tensor([1.0, 3.0]),))


def test_configs_that_fail_are_passed_over_and_a_failing_rule_is_not():
    ruled, *others = triton_tuner.candidates(FORWARD, HOPPER, "fast")
    row, _, _ = tune(FORWARD, by_list({ruled: 2.0, others[0]: 1.0, others[1]: 1.2}), fails=(others[0],))
    assert choice.decode(row["tiles"]) == others[1]
    with pytest.raises(RuntimeError, match="resources"):
        tune(FORWARD, by_list({}), fails=(ruled,))


def test_the_best_parts_of_a_backward_are_joined():
    ruled = choice.by_rule("backward", triton_tuner.problem_of(BACKWARD), HOPPER)
    scores, product = triton_tuner._SCORES[2], triton_tuner._PRODUCTS[2]

    def ms(config):
        return 10.0 - 2.0 * (config.scores == scores) - (config.query == product) - 0.5 * (config.key == product)

    row, _, _ = tune(BACKWARD, ms)
    best = choice.decode(row["tiles"])
    assert best == replace(ruled, scores=scores, query=product, key=product)
    assert row["ms"] == 6.5 and row["rule_ms"] == 10.0


def test_the_best_parts_of_a_wide_forward_are_joined_in_a_full_search():
    product = configs.ProductConfig(128, 256, 64, 8, 3)
    scores = configs.ScoresConfig(128, 128, 32, 4, 3)

    def ms(config):
        if not isinstance(config, configs.WideConfig):
            return 20.0
        return 10.0 - 2.0 * (config.scores == scores) - (triton_tuner._plain(config.product, 512) == product)

    row, _, _ = tune(FORWARD, ms, mode="max")
    best = choice.decode(row["tiles"])
    assert best.scores == scores and row["ms"] == 7.0


def test_memory_is_filled_with_nan_while_a_candidate_proves_itself_and_the_mode_is_put_back():
    seen = []

    def results(config):
        seen.append(bool(torch.empty(8).isnan().all()))
        return torch.ones(4)

    tune(FORWARD, by_list({}), results=results)
    assert seen[0] and seen.count(True) >= len(seen) // 2  # timing itself runs without
    assert not torch.are_deterministic_algorithms_enabled()


def test_tuning_leaves_the_callers_random_numbers_alone():
    state = torch.get_rng_state()
    triton_tuner.Setup(FORWARD._replace(head_dim=64, q_len=16, kv_len=16, lanes=1, busy=True), CPU)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("mask", ["none", "causal", "intervals"])
def test_a_bucket_runs_through_the_launcher(direction, mask, monkeypatch):
    bucket = Bucket(direction, 64, 1, 1, 32, 64, mask, mask == "none", 1024)
    half = torch.float16  # the interpreter multiplies bfloat16 wrongly
    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *args, **kwargs: real(*args, **{**kwargs, "dtype": half}))
    setup = triton_tuner.Setup(bucket, CPU)
    target = configs.target_for(None)
    configs_ = triton_tuner.candidates(bucket, target, "fast")
    first = setup.run(configs_[0])
    assert all(torch.isfinite(part).all() for part in first)
    assert triton_tuner._agree(setup.run(configs_[1]), first)


# --- the clock --------------------------------------------------------------------------------------------------------


def test_medians_are_sampled_in_turn():
    order = []

    class Sampler:
        def __init__(self, name, ms):
            self.name, self.estimate = name, ms

        def sample(self):
            order.append(self.name)
            return self.estimate + len(order)

        def round_ms(self):
            return self.estimate

    clock.medians([Sampler("a", 10.0), Sampler("b", 30.0)], seconds=0.2)
    assert order == ["a", "b"] * 5
    order.clear()
    clock.medians([Sampler("a", 10.0), Sampler("b", 30.0)], seconds=0.01)
    assert order == ["a", "b"], "a slow call is not repeated for the sake of statistics"


def test_a_sampler_times_what_it_is_given():
    import time

    sampler = clock.Sampler(lambda: time.sleep(0.003), CPU)
    assert 2.9 < sampler.sample() < 30 and sampler.round_ms() >= 2.9
    runs = []
    quick = clock.Sampler(lambda: runs.append(1), CPU)
    runs.clear()
    quick.sample()
    assert len(runs) == 20, "short calls are timed several at a time"


def test_one_bucket_of_each_kind_is_compiled_ahead():
    shorter = FORWARD._replace(q_len=1024, kv_len=1024)
    causal = FORWARD._replace(mask="causal")
    assert triton_tuner.without_doubles([FORWARD, shorter, causal]) == [shorter, causal]
